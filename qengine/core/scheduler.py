"""The scheduler: decides anew each step which tokens of which requests are computed.

Prefill and decode are the same thing with other token counts. Rules, in order:

1. Running requests come first, oldest (or highest priority) first. A prefill takes what the token budget leaves after
   one token for each decode behind it, and only as many tokens as there are free blocks for.
2. A running request that cannot get a single token's room preempts the newest (or lowest-priority) running request,
   in the end itself. Preempted requests keep their generated ids, wait in front of the queue and are recomputed, or get
   their K/V back from host memory.
   The oldest is never preempted for another, so at least one request always progresses.
3. A waiting request starts when all its known tokens fit beside what running prefills still owe and a small reserve
   for the decodes. Nothing starts in a step that preempted.
4. One that does not fit now may be passed by later ones, but not for ever: see `admission`.

A step may be scheduled while the one before it still runs, whose sampled ids are then not known. What they decide is
decided one step late: a request that turns out to have ended is left out from then on, and its surplus token is
dropped by `update`. Ends by length are known in advance and cost no surplus.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qengine.core.admission import Admission
from qengine.core.memory import most_tokens
from qengine.core.pages import KVCacheManager
from qengine.core.prefix import PrefixHit
from qengine.core.queue import Order, Policy, WaitingQueue
from qengine.core.request import FinishReason, Request, Status
from qengine.core.step import Progress, SampledToken, ScheduledSequence, Step
from qengine.errors import CapacityError, ConfigError, QEngineError, RequestError

LOOKAHEAD = 16
"""How many waiting requests that do not fit are looked at in one step."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive", have=getattr(self, name), need=">= 1")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("unknown scheduling policy", have=repr(self.policy), need="fcfs | priority")


@dataclass
class Counters:
    """Totals since the start. Prefix queries and hits count prompt tokens at first admission. `preemptions_swapped` are
    those whose K/V was kept, `recomputed_tokens` what preempted requests had to compute again."""

    preemptions: int = 0
    preemptions_swapped: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    nonfinite_requests: int = 0


