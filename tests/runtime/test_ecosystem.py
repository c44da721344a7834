"""What transformers reads on a CPU, it and qengine agree on: 16-bit, FP8, compressed-tensors, copies of pickled files.

GPTQ and AWQ need packages with requirements of their own: `tests/ecosystem`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from checkpoint_logits import meets_reference
from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    int_tensors,
    quant_config,
    weights,
)
from fp8_files import make_tiny_fp8, pack_block, pack_tensor
from load_model import load_folder
from qengine.runtime.cache_dir import VARIABLE
from qengine.runtime.pickled import safetensors_copy
from torch_kv import PagedRun
from toy_models import llama_config, llama_tensors, make_tiny, write_model
from written_models import make_written

IDS = [[72, 101, 108, 108, 111, 256, 3, 200], [9, 8, 7, 6, 5, 4, 3, 2]]
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def dense(folder: Path, dtype: str) -> None:
    make_tiny(folder, dtype=dtype, shards=2, tokenizer=False)


def fp8_block(folder: Path) -> None:
    make_tiny_fp8(folder, pack_block, HF_FP8 | {"weight_block_size": [128, 128]}, spread=False)


def fp8_tensor(folder: Path) -> None:
    pack = partial(pack_tensor, leaf="weight_scale_inv")
    make_tiny_fp8(folder, pack, HF_FP8 | {"weight_block_size": None}, spread=False)


Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def compressed(folder: Path, pack: Pack, group: dict[str, Any]) -> None:
    config = llama_config(dtype="bfloat16", quantization_config=quant_config(group, form=group["format"]))
    held: dict[str, torch.Tensor] = {}
    for name, tensor in llama_tensors(config).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            held |= {f"{module}.{leaf}": value for leaf, value in pack(tensor)[0].items()}
        else:
            held[name] = tensor.bfloat16()
    write_model(folder, config, held)


def packed(bits: int, group: int, symmetric: bool = True) -> Callable[[Path], None]:
    size = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    args = group_of(weights(bits, **size, symmetric=symmetric), form="pack-quantized")
    return partial(compressed, pack=partial(int_tensors, bits=bits, group=group, symmetric=symmetric), group=args)


def compressed_fp8(strategy: str, block: list[int] | None = None) -> Callable[[Path], None]:
    args = group_of(fp8_weights(strategy, block), inputs=FP8_DYNAMIC, form="float-quantized")
    return partial(compressed, pack=partial(fp8_tensors, strategy=strategy), group=args)


INT8 = group_of(weights(8, "channel"), inputs=INT8_DYNAMIC, form="int-quantized")


def copied(folder: Path) -> None:
    """A pickled model, and qengine's safetensors copy of it in its place."""
    source = make_tiny(folder.with_name("pickled"), dtype="bfloat16", tokenizer=False)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    folder.symlink_to(safetensors_copy(source), target_is_directory=True)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "float32": partial(dense, dtype="float32"),
    "float16": partial(dense, dtype="float16"),
    "bfloat16": partial(dense, dtype="bfloat16"),
    "pickled": copied,
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "compressed-tensors-w4a16": packed(4, 128),
    "compressed-tensors-w4a16-asym": packed(4, 32, symmetric=False),
    "compressed-tensors-w4a16-channel": packed(4, -1),
    "compressed-tensors-w8a16": packed(8, 128),
    "compressed-tensors-w3a16": packed(3, 64, symmetric=False),
    "compressed-tensors-fp8": compressed_fp8("tensor"),
    "compressed-tensors-fp8-channel": compressed_fp8("channel"),
    "compressed-tensors-fp8-block": compressed_fp8("block", [128, 128]),
    "compressed-tensors-w8a8": partial(
        compressed, pack=partial(int_tensors, bits=8, group=-1, layout="bytes"), group=INT8
    ),
    "written-compressed-tensors-fp8": partial(make_written, plugin="fp8"),
    "written-fp8-block": partial(make_written, plugin="fp8", granularity="block"),
}


def least_cosine(name: str) -> float:
    """transformers dequantises to 16 bits; of W8A8, qengine alone rounds activations."""
    if name.endswith("w8a8"):
        return 0.999
    return 0.9999 if "fp8" in name or "compressed" in name else 0.999999


@pytest.mark.parametrize("name", WRITERS)
def test_both_give_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "model"
    WRITERS[name](folder)
    dequantised = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "compressed" in name else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **dequantised
    ).eval()
    theirs = theirs.float()
    with torch.inference_mode():
        want = theirs(torch.tensor(IDS)).logits
    ours = load_folder(folder)
    got = torch.stack(PagedRun(ours, IDS).run())
    assert meets_reference(got, want, least_cosine(name)) is None
    # Control: one projection of one layer left out must show.
    with torch.inference_mode():
        theirs.model.layers[1].self_attn.o_proj.weight.zero_()
        assert meets_reference(got, theirs(torch.tensor(IDS)).logits, least_cosine(name)) is not None
