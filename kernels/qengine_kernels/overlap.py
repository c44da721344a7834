"""Programmatic dependent launch: a kernel is started while the one before it still runs, and waits inside for its end.

What a kernel does before it waits costs nothing, and being launched is most of it: about half a microsecond each on an
H200. sm_90 and up (PTX ISA, griddepcontrol), in a CUDA graph as outside.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

LEAST_SM = 90


@functools.cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_earlier(PDL)`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (LEAST_SM // 10, LEAST_SM % 10):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Must come before a kernel's first load and first store: nothing of the kernels before it is there yet."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start now, and wait; without this, when programs of this one end. For kernels that leave
    most of the chip idle: the programs that wait take places, which slows down all but those (on an H200, a step of one
    sequence took 3.26 ms with this in every kernel, 2.43 without overlap)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
