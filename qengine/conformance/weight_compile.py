"""The check that holds a format's claims against the compiler."""

from __future__ import annotations

import torch

from qengine.conformance.compile_job import CompileJob, check_report, chip, left_out, run_worker, where_is
from qengine.conformance.kit import Registry
from qengine.conformance.weight_subject import WeightSubject
from qengine_kernels.launch import SHARED_MEMORY

COMPILE = Registry()


@COMPILE.add("targets")
def targets(subject: WeightSubject) -> str | None:
    """Every kernel that the op launches compiles for every chip that `capability` claims, within its shared memory."""
    own = subject.stored[0]
    claimed, unknown = 0, []
    for dtype in (torch.float16, torch.bfloat16):
        wanted = [sm for sm in subject.targets or SHARED_MEMORY if own.scheme.capability(chip(sm), dtype)]
        if dtype is torch.bfloat16 and claimed:
            wanted = wanted[-1:]  # types that differ in name only: one chip shows them
        claimed += len(wanted)
        if wanted:
            linears = [(own.config, own.spec, own.copied())]
            kernels = None if subject.kernels is None else where_is(subject.kernels)
            job = CompileJob(where_is(own.plugin), wanted, dtype, linears=linears, kernels=kernels)
            unknown += check_report(run_worker(job), f"{own} in {str(dtype).removeprefix('torch.')}")
    return left_out(unknown, claimed)
