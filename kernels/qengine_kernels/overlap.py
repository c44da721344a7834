"""Programmatic dependent launch: a kernel is started while those before it still run, and waits inside for them.

What a kernel does before it waits costs nothing: being launched, and asking for weights, which no kernel before it
writes. sm_90 and up (PTX ISA, griddepcontrol), in a CUDA graph as outside.
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
    """Must come before a kernel's first store, and its first load of anything that a kernel may have written.

    The next kernel may start from here on: it waits in turn until this one has ended, and with it all before.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(p_lines):
    """Asks for the lines of 128 bytes at these addresses, to find them in L2 later; sm_80 and up."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p_lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
