"""Where checks run a plugin: a CPU, CUDA code in Triton's interpreter, a real GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from qengine.conformance.kit import CheckFailed
from qengine.plugin import DeviceInfo
from qengine.runtime.device import cpu_info, cuda_info, select_device

INTERPRET_ENV = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Place:
    """A device as plugins see it. `limits` holds each compute dtype with the relative error that its products may
    have against float32."""

    name: str
    device: torch.device
    info: DeviceInfo
    limits: tuple[tuple[torch.dtype, float], ...]

    def __str__(self) -> str:
        return self.name


def use_interpreter() -> None:
    """Have Triton kernels interpreted in this process; they must not have been imported before."""
    triton = sys.modules.get("triton")
    if triton is not None and not triton.knobs.runtime.interpret:
        for name, module in list(sys.modules.items()):
            if name.startswith("qengine_") and any(isinstance(v, triton.JITFunction) for v in vars(module).values()):
                raise CheckFailed(f"Triton kernels were imported before the kit ({name}): set {INTERPRET_ENV}=1")
    os.environ[INTERPRET_ENV] = "1"


def places(gpu: bool) -> tuple[Place, ...]:
    """A CPU and, of what is said to be CUDA, the interpreter or with `gpu` the real thing.

    The interpreter stands for an sm_80: its bfloat16 and its float8 casts do not work. Raises ConfigError where there
    is no GPU to use.
    """
    cpu = Place("cpu", torch.device("cpu"), cpu_info(), ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)))
    if gpu:
        device, _ = select_device("cuda")
        limits = ((torch.float16, 2e-3), (torch.bfloat16, 1e-2))
        return cpu, Place("gpu", device, cuda_info(device.index or 0), limits)
    use_interpreter()
    info = DeviceInfo("cuda", "Triton interpreter", (8, 0), 163 * 1024, 8 << 30)
    return cpu, Place("interpreter", torch.device("cpu"), info, ((torch.float32, 1e-4), (torch.float16, 2e-3)))