class Scheduler:
    """Owns every request from `add` to its end. `add` and `abort` may come at any time.

    Every step that `schedule` returns is given back to `update`, in order; at most one more step is scheduled before
    that. A step counts as computed from the moment when it is scheduled.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
        self.counters = Counters()
        self._order = Order(config.policy)
        self._waiting = WaitingQueue(self._order)
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._admission = Admission(manager, config.max_num_batched_tokens)
        self._added = 0
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def request_ids(self) -> list[str]:
        """Every request that has not ended."""
        return list(self._requests)

    def check_idle(self) -> None:
        """When nothing is left to do, verify that every block came back. Raises IntegrityError."""
        if not self.has_work:
            self.manager.check()

    # In and out

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError when it can never fit, RequestError when it is no valid request."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use", param="request_id")
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt", have="0 tokens", need="at least 1")
        self._check_capacity(request)
        self._added += 1
        request.sequence_number = self._added
        self._admission.enter(request, self._requests.get(request.fork_of or ""))
        self._requests[request.request_id] = request
        room = self.config.max_model_len - request.num_prompt_tokens
        request.token_limit = request.num_prompt_tokens + max(1, min(request.max_tokens, room))
        self._waiting.push(request)

    def _check_capacity(self, request: Request) -> None:
        tokens = request.num_prompt_tokens + request.max_tokens
        asked = f"{request.num_prompt_tokens} prompt + {request.max_tokens} new = {tokens} tokens"
        limit = self.config.max_model_len
        if tokens > limit:
            raise CapacityError(
                "prompt and max_tokens exceed the maximum model length", have=f"{limit} tokens", need=asked
            )
        manager, chunk = self.manager, self.config.max_num_batched_tokens
        usable, blocks = manager.num_usable_blocks, manager.max_blocks(tokens, chunk)
        if blocks > usable:
            fits = most_tokens(manager.groups, usable, manager.block_size, chunk, limit)
            raise CapacityError(
                "prompt and max_tokens can never fit into the KV cache",
                have=f"{fits} tokens ({usable} blocks of {manager.block_size})",
                need=f"{asked} ({blocks} blocks)",
            )

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests in whatever state they are; unknown and finished ids are ignored. Returns those ended."""
        ended = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._finish(request, FinishReason.ABORT)
            ended.append(request)
        return ended

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.manager.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._admission.leave(request)

    # Deciding a step

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do before the running step's result is known."""
        if not self._requests:
            return None
        step = Step()
        budget = self._continue_running(step)
        if not step.preempted:
            self._admit(step, budget)
        if not step.sequences:
            if any(r.num_pending for r in self._requests.values()):
                return None
            raise QEngineError(
                f"the scheduler found nothing to run: {self.num_running} running, {self.num_waiting} waiting, "
                f"{self.manager.pool.num_available} of {self.manager.num_usable_blocks} blocks available"
            )
        if any(s.num_new_tokens > 1 or not s.samples for s in step.sequences):
            step.sequences.sort(key=lambda s: (s.num_new_tokens > 1, not s.samples))
        step.zero_blocks = self.manager.take_zero_blocks()
        step.swap_out, step.swap_in = self.manager.take_swaps()
        return step

    def _continue_running(self, step: Step) -> int:
        """Schedule the running requests; returns the token budget that is left."""
        budget = self.config.max_num_batched_tokens
        running, inside = self._running, self.manager.step_inside
        todo = [self._todo(r) for r in running]
        decodes = todo.count(1)
        index = 0
        while index < len(running) and budget > 0:
            request, wanted = running[index], todo[index]
            if wanted == 1:
                decodes -= 1
                if inside(request):
                    self._enter(request, 1, step)
                    budget -= 1
                    index += 1
                    continue
            room = self._make_room(request, min(wanted, budget - decodes), step)
            if room > 0:
                self._put(request, room, step)
                budget -= room
            index += 1
        return budget

    def _todo(self, request: Request) -> int:
        """Tokens of a running request that are not scheduled yet; none when the running step gives it its last one."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_pending
        return 0 if num_tokens >= request.token_limit else num_tokens - request.num_computed_tokens

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> int:
        """Tokens that can be computed now, preempting others from the back if there is room for none; 0 when the
        request itself was the last."""
        while num_tokens > 0:
            room = self.manager.fit(request, num_tokens)
            if room > 0:
                return room
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is request:
                return 0
        return 0

    def _put(self, request: Request, num_tokens: int, step: Step) -> None:
        """Take the slots of the next tokens and compute them in this step."""
        step.copy_blocks += self.manager.extend(request, num_tokens)
        self._enter(request, num_tokens, step)

    def _enter(self, request: Request, num_tokens: int, step: Step) -> None:
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_tokens
        samples = end == len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_pending
        request.num_pending += samples
        step.sequences.append(ScheduledSequence(request, start, num_tokens, samples))

    def _preempt(self, request: Request, step: Step) -> None:
        """Take the last running request's blocks; its ids stay, its K/V is computed again or copied back later."""
        self._running.pop()
        request.num_lost_tokens = request.num_computed_tokens
        self.counters.preemptions_swapped += self.manager.preempt(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._admission.enter(request)
        self._waiting.push(request)
        step.preempted.append(request)

    def _admit(self, step: Step, budget: int) -> None:
        """Start waiting requests, in order, by rules 3 and 4."""
        if not len(self._waiting):
            return
        chunk = self.config.max_num_batched_tokens
        prefills = (r for r in self._running if r.num_computed_tokens < r.num_tokens - r.num_pending)
        owed = sum(self.manager.blocks_owed(r, chunk) for r in prefills)
        admission = self._admission
        blocked: Request | None = None
        index = tried = 0
        while index < len(self._waiting) and budget > 0 and len(self._running) < self._max_running:
            request = self._waiting[index]
            if admission.waits_for_sibling(request):
                index += 1
                continue
            hit = admission.find_room(request, owed, others_run=bool(self._running))
            if hit is None:
                blocked = blocked or request
                index += 1
                tried += 1
            else:
                self._waiting.pop(index)
                budget -= self._start(request, hit, budget, step)
                owed += self.manager.blocks_owed(request, chunk)
                if blocked is not None:
                    admission.overtake(blocked)
            if tried == LOOKAHEAD or (blocked is not None and not admission.may_be_passed(blocked)):
                return

    def _start(self, request: Request, hit: PrefixHit, budget: int, step: Step) -> int:
        """Let a request that left the queue run; returns the tokens it computes in this step."""
        self._admission.leave(request)
        self.manager.attach(request, hit)
        if request.status is Status.WAITING and not hit.from_sibling:
            request.num_cached_tokens = hit.num_tokens
            if self.manager.enable_prefix_caching and not request.prompt_logprobs:
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += hit.num_tokens
        if request.status is Status.PREEMPTED:
            self.counters.recomputed_tokens += max(0, request.num_lost_tokens - hit.num_tokens)
        request.status = Status.RUNNING
        insort(self._running, request, key=self._order.running)
        wanted = min(request.num_tokens - request.num_computed_tokens, budget)
        num_tokens = self.manager.fit(request, wanted)
        self._put(request, num_tokens, step)
        return num_tokens

    # Settling a step

    def update(self, step: Step, sampled: Sequence[SampledToken]) -> list[Progress]:
        """Enter a step's result: `sampled` has one entry for each sequence with `samples`, in step order. Requests that
        have ended since it was scheduled get nothing."""
        sampling = [s for s in step.sequences if s.samples]
        if len(sampled) != len(sampling):
            raise QEngineError(f"the runner returned {len(sampled)} tokens for {len(sampling)} sampling sequences")
        progress = []
        ended, append = Status.FINISHED, self._append
        for row, (sequence, token) in enumerate(zip(sampling, sampled, strict=True)):
            request = sequence.request
            if request.status is ended:
                continue
            request.num_pending -= 1
            finished = append(request, token, sequence.start + sequence.num_new_tokens)
            progress.append(Progress(request, [] if token.error else [token.token_id], finished, row))
        return progress

    def _append(self, request: Request, token: SampledToken, num_computed: int) -> bool:
        """Enter the token that follows the first `num_computed` ones; whether it ended the request."""
        if token.error is not None:
            request.error = token.error
            self.counters.nonfinite_requests += 1
            self.manager.taint(request)
            self._finish(request, FinishReason.ERROR)
            return True
        if request.status is Status.RUNNING:  # a preempted one has no blocks any more
            self.manager.settle(request, num_computed)
        if not request.output_token_ids:
            self.counters.prompt_tokens += request.num_prompt_tokens
        self.counters.generation_tokens += 1
        request.output_token_ids.append(token.token_id)
        reason = self._finish_reason(request, token.token_id)
        if reason is None:
            return False
        self._finish(request, reason)
        return True

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        num_output = len(request.output_token_ids)
        if num_output >= request.min_tokens:
            if token_id in request.eos_token_ids and not request.ignore_eos:
                return FinishReason.STOP
            if token_id in request.stop_token_ids:
                request.stop_reason = token_id
                return FinishReason.STOP
        if num_output + len(request.prompt_token_ids) >= request.token_limit:
            return FinishReason.LENGTH
        return None
