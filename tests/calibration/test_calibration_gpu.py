"""A calibration run on a GPU beside the same on the CPU: what is seen, and the scales that are chosen for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from calibration_models import biased
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_copy, make_kv_scales, weights_option
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from toy_models import VOCAB

pytestmark = pytest.mark.gpu


def texts() -> Texts:
    ids = torch.randint(0, VOCAB, (8, 100), generator=torch.Generator().manual_seed(3)).tolist()
    return Texts(ids, 100, "random ids", 8, 8, "")


def layers(folder: Path, out: Path, device: str, method: str) -> dict[str, Any]:
    wanted = RunOptions(kv=KVOptions("fp8_e4m3", "head", method), device=device)
    found: dict[str, Any] = make_kv_scales(folder, out, texts(), wanted)["kv"]["layers"]
    return found


@pytest.mark.parametrize("method", ["amax", "output"])
def test_scales_are_those_of_the_cpu(method: str, tmp_path: Path) -> None:
    folder = biased(tmp_path / "model", 30.0)
    cpu, gpu = (layers(folder, tmp_path / device, device, method) for device in ("cpu", "cuda"))
    for name, figures in gpu.items():
        for side in "kv":
            assert figures[side]["amax"] == pytest.approx(cpu[name][side]["amax"], rel=0.02)
            if method == "amax":
                assert figures[side]["scale"] == pytest.approx(cpu[name][side]["scale"], rel=0.02)
        # The choice between scales that are alike may differ; what it costs may not.
        key = "attention_output_error"
        assert figures[key] == pytest.approx(cpu[name][key], rel=0.1)
        assert figures[f"{key}_at_scale_1"] == pytest.approx(cpu[name][f"{key}_at_scale_1"], rel=0.1)


def test_weights_and_scales_at_once_within_the_stated_memory(tmp_path: Path) -> None:
    weights = weights_option("awq", group_size=64)
    wanted = RunOptions(weights, KVOptions("fp8_e4m3"), device="cuda")
    memory = make_copy(biased(tmp_path / "model", 30.0), tmp_path / "copy", texts(), wanted)["memory"]
    # cuBLAS's workspace, taken once, is no part of the plan.
    assert 0 < memory["peak"] < memory["planned"] + (64 << 20)


def test_the_limit_ends_with_the_run(tmp_path: Path) -> None:
    """What is measured afterwards has limits of its own; the allocator's would be an OutOfMemoryError there."""
    wanted = RunOptions(kv=KVOptions("fp8_e4m3"), device="cuda", max_memory=256 << 20)
    make_kv_scales(biased(tmp_path / "model", 30.0), tmp_path / "out", texts(), wanted)
    assert torch.empty(512 << 20, dtype=torch.uint8, device="cuda").numel() == 512 << 20
