"""Logits of a checkpoint whose linears run on a GPU, with attention in plain torch beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from load_model import plan_folder
from qengine.layers.batch import Batch, GroupBatch
from qengine.plugin import DeviceInfo
from qengine.runtime.loader import LoadPlan, LoadReport, load
from torch_kv import PagedRun, TorchKVLayer


class HostKVLayer(TorchKVLayer):
    """TorchKVLayer in host memory for a model on a GPU."""

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Batch, group: int) -> None:
        super().write(k.cpu(), v.cpu(), on_host(batch), group)

    def attend(self, q: torch.Tensor, batch: Batch, group: int) -> torch.Tensor:
        return super().attend(q.cpu(), on_host(batch), group).to(q.device)


def on_host(batch: Batch) -> Batch:
    groups = [GroupBatch(g.block_tables.cpu(), g.slot_mapping.cpu()) for g in batch.groups]
    return dataclasses.replace(batch, groups=groups)


def gpu_info(capability: tuple[int, int] | None = None) -> DeviceInfo:
    """The GPU that is there; `capability` pretends that it is an older one."""
    p = torch.cuda.get_device_properties(0)
    own = (p.major, p.minor)
    return DeviceInfo("cuda", p.name, capability or own, p.shared_memory_per_block_optin, p.total_memory)


def gpu_logits(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    flag: str | None = None,
    info: DeviceInfo | None = None,
) -> tuple[list[torch.Tensor], LoadPlan, LoadReport]:
    """float32 [length, vocab] of each sequence, the plan and the loader's report."""
    model, plan, _ = plan_folder(folder, flag, dtype, info or gpu_info())
    report = load(plan)
    return PagedRun(model, sequences, HostKVLayer).run(), plan, report
