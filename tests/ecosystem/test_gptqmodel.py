"""GPTQ, AWQ and GPTQModel's FP8: what transformers reads on a CPU through GPTQModel, and what GPTQModel writes.

Runs where gptqmodel is installed: `.ci/ecosystem gptqmodel`. Not there, because transformers 5.24 with optimum 2.3 and
GPTQModel 7.6 cannot read them on a CPU: AWQ's gemv, gemv_fast and marlin layouts, per-module `dynamic` rules, a
quantised lm_head (read as random weights), one group for all inputs in 4 bits, and mixtures of experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gptqmodel import GPTQModel
from gptqmodel.quantization.config import FP8Config, GPTQConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint_logits import checkpoint_root, folders, load_logits, meets_reference
from gptq_files import Style, make_tiny_gptq
from load_model import load_folder
from qengine.errors import CheckpointError
from torch_kv import PagedRun
from toy_models import make_tiny, make_tiny_awq
from written_models import make_written

IDS = [[72, 101, 108, 108, 111, 256, 3, 200], [9, 8, 7, 6, 5, 4, 3, 2]]
ROWS = torch.randint(0, 250, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()
LEAST = 0.999
"""Their CPU kernels compute in float16, some with a rounded zero point."""
COARSE = 0.998
"""GPTQModel's own forward pass, in bfloat16."""


def gptq(folder: Path, **style: Any) -> None:
    make_tiny_gptq(folder, Style(**style))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "gptq-g128": partial(gptq, group=128),
    "gptq-v2": partial(gptq, group=32, stored="gptq_v2"),
    "gptq-asym-v1": partial(gptq, group=32, symmetric=False, by_word=True),
    "gptq-asym-v2": partial(gptq, group=64, symmetric=False, stored="gptq_v2"),
    "gptq-act-order": partial(gptq, group=32, shuffle=3),
    "gptq-2bit": partial(gptq, bits=2, group=32),
    "gptq-3bit": partial(gptq, bits=3, group=64),
    "gptq-8bit": partial(gptq, bits=8, group=128),
    "awq-gemm": make_tiny_awq,
    "written-gptq": partial(make_written, plugin="gptq", dtype=torch.float16),
    "written-awq": partial(make_written, plugin="awq", dtype=torch.float16),
}


def theirs(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map="cpu").eval()
    return model


def logits_of(model: torch.nn.Module, ids: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor(ids)).logits.float()
    return out


@pytest.mark.parametrize("name", WRITERS)
def test_both_give_the_same_logits(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    model = theirs(tmp_path)
    got = torch.stack(PagedRun(load_folder(tmp_path), IDS).run())
    assert meets_reference(got, logits_of(model, IDS), LEAST) is None
    # Control: one norm of one layer changed must show.
    with torch.no_grad():
        model.get_submodule("model.layers.1.post_attention_layernorm").weight.neg_()
    assert meets_reference(got, logits_of(model, IDS), LEAST) is not None


def read_by_transformers(name: str) -> bool:
    """Whether transformers can: see the module's docstring."""
    root = checkpoint_root()
    assert root is not None
    config = json.loads((root / name / "config.json").read_text())["quantization_config"]
    odd = config.get("dynamic") or config.get("lm_head") or config.get("version", "gemm") != "gemm"
    return not odd and config["group_size"] != -1 and (root / name / "model.safetensors").is_file()


@pytest.mark.parametrize("name", [n for n in folders("gptqmodel-", "autogptq-", "autoawq-") if read_by_transformers(n)])
def test_files_of_real_tools(name: str, checkpoints: Path) -> None:
    got, _ = load_logits(checkpoints / name)
    ids = load_file(checkpoints / name / "reference.safetensors")["input_ids"]
    assert meets_reference(got, logits_of(theirs(checkpoints / name), ids.tolist()), LEAST) is None


QUANTISED: dict[str, Any] = {
    "gptq-4bit-act-order": GPTQConfig(bits=4, group_size=32, desc_act=True, offload_to_disk=False),
    "gptq-3bit-asym": GPTQConfig(bits=3, group_size=64, sym=False, desc_act=False, offload_to_disk=False),
    "fp8-row": FP8Config(),
    "fp8-block": FP8Config(weight_scale_method="block", weight_block_size=[128, 128]),
    "fp8-dynamic": FP8Config(
        dynamic={
            r"-:.*\.1\.mlp\.up_proj": {},
            r"+:.*o_proj": {"weight_scale_method": "block", "weight_block_size": [64, 32]},
            r".*(q|k)_proj": {"weight_scale_method": "tensor"},
        }
    ),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_what_gptqmodel_writes(name: str, tmp_path: Path) -> None:
    """Quantised by GPTQModel; its own forward pass is the reference."""
    make_tiny(tmp_path / "base", dtype="bfloat16")
    model = GPTQModel.load(str(tmp_path / "base"), QUANTISED[name], dtype=torch.bfloat16)
    model.quantize([{"input_ids": row, "attention_mask": [1] * 32} for row in ROWS], batch_size=1)
    model.save(str(tmp_path / "made"))
    want = logits_of(GPTQModel.load(str(tmp_path / "made"), device="cpu", dtype=torch.bfloat16).model, IDS)
    got = torch.stack(PagedRun(load_folder(tmp_path / "made"), IDS).run())
    assert meets_reference(got, want, COARSE) is None
    base = torch.stack(PagedRun(load_folder(tmp_path / "base"), IDS).run())
    assert torch.cosine_similarity(got, base, dim=-1).min() < 0.999, "control: nothing was quantised"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_asymmetric_zeros_under_the_wrong_name_are_refused(bits: int, tmp_path: Path) -> None:
    """What GPTQModel calibrates is centred enough to tell v1 zeros from v2's."""
    make_tiny(tmp_path / "base", dtype="bfloat16")
    config = GPTQConfig(bits=bits, group_size=32, sym=False, desc_act=False, offload_to_disk=False)
    model = GPTQModel.load(str(tmp_path / "base"), config, dtype=torch.bfloat16)
    model.quantize([{"input_ids": row, "attention_mask": [1] * 32} for row in ROWS], batch_size=1)
    model.save(str(tmp_path / "made"))
    load_folder(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    own = config["quantization_config"]
    stored = own["checkpoint_format"]
    other = "gptq_v2" if stored == "gptq" else "gptq"
    own |= {"checkpoint_format": other, "format": other}
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"^\d+ module.* checkpoint_format {stored} would work"):
        load_folder(tmp_path / "made")
