"""How fast bytes move: from pinned host memory to the GPU and back, and within host memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

COPY_BYTES = 256 << 20
REPEATS = 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, the best of a few copies; None for what is not there. `pageable` is without pinning."""

    host_copy: float
    pinned_to_gpu: float | None = None
    pageable_to_gpu: float | None = None
    gpu_to_pinned: float | None = None


def measure_bandwidth(device: torch.device, size: int = COPY_BYTES) -> Bandwidth:
    """`host_copy` counts bytes read and written."""
    host, other = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    copy = 2 * size / _best(lambda: other.copy_(host), device)
    if device.type != "cuda":
        return Bandwidth(copy)
    on_gpu, pinned = torch.empty(size, dtype=torch.uint8, device=device), host.pin_memory()
    return Bandwidth(
        copy,
        size / _best(lambda: on_gpu.copy_(pinned, non_blocking=True), device),
        size / _best(lambda: on_gpu.copy_(host), device),
        size / _best(lambda: pinned.copy_(on_gpu, non_blocking=True), device),
    )


def _best(copy: object, device: torch.device) -> float:
    """Seconds of the fastest of a few calls, the first of which pays for page faults."""
    assert callable(copy)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
