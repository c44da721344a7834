"""What a compile worker is asked to launch: a plugin's class, and its stored linears or cache shapes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.conformance.kit import CheckFailed, NotApplicable, need
from qengine.conformance.places import INTERPRET_ENV
from qengine.plugin import DeviceInfo, LinearShard, LinearSpec
from qengine_kernels.launch import SHARED_MEMORY

ROWS = (1, 16, 300)
"""Rows of x, so that each of a linear's kernels is launched."""


@dataclass(frozen=True)
class CompileJob:
    """`plugin` and `kernels` (module, file, name) find the classes again in another process; `linears` are (config,
    spec, tensors) of a weight format, `caches` (AttentionSpec, block size) of a KV dtype."""

    plugin: tuple[str, str, str]
    targets: Sequence[int]
    dtype: torch.dtype
    linears: Sequence[tuple[Mapping[str, Any] | None, LinearSpec, Mapping[str, torch.Tensor]]] = ()
    caches: Sequence[tuple[Any, int]] = ()
    kernels: tuple[str, str, str] | None = None


def chip(sm: int) -> DeviceInfo:
    return DeviceInfo("cuda", f"sm_{sm}", divmod(sm, 10), SHARED_MEMORY[sm] * 1024, 16 << 30)


def where_is(plugin: type) -> tuple[str, str, str]:
    """CompileJob's `plugin` for a class."""
    return plugin.__module__, inspect.getfile(plugin), plugin.__qualname__


def find(plugin: tuple[str, str, str]) -> Any:
    """The class that `where_is` described."""
    name, file, path = plugin
    try:
        module = importlib.import_module(name)
    except ImportError:  # a test file is no module that can be found by name
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def run_job(job: CompileJob, sm: int) -> None:
    """Bind and call everything of a job as on a chip; tensors lie on the CPU, and kernels are seen by `recorded`."""
    plugin, info = find(job.plugin), chip(sm)
    for config, spec, tensors in job.linears:
        from qengine.plugin import TensorInfo
        from qengine.runtime.safetensors_file import CODES

        headers = {n: TensorInfo(f"{spec.name}.{n}", CODES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
        scheme = plugin.parse(config).scheme_for(spec, headers)
        if job.kernels is not None:
            scheme = find(job.kernels)().scheme(scheme, spec) or scheme
        op = scheme.bind([LinearShard(spec, dict(tensors))], torch.device("cpu"), info, job.dtype)
        for m in ROWS:
            op(torch.zeros(m, spec.in_features, dtype=job.dtype))
    for spec, block_size in job.caches:
        from qengine.conformance.kv_steps import launch_all

        launch_all(plugin, spec, block_size, info, job.dtype)


def run_worker(job: CompileJob) -> list[dict[str, Any]]:
    """The worker's report. Raises CheckFailed where it dies."""
    environment = {k: v for k, v in os.environ.items() if k != INTERPRET_ENV}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.pt", Path(folder) / "report.jsonl"
        torch.save(job, asked)
        command = [sys.executable, "-m", "qengine.conformance.launches", str(asked), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise CheckFailed(f"launching for sm_{' sm_'.join(map(str, job.targets))} fails: {lines[-1]}")
        return [json.loads(line) for line in answer.read_text(encoding="utf-8").splitlines()]


def check_report(rows: Sequence[Mapping[str, Any]], what: str) -> list[int]:
    """Every kernel must have compiled, within the chip's shared memory. Returns the chips that this Triton compiles
    nothing for, which says nothing about the plugin."""
    unknown = [row["sm"] for row in rows if row.get("unknown")]
    compiled = [row for row in rows if not row.get("unknown")]
    if not rows:
        raise NotApplicable("no Triton kernel is launched on a claimed chip")
    for row in compiled:
        where = f"{what}: sm_{row['sm']} is claimed, but {row['kernel']}"
        error = " ".join(str(row.get("error", "")).split())
        need("error" not in row, f"{where} does not compile for it: {error[:200]}")
        need(row.get("shared", 0) <= row["limit"], f"{where} takes {row.get('shared')} bytes of shared memory, of "
             f"which the chip has {row['limit']}")  # fmt: skip
    return unknown


def left_out(unknown: Sequence[int], claimed: int) -> str | None:
    """What a check of `claimed` compilations says of the chips that `check_report` found unknown. Raises NotApplicable
    where there was none that could be compiled for."""
    if not claimed:
        raise NotApplicable("no CUDA chip is claimed")
    if not unknown:
        return None
    chips = ", ".join(f"sm_{sm}" for sm in sorted(set(unknown)))
    if len(unknown) == claimed:
        raise NotApplicable(f"the installed Triton compiles for none of the claimed chips: {chips}")
    return f"left out, because the installed Triton cannot compile for it: {chips}"
