"""KV swap (`--swap-space`): taking its host memory, measuring its costs, and starting it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qengine.core.host_tier import HostTier, stage_rows
from qengine.core.memory import format_bytes
from qengine.core.pages import KVCacheManager
from qengine.core.swap_policy import SwapCosts, SwapMode, SwapPolicy
from qengine.errors import CapacityError
from qengine.runtime import device as devices
from qengine.runtime.kv_host import HostBlocks
from qengine.runtime.report import gib
from qengine.runtime.runner import Runner
from qengine.runtime.warmup import time_prefill

MEASURED_BYTES = 64 << 20
"""Copied to measure the bandwidth, at most."""
REPEATS = 3


def take_host_memory(runner: Runner, num_blocks: int) -> HostBlocks | None:
    """Pin memory for `num_blocks` blocks, if any, and give it to the runner. Raises CapacityError when it isn't there
    any more, or the system refuses."""
    if not num_blocks:
        return None
    nbytes = num_blocks * sum(t.shape[1] for t in runner.cache.storage)
    free = devices.memory(torch.device("cpu")).free
    if nbytes > free:  # pinning would end in the system killing somebody
        raise _refused(nbytes, f"{format_bytes(free)} free now that the weights are loaded")
    try:
        runner.host = HostBlocks(runner.cache.storage, num_blocks)
    except (MemoryError, RuntimeError) as e:  # torch raises either
        if isinstance(e, RuntimeError) and "memory" not in str(e).lower():
            raise
        raise _refused(nbytes, " ".join(str(e).split())) from e
    return runner.host


def _refused(nbytes: int, have: str) -> CapacityError:
    return CapacityError(
        "host memory for --swap-space could not be pinned",
        have=have,
        need=f"{format_bytes(nbytes)}, page-locked",
        hint="a smaller --swap-space",
    )


@dataclass(frozen=True)
class Measured:
    """Seconds of what swapping and computing take here, and of copies of one block alone."""

    costs: SwapCosts
    out: float
    back: float


def measure(runner: Runner, host: HostBlocks, batched_tokens: int, max_model_len: int) -> Measured:
    """Copy the null block out and back, one and many at a time, and run the longest prefill of one request."""
    most = min(max(2, MEASURED_BYTES // host.block_bytes), host.num_blocks)
    out_one, back_one = _time_copies(host, 1)
    out_many, back_many = _time_copies(host, most)
    out, back = _each(out_one, out_many, most), _each(back_one, back_many, most)
    start = max(0.0, out_one + back_one - out - back)
    token = time_prefill(runner, batched_tokens, max_model_len)
    runner.cache.zero_blocks([0])
    return Measured(SwapCosts(out + back, start, token), out, back)


@torch.inference_mode()
def comes_back(host: HostBlocks) -> bool:
    """Whether blocks come back as they went, more of them than one buffer holds, with the device's overwritten
    meanwhile. Takes blocks of the cache, which nobody may have yet, and leaves them zero."""
    stores = [t.view(torch.uint8) for t in host.storage]
    count = min(len(stores[0]) - 1, host.num_blocks, 2 * stage_rows(host.block_bytes) + 1)
    for i, t in enumerate(stores):
        for block in range(1, count + 1):
            t[block] = (torch.arange(t.shape[1], device=t.device) * 31 + block * 7 + i) % 251
    want = [t[1 : count + 1].clone() for t in stores]
    host.copy_out([(1 + i, host.num_blocks - i) for i in range(count)])
    for t in stores:
        t[1 : count + 1] = 255
    host.copy_in([(host.num_blocks - i, 1 + i) for i in range(count)])
    right = all(torch.equal(t[1 : count + 1], was) for t, was in zip(stores, want, strict=True))
    for t in stores:
        t[1 : count + 1] = 0
    return right


def _each(one: float, many: float, count: int) -> float:
    """Seconds of one more block, from those of one and of `count`; of one among many where a busy host blurs that."""
    return (many - one) / (count - 1) if count > 1 and many > 2 * one else many / count


def _time_copies(host: HostBlocks, count: int) -> tuple[float, float]:
    """Seconds of the fastest of some copies of the null block, out to `count` host blocks and back."""
    pairs = [(0, block) for block in range(1, count + 1)]
    turned = [(block, 0) for block in range(1, count + 1)]

    def best(copy: Callable[[], None]) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            copy()
            if host.device.type == "cuda":
                torch.cuda.synchronize(host.device)
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.inference_mode():
        return best(lambda: host.copy_out(pairs)), best(lambda: host.copy_in(turned))


def start_swapping(pages: KVCacheManager, host: HostBlocks, mode: SwapMode, measured: Measured) -> list[str]:
    """Let the KV manager use the host's blocks from now on. Returns lines for the start-up report."""
    policy = SwapPolicy(mode, measured.costs)
    groups = len(pages.groups)
    pages.host = HostTier(host.num_blocks, groups, pages.block_size, policy)
    costs, tokens = measured.costs, pages.block_size
    out, back = (host.block_bytes / seconds / 1e9 for seconds in (measured.out, measured.back))
    moving, computing = costs.of_moving(groups) * 1e3, costs.of_computing(tokens) * 1e3
    lines = [
        f"KV swap: {gib(host.nbytes)} of host memory, {host.num_blocks:,} blocks, "
        f"{host.num_blocks // groups * tokens:,} tokens; policy {mode}",
        f"KV swap measured: {out:.1f} GB/s out, {back:.1f} GB/s back; {tokens} tokens out and back {moving:.3f} ms "
        f"({costs.move * groups * 1e3:.3f} ms each of many), computed again {computing:.3f} ms",
    ]
    if mode == "auto" and not policy.keeps(groups, tokens):
        lines.append("WARNING: computing K/V again is quicker here than copying it: --swap-space is hardly used")
    return lines
