"""What transformers reads by itself, it and qengine agree on: 16-bit, FP8, and copies of pickled weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_logits import meets_reference
from fp8_files import make_tiny_fp8, pack_block, pack_tensor
from load_model import load_folder
from qengine.runtime.cache_dir import VARIABLE
from qengine.runtime.pickled import safetensors_copy
from torch_kv import PagedRun
from toy_models import make_tiny

IDS = [[72, 101, 108, 108, 111, 256, 3, 200], [9, 8, 7, 6, 5, 4, 3, 2]]
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}


def dense(folder: Path, dtype: str) -> None:
    make_tiny(folder, dtype=dtype, shards=2, tokenizer=False)


def fp8_block(folder: Path) -> None:
    make_tiny_fp8(folder, pack_block, HF_FP8 | {"weight_block_size": [128, 128]}, spread=False)


def fp8_tensor(folder: Path) -> None:
    pack = partial(pack_tensor, leaf="weight_scale_inv")
    make_tiny_fp8(folder, pack, HF_FP8 | {"weight_block_size": None}, spread=False)


def copied(folder: Path) -> None:
    """A pickled model, and qengine's safetensors copy of it in its place."""
    source = make_tiny(folder.with_name("pickled"), dtype="bfloat16", tokenizer=False)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    folder.symlink_to(safetensors_copy(source), target_is_directory=True)


WRITERS: dict[str, Callable[[Path], None]] = {
    "float32": partial(dense, dtype="float32"),
    "float16": partial(dense, dtype="float16"),
    "bfloat16": partial(dense, dtype="bfloat16"),
    "pickled": copied,
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
}


@pytest.mark.parametrize("name", WRITERS)
def test_both_give_the_same_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "model"
    WRITERS[name](folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    theirs = theirs.float()
    with torch.inference_mode():
        want = theirs(torch.tensor(IDS)).logits
    ours = load_folder(folder)
    got = torch.stack(PagedRun(ours, IDS).run())
    least = 0.9999 if name.startswith("fp8") else 0.999999  # transformers dequantises FP8 to 16 bits
    assert meets_reference(got, want, least) is None
    # Control: one projection of one layer left out must show.
    with torch.inference_mode():
        theirs.model.layers[1].self_attn.o_proj.weight.zero_()
        assert meets_reference(got, theirs(torch.tensor(IDS)).logits, least) is not None
