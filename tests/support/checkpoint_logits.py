"""Whole checkpoints that real tools wrote, against the logits that lie beside them in reference.safetensors.

The folders are found through QENGINE_CHECKPOINTS, or as shared/checkpoints beside the repository. `meets_reference` is
the rule that every format is held to; each test also reads its files wrongly and must then miss it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from load_model import plan_folder
from qengine.runtime.loader import LoadReport, load
from torch_kv import PagedRun

COSINE = 0.999
"""Least cosine of any position's logits with the reference."""
MARGIN = 0.05
"""The best token must be the reference's wherever that is ahead of its second best by more than this."""

Reread = Callable[[str, torch.Tensor], torch.Tensor]
"""(tensor name, tensor as stored) -> the tensor that the loader gets: a way to read a file wrongly."""


def checkpoint_root() -> Path | None:
    """The folder of checkpoints, or None where there is none."""
    named = os.environ.get("QENGINE_CHECKPOINTS")
    root = Path(named) if named else Path(__file__).parents[3] / "shared" / "checkpoints"
    return root if root.is_dir() else None


def folders(*prefixes: str) -> list[str]:
    """Names of the checkpoints that start with one of `prefixes`, for parametrising tests."""
    root = checkpoint_root()
    found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root else []
    return [name for name in found if name.startswith(prefixes)]


def load_logits(folder: Path, reread: Reread | None = None) -> tuple[torch.Tensor, LoadReport]:
    """float32 [sequences, tokens, vocab] of the reference's input_ids, through qengine's loader, plugins and model on
    the CPU in float32 with a plain KV cache; and what the loader reported, the plan's warnings first."""
    ids = load_file(folder / "reference.safetensors")["input_ids"]
    model, plan, checkpoint = plan_folder(folder)
    if reread is not None:
        stored = checkpoint.read
        checkpoint.read = lambda name: reread(name, stored(name))  # type: ignore[method-assign]
    report = load(plan)
    report.warnings[:0] = plan.warnings
    return torch.stack(PagedRun(model, ids.tolist()).run()), report


def reference_logits(folder: Path, key: str = "logits") -> torch.Tensor:
    return load_file(folder / "reference.safetensors")[key].float()


def meets_reference(got: torch.Tensor, want: torch.Tensor, cosine: float = COSINE) -> str | None:
    """None when `got` [..., vocab] agrees with `want` at every position, the last ones among them, else the reason."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    least = torch.cosine_similarity(got, want, dim=-1).min().item()
    if not least > cosine:
        return f"cosine {least:.6f}, need more than {cosine}"
    best = want.topk(2).values
    clear = best[..., 0] - best[..., 1] > MARGIN
    other = (got.argmax(-1) != want.argmax(-1)) & clear
    if other.any():
        return f"{int(other.sum())} of {int(clear.sum())} clear best tokens differ"
    return None


def assert_meets_reference(folder: Path, cosine: float = COSINE) -> LoadReport:
    """Load `folder` and hold it to its reference; returns the loader's report."""
    got, report = load_logits(folder)
    problem = meets_reference(got, reference_logits(folder), cosine)
    assert problem is None, f"{folder.name}: {problem}"
    return report


def assert_misses_reference(folder: Path, reread: Reread | None = None) -> None:
    """The control: read wrongly (through `reread`, or what the caller patched), the same files must fail the rule."""
    got, _ = load_logits(folder, reread)
    assert meets_reference(got, reference_logits(folder)) is not None, f"{folder.name}: a wrong reading passes"
