"""Every check of a KV dtype, as a list and as a class of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from qengine.conformance.compile_job import CompileJob, check_report, chip, left_out, run_worker, where_is
from qengine.conformance.kit import Check, Registry
from qengine.conformance.kv_format import KV_FORMAT
from qengine.conformance.kv_steps import KV_STEPS
from qengine.conformance.kv_subject import SMALL, KVSubject
from qengine.conformance.places import places
from qengine.conformance.suite import Suite
from qengine.plugin import KVDtype
from qengine_kernels.launch import SHARED_MEMORY

COMPILE = Registry()


@COMPILE.add("targets")
def targets(subject: KVSubject) -> str | None:
    """Every kernel of a layer compiles for every chip that `capability` claims, within its shared memory."""
    claimed, unknown = 0, []
    for dtype in (torch.float16, torch.bfloat16):
        sides = (subject.plugin(SMALL, "k", dtype), subject.plugin(SMALL, "v", dtype))
        wanted = [sm for sm in subject.targets or SHARED_MEMORY if all(s.capability(chip(sm)) for s in sides)]
        if dtype is torch.bfloat16 and claimed:
            wanted = wanted[-1:]  # types that differ in name only: one chip shows them
        claimed += len(wanted)
        if wanted:
            job = CompileJob(where_is(subject.plugin), wanted, dtype, caches=[(SMALL, 16)])
            unknown += check_report(run_worker(job), f"the cache in {str(dtype).removeprefix('torch.')}")
    return left_out(unknown, claimed)


KV_CHECKS: tuple[Check, ...] = (*KV_FORMAT, *KV_STEPS, *COMPILE)


class KVConformance(Suite, checks=KV_CHECKS):
    """Subclass it in a test file, name the plugin, and pytest runs every check of the kit:

        class TestMyDtype(KVConformance):
            plugin = MyKV
    """

    plugin: ClassVar[type[KVDtype]]
    targets: ClassVar[Sequence[int] | None] = None
    """Compute capabilities to compile for; None: all that the format claims."""

    @classmethod
    def make_subject(cls, gpu: bool) -> KVSubject:
        return KVSubject(cls.plugin, places(gpu), cls.targets)
