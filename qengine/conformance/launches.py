"""Sees what a plugin launches, and compiles it for chips that are not there. Runs as a process of its own, because
Triton is either interpreted or compiled for the whole life of a process.

    python -m qengine.conformance.launches JOB REPORT

JOB is a file that `compile_job.run_worker` wrote. REPORT gets one JSON line for each kernel; standard output is no
place for it, because the compiler prints there what it could not lower.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import PTXASError

ELEMENTS = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments' types and its constants, as a call would have compiled it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    aligned: tuple[int, ...]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        return repr((self.name, self.signature, self.constants, self.aligned, sorted(self.options.items())))

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


def as_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """What Triton would compile for this call: 1 and None become constants, multiples of 16 are known as such."""
    names = [p.name for p in kernel.params]
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned = []
    for i, p in enumerate(kernel.params):
        value = given.get(p.name, p.default)
        special = not p.do_not_specialize
        if p.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature[p.name], constants[(i,)] = "constexpr", value
            continue
        signature[p.name] = element_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if special and type(number) is int and number % 16 == 0:
            aligned.append(i)
    options = {k: v for k, v in kwargs.items() if k not in names and k not in ("grid", "warmup")}
    return Launch(kernel, signature, constants, tuple(aligned), options)


def element_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + ELEMENTS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Inside, kernels are not run but noted, each variant once."""
    found: dict[str, Launch] = {}

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        launch = as_launch(self, args, kwargs)
        found.setdefault(launch.key, launch)

    plain = triton.JITFunction.run
    triton.JITFunction.run = note
    try:
        yield found
    finally:
        triton.JITFunction.run = plain


def compile_launch(launch: Launch, sm: int) -> int:
    """Shared memory of the compiled kernel in bytes; raises whatever the compiler does."""
    attributes = {(i,): ALIGNED for i in launch.aligned}
    source = ASTSource(launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=launch.options)
    return int(compiled.metadata.shared)


@triton.jit
def _nothing(out):  # type: ignore[no-untyped-def]
    pass


def knows(sm: int) -> bool:
    """Whether the installed Triton, with its assembler, makes code for a chip at all."""
    try:
        compile_launch(Launch(_nothing, {"out": "*fp32"}, {}, (), {}), sm)
    except (PTXASError, RuntimeError):
        return False
    return True


def report(sm: int, limit: int, run: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Run something that launches kernels, compile all of them for a chip, and give a row for each; one row
    where there is no compiling for it."""
    if not knows(sm):
        yield {"sm": sm, "unknown": True}
        return
    with recorded() as found:
        run()
    for launch in found.values():
        row: dict[str, Any] = {"sm": sm, "kernel": launch.name, "limit": limit}
        try:
            row["shared"] = compile_launch(launch, sm)
        except Exception as e:  # every failure is a line of the report
            row["error"] = f"{type(e).__name__}: {e}"
        yield row


def main() -> None:
    from qengine.conformance.compile_job import CompileJob, run_job
    from qengine_kernels.launch import SHARED_MEMORY

    torch.set_num_threads(1)
    job: CompileJob = torch.load(sys.argv[1], weights_only=False)
    with open(sys.argv[2], "w", encoding="utf-8") as out:
        for sm in job.targets:
            for row in report(sm, SHARED_MEMORY[sm] * 1024, lambda sm=sm: run_job(job, sm)):  # type: ignore[misc]
                print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()
