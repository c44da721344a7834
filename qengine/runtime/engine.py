"""The engine: one step = schedule, run, settle. The server's process and `LLM` drive this very class."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from qengine.config import EngineConfig
from qengine.core.pages import KVCacheManager
from qengine.core.request import Request
from qengine.core.scheduler import Scheduler
from qengine.core.step import Progress, Step
from qengine.errors import UserError
from qengine.messages import EngineStats, NewRequest, RequestOutput, StepOutputs
from qengine.runtime.facts import EngineFacts
from qengine.runtime.runner import Launched, Runner, StepResult
from qengine.runtime.sampler import needs_ids
from qengine_kernels.compile_watch import kernels_compiled

logger = logging.getLogger(__name__)


class Engine:
    """Owns a scheduler and a runner. Single-threaded: `add`, `abort` and `step` are called from one loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        pages: KVCacheManager,
        runner: Runner,
        facts: EngineFacts,
        asynchronous: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.pages = pages
        self.runner = runner
        self.facts = facts
        self.asynchronous = asynchronous
        """Whether a step is scheduled and started before the result of the last one is known."""
        self.steps = 0
        self.synchronous_steps = 0
        """Steps whose result had to be known first, although scheduling is asynchronous."""
        self.last_progress = time.monotonic()
        self.kernels_compiled = 0
        """Kernels made ready by a step and not before the engine was."""
        self._refused: list[RequestOutput] = []
        self._announced: set[str] = set()
        self._running: Launched | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model named by `config.model` (a local folder) and get ready to serve; see `runtime.build`."""
        from qengine.runtime.build import build_engine

        return build_engine(config)

    def add(self, new: NewRequest) -> None:
        """Queue a request. One that can never fit is answered with an error by the next `step`; nothing raises."""
        p = new.sampling
        request = Request(
            request_id=new.request_id,
            prompt_token_ids=new.prompt_token_ids,
            max_tokens=p.max_tokens or self.facts.max_model_len,
            arrival=new.arrival,
            priority=new.priority,
            cache_salt=new.cache_salt,
            eos_token_ids=frozenset(new.eos_token_ids),
            stop_token_ids=frozenset(p.stop_token_ids),
            ignore_eos=p.ignore_eos,
            min_tokens=p.min_tokens,
            prompt_logprobs=p.prompt_logprobs is not None,
            fork_of=new.fork_of,
            needs_ids=needs_ids(p),
            sampling=p,
        )
        try:
            self.scheduler.add(request)
        except UserError as e:
            refusal = RequestOutput(request_id=new.request_id, finish_reason="error", error=str(e), refused=True)
            self._refused.append(refusal)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests wherever they stand; unknown and finished ids are ignored."""
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            self._forget(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._refused) or self.scheduler.has_work or self._running is not None

    def step(self) -> StepOutputs:
        """Schedule, run, settle. With nothing to do it checks the cache's books and returns no outputs.

        With asynchronous scheduling a step's outputs come from the next call: that one first schedules and starts the
        step that follows, then waits for this one, so that the device goes on while outputs are made.
        """
        outputs, self._refused = self._refused, []
        ready = len(kernels_compiled())
        if self._running is not None and self._needs_its_ids(self._running.step):
            self.synchronous_steps += 1
            outputs += self._settle()
        step = self.scheduler.schedule()
        started = None if step is None else self.runner.launch(step)
        if self._running is not None:
            outputs += self._settle()
        elif started is None:
            self.scheduler.check_idle()
        self._running = started
        if started is not None and not self.asynchronous:
            outputs += self._settle()
        self._count_compiled(kernels_compiled()[ready:], step)
        return StepOutputs(outputs=outputs, stats=self.stats())

    def _count_compiled(self, names: Sequence[str], step: Step | None) -> None:
        """Of this very step: what another engine of this process compiles while it warms up is no concern of ours."""
        if names:
            self.kernels_compiled += len(names)
            size = f", in a step of {len(step.sequences)} sequences and {step.num_tokens} tokens" if step else ""
            kinds = ", ".join(sorted(set(names)))
            logger.warning("%d kernel(s) compiled while serving%s: %s", len(names), size, kinds)

    def _needs_its_ids(self, step: Step) -> bool:
        """Whether what follows this step can only be computed once its sampled ids are known here."""
        return any(s.samples and s.request.needs_ids for s in step.sequences)

    def _settle(self) -> list[RequestOutput]:
        """Wait for the running step and enter its result."""
        launched, self._running = self._running, None
        assert launched is not None
        result = self.runner.collect(launched)
        progress = self.scheduler.update(launched.step, result.sampled)
        self.steps += 1
        self.last_progress = time.monotonic()
        return self._outputs(progress, result)

    def _outputs(self, progress: Sequence[Progress], result: StepResult) -> list[RequestOutput]:
        out = []
        for p in progress:
            request, logprobs = p.request, result.logprobs[p.row]
            first = request.request_id not in self._announced
            self._announced.add(request.request_id)
            out.append(
                RequestOutput(
                    request_id=request.request_id,
                    new_token_ids=p.new_token_ids,
                    logprobs=[logprobs] if logprobs is not None and p.new_token_ids else None,
                    prompt_logprobs=result.prompt_logprobs.get(request.request_id),
                    finish_reason=request.finish_reason.value if request.finish_reason else None,
                    stop_reason=request.stop_reason,
                    error=request.error,
                    num_prompt_tokens=request.num_prompt_tokens if first else 0,
                    num_cached_tokens=request.num_cached_tokens if first else 0,
                )
            )
            if p.finished:
                self._forget(request.request_id)
        return out

    def _forget(self, request_id: str) -> None:
        self.runner.forget(request_id)
        self._announced.discard(request_id)

    def stats(self) -> EngineStats:
        s, p = self.scheduler, self.pages.stats()
        host, moved = self.pages.host_stats(), self.runner.host.block_bytes if self.runner.host is not None else 0
        return EngineStats(
            time=time.monotonic(),
            steps=self.steps,
            last_progress=self.last_progress,
            num_running=s.num_running,
            num_waiting=s.num_waiting,
            kv_blocks_total=p.blocks_total,
            kv_blocks_used=p.blocks_used,
            kv_blocks_cached=p.blocks_cached,
            kv_slots_allocated=p.slots_allocated,
            kv_slots_wasted=p.slots_wasted,
            prefix_cache_queries=s.counters.prefix_queries,
            prefix_cache_hits=s.counters.prefix_hits,
            expert_cache_queries=self.runner.slot_queries,
            expert_cache_hits=self.runner.slot_hits,
            host_blocks_total=host.blocks_total,
            host_blocks_used=host.blocks_used,
            host_blocks_cached=host.blocks_cached,
            num_swapped=host.num_parked,
            swapped_out_bytes=host.moved_out * moved,
            swapped_in_bytes=host.moved_in * moved,
            num_preemptions=s.counters.preemptions,
            preemptions_swapped=s.counters.preemptions_swapped,
            recomputed_tokens=s.counters.recomputed_tokens,
            prompt_tokens=s.counters.prompt_tokens,
            generation_tokens=s.counters.generation_tokens,
            nonfinite_requests=s.counters.nonfinite_requests,
            synchronous_steps=self.synchronous_steps,
            kernels_compiled=self.kernels_compiled,
        )

    def shutdown(self) -> None:
        """Abort everything; the device memory goes with the object."""
        self.abort(self.scheduler.request_ids)
