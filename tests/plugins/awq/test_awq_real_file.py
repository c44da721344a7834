"""A file that AutoAWQ wrote: its weights against an independent decoder, its logits against the tool's reference."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from qengine.plugin import LinearSpec, TensorInfo
from qengine_awq.backend import AwqQuant
from qengine_awq.layout import pack, unpack

FOLDER = Path(__file__).parents[2] / "data" / "autoawq-gemm-g128"
CODES = {torch.int32: "I32", torch.float16: "F16"}


def decode(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """float32 [N, K] element by element from the format's description: nibble j' of a word holds column j."""
    nibble_of_column = [0, 4, 1, 5, 2, 6, 3, 7]
    k, n = qweight.shape[0], scales.shape[1]
    column = np.arange(n)
    shift = np.array(nibble_of_column, dtype=np.uint32)[column % 8] * np.uint32(4)
    q = (qweight.view(np.uint32)[:, column // 8] >> shift) & np.uint32(15)
    z = (qzeros.view(np.uint32)[:, column // 8] >> shift) & np.uint32(15)
    g = np.arange(k) // group
    return ((q.astype(np.float32) - z.astype(np.float32)[g]) * scales.astype(np.float32)[g]).T


def modules(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    out: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        out.setdefault(module, {})[leaf] = tensor
    return {m: t for m, t in out.items() if "qweight" in t}


def dense_state(tensors: dict[str, torch.Tensor], config: dict, misread: bool = False) -> dict[str, torch.Tensor]:
    """float32 state dict with the quantised modules dequantised by the plugin (misread: zeros off by one)."""
    quant = AwqQuant.parse(config["quantization_config"])
    state = {n: t.float() for n, t in tensors.items() if t.is_floating_point() and not n.endswith(".scales")}
    for module, own in modules(tensors).items():
        spec = LinearSpec(module, own["qweight"].shape[0], own["scales"].shape[1])
        headers = {leaf: TensorInfo(f"{module}.{leaf}", CODES[t.dtype], tuple(t.shape)) for leaf, t in own.items()}
        scheme = quant.scheme_for(spec, headers)
        assert scheme is not None and scheme.format == "awq 4-bit g128"
        for need in scheme.tensors(spec):
            assert headers[need.leaf].shape == need.shape and headers[need.leaf].dtype in need.dtypes
        w = scheme.dequantize(spec, own)
        if misread:
            w -= own["scales"].float().repeat_interleave(128, 0).t()
        state[f"{module}.weight"] = w
    return state


def logits(state: dict[str, torch.Tensor], config: dict, ids: torch.Tensor) -> torch.Tensor:
    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "torch_dtype", "architectures")}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    missing, extra = model.load_state_dict(state, strict=False)
    assert not missing and not extra
    with torch.inference_mode():
        return model(ids).logits


def test_weights_equal_an_independent_decoder() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    state = dense_state(tensors, config)
    found = modules(tensors)
    assert len(found) == 21
    for module, own in found.items():
        want = decode(own["qweight"].numpy(), own["qzeros"].numpy(), own["scales"].numpy(), 128)
        np.testing.assert_array_equal(state[f"{module}.weight"].numpy(), want)


def test_logits_equal_the_tools_reference() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    reference = load_file(FOLDER / "reference.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    want, ids = reference["logits"], reference["input_ids"]
    torch.testing.assert_close(logits(dense_state(tensors, config), config, ids), want, rtol=1e-4, atol=1e-4)
    control = logits(dense_state(tensors, config, misread=True), config, ids)
    assert torch.nn.functional.cosine_similarity(control.flatten(), want.flatten(), dim=0) < 0.99


def test_packing_gives_back_the_files_words() -> None:
    own = next(iter(modules(load_file(FOLDER / "model.safetensors")).values()))
    assert torch.equal(pack(unpack(own["qweight"])), own["qweight"])
