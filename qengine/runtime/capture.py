"""Captures a forward pass in a CUDA graph, and leaves nothing behind of one that cannot be captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch


def captured(forward: Callable[[], None], pool: torch.cuda._POOL_HANDLE) -> torch.cuda.CUDAGraph:
    """The pass in a graph that takes its memory from `pool`. Raises RuntimeError for one that cannot be captured.

    It is run outside of a graph first, which compiles and loads kernels, makes what they keep, and finds out whether
    the pass waits for the device somewhere. That ends a capture, and torch doesn't clean up behind a capture that has
    ended so: the stream of the capture stays the current one; the allocator, which still believes in it, gives no
    cached memory back any more, not even when it has none left; and random numbers can't be drawn.
    """
    try:
        _without_waiting(forward)
    except RuntimeError:  # perhaps only this once, for something that is kept
        forward()
        _without_waiting(forward)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            forward()
    except RuntimeError:
        _clean_up(pool)
        raise
    return graph


def _clean_up(pool: torch.cuda._POOL_HANDLE) -> None:
    """What the end of a capture does that has not failed."""
    with contextlib.suppress(RuntimeError):  # torch has got so far itself: then there is nothing to do
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with contextlib.suppress(RuntimeError):
        _capture_little()


def _capture_little() -> None:
    """A capture that succeeds, whose end is one for the random number generators too."""
    number = torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)


def _without_waiting(forward: Callable[[], None]) -> None:
    """Raises RuntimeError where the pass waits for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def reason(error: RuntimeError) -> str:
    """The first line of what torch has to say: of what ended the capture, not of the end."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return (str(first).strip().splitlines() or [type(first).__name__])[0]


def free_memory(device: torch.device) -> int:
    """Bytes of the device that nobody holds once this process has given back all it can.

    Also what has to be done before captures: an engine that was used before this one and is collected during a capture
    ends it, because pinned memory is given back only when the device is idle.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
