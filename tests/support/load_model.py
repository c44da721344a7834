"""From a folder to a planned or loaded model on the CPU, the way the engine does it, without an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from qengine.layers.module import ModelContext
from qengine.models.model import Model
from qengine.models.registry import build_model
from qengine.plugin import DeviceInfo
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.loader import LoadPlan, load, resolve
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import select_quant

CPU = DeviceInfo("cpu")


def plan_folder(
    folder: Path, flag: str | None = None, dtype: torch.dtype = torch.float32, info: DeviceInfo = CPU
) -> tuple[Model, LoadPlan, Checkpoint]:
    """Open, choose the format, build and balance; no data is read. `info` may describe a GPU that is not there, as long
    as nothing is loaded."""
    checkpoint = Checkpoint.open(folder)
    config = load_config(checkpoint)
    choice = select_quant(flag, checkpoint.quant)
    ctx = ModelContext(config, torch.device(info.type), info, dtype, torch.float32, max_model_len=2048)
    model = build_model(ctx)
    plan = resolve(model.leaves, checkpoint, choice.quant, choice.dense, info, dtype, about=checkpoint)
    return model, plan, checkpoint


def load_folder(folder: Path, flag: str | None = None, dtype: torch.dtype = torch.float32) -> Model:
    model, plan, _ = plan_folder(folder, flag, dtype)
    load(plan)
    return model
