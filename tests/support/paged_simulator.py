"""A model without numbers: runs steps on a simulated KV pool and checks every value that attention would read.

What a real model stores for a token depends on the salt and on all tokens up to it; here exactly that is stored, a
running hash per position. So a block that was shared wrongly, freed too early, overwritten, copied late or found by a
false hit shows at once. The next token is a function of the same hash: any schedule gives the ids of a solo run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

from qengine.core.host_tier import HostTier
from qengine.core.pages import KVCacheManager
from qengine.core.request import Request
from qengine.core.scheduler import Scheduler, SchedulerConfig
from qengine.core.step import KVGroupSpec, SampledToken, ScheduledSequence, Step
from qengine.core.swap_policy import SwapPolicy

VOCAB = 50
FULL = [KVGroupSpec(None, [0])]
SWAP = SwapPolicy("swap")


def next_token(state: int) -> int:
    return hash((1, state)) % VOCAB


def states(request: Request) -> list[int]:
    """The running hash after each known token."""
    state, out = crc32(str(request.cache_salt).encode()), []
    for token in request.token_ids:
        state = hash((state, token))
        out.append(state)
    return out


class PagedSimulator:
    """`memory[block][slot]` of one storage; `poison` names requests whose values are not finite from a token on."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.memory: list[list[object]] = [[None] * manager.block_size for _ in range(manager.pool.num_blocks)]
        self.poison: dict[str, int] = {}
        self.host: dict[int, list[object]] = {}

    def run(self, step: Step) -> list[SampledToken]:
        size = self.manager.block_size
        self.move(step)
        sources, targets = [s for s, _ in step.copy_blocks], [t for _, t in step.copy_blocks]
        assert len(set(targets)) == len(targets)
        assert not any(s in targets[:i] for i, s in enumerate(sources)), "must also be right when all are read first"
        for source, target in step.copy_blocks:
            self.memory[target] = list(self.memory[source])
        written: set[tuple[int, int]] = set()
        for s in step.sequences:
            known = self.states(s.request)
            bad_from = self.poison.get(s.request.request_id, len(known))
            for g, table in enumerate(s.request.block_tables):
                for p in range(s.start, s.start + s.num_new_tokens):
                    slot = table[p // size], p % size
                    assert slot[0] != 0 and slot not in written, f"slot {slot} is null or written twice"
                    written.add(slot)
                    self.memory[slot[0]][slot[1]] = "nan" if p >= bad_from else (g, known[p])
        return [self._sample(s) for s in step.sequences if self._reads_right(s) and s.samples]

    def move(self, step: Step) -> None:
        """Copies to the host, zeroes, copies back: in this order."""
        for block, host in step.swap_out:
            self.host[host] = list(self.memory[block])
        for block in step.zero_blocks:
            self.memory[block] = [None] * self.manager.block_size
        targets = [block for _, block in step.swap_in]
        assert len(set(targets)) == len(targets)
        for host, block in step.swap_in:
            self.memory[block] = list(self.host[host])

    def run_blind(self, step: Step) -> list[SampledToken]:
        """Sample without looking at the memory: quick, and usable when a request ended while its step ran."""
        return [self._sample(s) for s in step.sequences if s.samples]

    def _reads_right(self, s: ScheduledSequence) -> bool:
        """Every position that the sequence's new tokens can see holds its own value."""
        request, start, count = s.request, s.start, s.num_new_tokens
        size, known = self.manager.block_size, self.states(request)
        for g, (group, table) in enumerate(zip(self.manager.groups, request.block_tables, strict=True)):
            end = start + count
            assert len(table) * size >= end
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for p in range(first, end):
                value = self.memory[table[p // size]][p % size]
                if p < self.poison.get(request.request_id, len(known)):
                    assert value == (g, known[p]), f"{request.request_id}: position {p} of group {g} is {value}"
            stale = self.memory[table[-1]][(end - 1) % size + 1 :] if len(table) * size > end else []
            assert "nan" not in stale, f"{request.request_id}: block {table[-1]} was not zeroed"
        return True

    def states(self, request: Request) -> list[int]:
        return states(request)

    def _sample(self, s: ScheduledSequence) -> SampledToken:
        end = s.start + s.num_new_tokens
        if self.poison.get(s.request.request_id, end) < end:
            return SampledToken(0, error="logits are not finite")
        return SampledToken(next_token(self.states(s.request)[end - 1]))


class LateSimulator(PagedSimulator):
    """Knows the ids that it sampled itself, as a device does: steps may be scheduled before their results are known."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__(manager)
        self.sampled: dict[str, list[int]] = {}

    def states(self, request: Request) -> list[int]:
        ids = request.prompt_token_ids + self.sampled.get(request.request_id, [])
        return states(Request(request.request_id, ids, 1, cache_salt=request.cache_salt))

    def _sample(self, s: ScheduledSequence) -> SampledToken:
        token = super()._sample(s)
        self.sampled.setdefault(s.request.request_id, []).append(token.token_id)
        return token


def build(
    num_usable: int = 64,
    block_size: int = 16,
    groups: list[KVGroupSpec] | None = None,
    batched: int = 64,
    seqs: int = 16,
    max_model_len: int = 4096,
    policy: str = "fcfs",
    caching: bool = True,
    host: int = 0,
    swap: SwapPolicy = SWAP,
) -> tuple[Scheduler, PagedSimulator]:
    """`host`: blocks of host memory, 0 for no such tier."""
    manager = KVCacheManager(num_usable + 1, block_size, groups or FULL, caching)
    if host:
        manager.host = HostTier(host, len(manager.groups), block_size, swap)
    config = SchedulerConfig(batched, seqs, max_model_len, policy)  # type: ignore[arg-type]
    return Scheduler(config, manager), PagedSimulator(manager)


def run_step(scheduler: Scheduler, simulator: PagedSimulator, streams: dict[str, list[int]]) -> Step | None:
    """One engine step; new tokens are appended to `streams` as a client would see them."""
    step = scheduler.schedule()
    if step is None:
        return None
    assert step.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(step.sequences) <= scheduler.config.max_num_seqs
    for progress in scheduler.update(step, simulator.run(step)):
        streams.setdefault(progress.request.request_id, []).extend(progress.new_token_ids)
    return step


def drain(
    scheduler: Scheduler,
    simulator: PagedSimulator,
    each: Callable[[], None] | None = None,
    limit: int = 20_000,
) -> dict[str, list[int]]:
    """Run to the end. Returns what was streamed to each request."""
    streams: dict[str, list[int]] = {}
    for _ in range(limit):
        if run_step(scheduler, simulator, streams) is None:
            scheduler.check_idle()
            return streams
        scheduler.manager.check()
        if each is not None:
            each()
    raise AssertionError("the scheduler did not come to an end")


def drain_late(
    scheduler: Scheduler,
    simulator: PagedSimulator,
    each: Callable[[], None] | None = None,
    limit: int = 20_000,
) -> dict[str, list[int]]:
    """As `drain`, but each step is scheduled and run before the result of the one before it is entered."""
    streams: dict[str, list[int]] = {}
    running: tuple[Step, list[SampledToken]] | None = None
    for _ in range(limit):
        step = scheduler.schedule()
        assert step is None or step.num_tokens <= scheduler.config.max_num_batched_tokens
        last, running = running, None if step is None else (step, simulator.run(step))
        if last is None and running is None:
            scheduler.check_idle()
            return streams
        if last is not None:
            for progress in scheduler.update(*last):
                streams.setdefault(progress.request.request_id, []).extend(progress.new_token_ids)
        scheduler.manager.check()
        if each is not None:
            each()
    raise AssertionError("the scheduler did not come to an end")


def solo(request: Request) -> list[int]:
    """The ids that the model gives to this prompt when nothing else runs and nothing stops it."""
    prompt = Request("solo", request.prompt_token_ids, 1, cache_salt=request.cache_salt)
    state, out = states(prompt)[-1], []
    for _ in range(request.max_tokens):
        out.append(next_token(state))
        state = hash((state, out[-1]))
    return out


def add_all(scheduler: Scheduler, requests: Iterable[Request]) -> list[Request]:
    out = list(requests)
    for request in out:
        scheduler.add(request)
    return out
