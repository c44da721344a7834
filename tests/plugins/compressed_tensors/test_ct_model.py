"""A whole file of mixed schemes, written here, through the loader and the model: the logits of its dense meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_tensors_files import (
    FP8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    int_tensors,
    quant_config,
    weights,
)
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.runtime.loader import LoadReport, load
from torch_kv import PagedRun
from toy_models import llama_config, llama_tensors, write_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 96}
IDS = [[3, 17, 60, 4, 90, 33, 2], [8, 8, 1]]


def mixed_config() -> dict[str, Any]:
    return quant_config(
        group_of(fp8_weights("channel"), ["re:.*o_proj$"], FP8_DYNAMIC, "float-quantized"),
        group_of(fp8_weights("tensor"), ["re:.*v_proj$"], None, "naive-quantized"),
        group_of(weights(8, "group", 64, symmetric=False), ["lm_head"], form="pack-quantized"),
        group_of(weights(3, "channel"), ["re:.*down_proj$"], form="naive-quantized"),
        group_of(weights(4, "group", 32, symmetric=False, actorder="group"), ["Linear"], form="pack-quantized"),
        form="mixed-precision",
        ignore=["model.layers.1.mlp.up_proj"],
        version="0.12.2",
    )


def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors by leaf, meaning) of one linear by the config above."""
    if name == "model.layers.1.mlp.up_proj":
        return {"weight": weight}, weight
    if name.endswith("o_proj"):
        return fp8_tensors(weight, "channel")
    if name.endswith("v_proj"):
        return fp8_tensors(weight, "tensor")
    if name == "lm_head":
        return int_tensors(weight, 8, 64, symmetric=False)
    if name.endswith("down_proj"):
        return int_tensors(weight, 3, -1, layout="bytes")
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
    return int_tensors(weight, 4, 32, symmetric=False, g_idx=(torch.arange(weight.shape[1]) // 32)[order])


def write(folder: Path) -> tuple[Path, Path]:
    """(the quantised folder, a dense one with the same meaning)."""
    config = llama_config(**SIZES)
    file, meaning = {}, {}
    for name, tensor in llama_tensors(config, std=0.08).items():
        module, _, leaf = name.rpartition(".")
        if tensor.dim() == 2 and leaf == "weight" and "embed" not in module:
            parts, meaning[name] = stored(module, tensor)
            file |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            file[name] = meaning[name] = tensor
    quantised = write_model(folder / "quantised", config | {"quantization_config": mixed_config()}, file, shards=2)
    return quantised, write_model(folder / "dense", config, meaning)


def logits(folder: Path, spoil: Any = None) -> tuple[torch.Tensor, LoadReport]:
    model, plan, checkpoint = plan_folder(folder)
    if spoil is not None:
        read = checkpoint.read
        checkpoint.read = lambda name: spoil(name, read(name))  # type: ignore[method-assign]
    report = load(plan)
    report.warnings[:0] = plan.warnings
    return torch.cat(PagedRun(model, IDS).run()), report


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write(tmp_path_factory.mktemp("mixed"))


def test_a_file_of_mixed_schemes(folders: tuple[Path, Path]) -> None:
    quantised, dense = folders
    got, report = logits(quantised)
    want, _ = logits(dense)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert report.warnings == []
    kinds = {label.removeprefix("compressed-tensors ") for label in report.bytes_by_format}
    assert kinds >= {
        "4-bit g32 asymmetric act-order", "8-bit g64 asymmetric", "3-bit per channel", "fp8 per tensor",
        "fp8 per channel, dynamic activations", "16-bit",
    }  # fmt: skip


@pytest.mark.parametrize("leaf", ["weight_g_idx", "weight_zero_point", "weight_scale", "weight_packed"])
def test_each_kind_of_tensor_matters(folders: tuple[Path, Path], leaf: str) -> None:
    """Control: one kind of tensor taken from its neighbouring rows."""
    want, _ = logits(folders[1])

    def neighbours(name: str, value: torch.Tensor) -> torch.Tensor:
        return value.flip(0).contiguous() if name.endswith(leaf) and value.numel() > 1 else value

    got, _ = logits(folders[0], neighbours)
    assert torch.cosine_similarity(got, want, dim=-1).min() < 0.99


def test_every_module_with_bad_data_is_listed(folders: tuple[Path, Path]) -> None:
    def spoiled(name: str, value: torch.Tensor) -> torch.Tensor:
        bad = name.endswith(("layers.0.self_attn.o_proj.weight_scale", "lm_head.weight_scale"))
        return torch.full_like(value, float("nan")) if bad else value

    with pytest.raises(CheckpointError, match=r"2 module.*o_proj.weight_scale.*not finite.*lm_head.weight_scale|"
                                              r"2 module.*lm_head.weight_scale.*o_proj.weight_scale"):  # fmt: skip
        logits(folders[0], spoiled)
