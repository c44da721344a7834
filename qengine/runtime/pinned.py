"""Host memory that a GPU copies from at full speed, and while the host does other things."""

from __future__ import annotations

import mmap
import weakref

import torch

from qengine.core.memory import format_bytes
from qengine.errors import CapacityError

REPEATS = 3


class PinnedMemory:
    """`nbytes` bytes of host memory, uint8 [nbytes] in `bytes`, pinned for a CUDA device; plain memory for a CPU.

    Pages are registered rather than allocated pinned: torch's pinned allocator rounds up to powers of two. They are
    mapped for this alone, because torch takes a tensor for pinned by where its storage begins. They are unpinned with
    this object, once the device is idle: a step that nobody waits for any more may still copy. Raises CapacityError
    when the system refuses.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if device.type != "cuda" or not nbytes:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)
            return
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise _refused(str(e), nbytes) from e
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.cuda.device(device):
            _register(self.bytes.data_ptr(), nbytes)
        weakref.finalize(self, _unregister, self.bytes.data_ptr(), device).atexit = False


def _register(address: int, nbytes: int) -> None:
    result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise _refused(f"CUDA error {int(result)}", nbytes)


def _refused(why: str, nbytes: int) -> CapacityError:
    return CapacityError(
        "host memory cannot be pinned",
        have=f"{why} for {format_bytes(nbytes)}",
        need="page-locked memory",
        hint="a smaller --cpu-offload-gb or --swap-space, a higher limit of locked memory (ulimit -l), or more "
        "memory for the container",
    )


def _unregister(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def copy_rate(source: torch.Tensor, to: torch.Tensor) -> float:
    """Bytes a second from pinned host memory to a CUDA device, the best of a few copies."""
    rates = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        to[: source.numel()].copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(source.numel() / max(start.elapsed_time(end) * 1e-3, 1e-9))
    return max(rates)
