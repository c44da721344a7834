"""Qwen2's key biases, large: what calibrated scales are worth there (the toy of benchmarks/calibration_quality.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from load_model import load_folder
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, DeviceInfo, KVLayout, KVScales
from qengine.plugin.discovery import load_plugin
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_kv_scales
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from torch_kv import BLOCK_SIZE, PagedRun

VOCAB = 512


def ids(rows: int, seed: int) -> list[list[int]]:
    return torch.randint(0, VOCAB, (rows, 128), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, random weights, biases of +-900 in every channel of the keys."""
    folder = tmp_path_factory.mktemp("offsets") / "model"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, 900.0, -900.0))
        layer.self_attn.q_proj.weight.data.mul_(0.01)
    model.save_pretrained(folder)
    return folder


def log_probabilities(folder: Path, dtype: str, scales: dict[str, KVScales] | None) -> torch.Tensor:
    """Of held-out ids, behind a cache of `dtype`; without scales at 1.0."""
    model = load_folder(folder)
    names = iter(layer.name for layer in model.attention)

    def bind(spec: AttentionSpec, blocks: int) -> object:
        plugin, name = load_plugin("kv", dtype), next(names)
        k, v = plugin(spec, "k", torch.float32), plugin(spec, "v", torch.float32)
        one = torch.ones(spec.num_kv_heads)
        layout = KVLayout.of(BLOCK_SIZE, k.layout(BLOCK_SIZE), v.layout(BLOCK_SIZE))
        storage = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8)
        own = KVScales(one, one) if scales is None else scales[name]
        return bind_kv_layer(k, v, layout, storage, own, DeviceInfo("cpu"))

    logits: torch.Tensor = torch.cat(PagedRun(model, ids(4, seed=9), bind).run())  # type: ignore[arg-type]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("dtype", "least"), [("fp8_e4m3", 4.0), ("fp8_e5m2", 1.0)])
def test_calibrated_scales_pay(dtype: str, least: float, qwen: Path, tmp_path: Path) -> None:
    """e4m3 clips such keys at 448 and takes them all for the same; e5m2 does not clip, and loses nothing by scales."""
    rows = ids(8, seed=3)
    texts = Texts(rows, 128, "random ids", len(rows), len(rows), "")
    wanted = RunOptions(kv=KVOptions(dtype, most_damage=1e9), device="cpu")
    layers = make_kv_scales(qwen, tmp_path, texts, wanted)["kv"]["layers"]
    scales = {n: KVScales(*(torch.tensor(f[side]["scale"]) for side in "kv")) for n, f in layers.items()}
    exact = log_probabilities(qwen, "auto", None)
    with_scales, without = (
        float((exact.exp() * (exact - log_probabilities(qwen, dtype, own))).sum(-1).mean()) for own in (scales, None)
    )
    assert without > least * with_scales * (1 - 1e-6), (without, with_scales)
    assert all((scales[name].k > 1).all() for name in scales) or dtype != "fp8_e4m3"
