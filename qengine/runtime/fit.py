"""`qengine plan --fit`: settings that fit, those that do least harm first.

Rungs, in this order: prompts in smaller chunks, a smaller KV dtype, fewer sequences at once, a shorter context, weights
in host memory. A step down is only taken where everything above it fails to reach the goal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qengine.config import EngineConfig
from qengine.core.offload import gib_for
from qengine.core.plan import MemoryPlan, PlanInput, attempt
from qengine.runtime.decide import Surveyed

Goal = Literal["context", "streams"]
USEFUL = 4096
"""Tokens of context below which weights go to host memory rather than the context being cut further; also what a stream
has where no length is asked for. At most the model's own length."""
SMALL_STEPS = (2048, 512)
FEW_SEQUENCES = 32


@dataclass(frozen=True)
class Rung:
    """Other options, and the plan's inputs with them: as serving plans, then with the fewer bytes that it keeps where
    those do not fit."""

    changes: dict[str, object]
    inputs: tuple[PlanInput, ...]

    def at(self, length: int | None, offload: bool = False) -> MemoryPlan | None:
        """The plan that serving would make for `length`; None: for the longest there is."""
        plans = (found for inputs in self.inputs if (found := self._plan(inputs, length, offload)) is not None)
        if length is not None:
            return next(plans, None)
        return max(plans, key=lambda found: found.max_model_len, default=None)

    @staticmethod
    def _plan(inputs: PlanInput, length: int | None, offload: bool) -> MemoryPlan | None:
        asked = None if offload else inputs.offload
        return attempt(dataclasses.replace(inputs, max_model_len=length, offload=asked))


@dataclass(frozen=True)
class Fit:
    """Options that differ from those asked for, the plan with them, and how many requests of its length run at once: as
    many as the KV cache holds, at most `max_num_seqs`."""

    goal: Goal
    changes: dict[str, object]
    plan: MemoryPlan
    streams: float = 0.0


def fit(s: Surveyed, goal: Goal) -> Fit | None:
    """None when nothing fits, not even with everything in host memory."""
    smaller = s.compacted()
    kept = (s,) if smaller is None else (s, smaller)
    rungs = list(_rungs(s, kept))
    longest = s.config.max_model_len or s.model.max_position
    found = _context(rungs, longest) if goal == "context" else _streams(rungs, s.config, longest)
    return None if found is None else _planned_anew(kept, found)


def _planned_anew(kept: Sequence[Surveyed], found: Fit) -> Fit:
    """The plan as serving makes it with all changes: a shorter length also makes graphs smaller."""
    config = _changed(kept[0].config, found.changes)
    asked = (s.inputs(config) for s in kept)
    block_bytes = found.plan.inputs.block_bytes
    plans = (attempt(dataclasses.replace(inputs, block_bytes=block_bytes, alternatives={})) for inputs in asked)
    plan = next((plan for plan in plans if plan is not None), None)
    assert plan is not None, "what fits with larger graphs fits"
    streams = min(plan.concurrency(plan.max_model_len), config.max_num_seqs)
    return dataclasses.replace(found, plan=plan, streams=streams)


def _changed(config: EngineConfig, changes: Mapping[str, object]) -> EngineConfig:
    """All changes but that of the KV dtype, whose plugins are chosen by then: its block size is put in afterwards."""
    fields = {name: value for name, value in changes.items() if name != "kv_cache_dtype"}
    return dataclasses.replace(config, **fields)  # type: ignore[arg-type]


def _rungs(s: Surveyed, kept: Sequence[Surveyed]) -> Iterator[Rung]:
    """From what was asked for on down; each changes more than the one before."""
    asked = s.inputs(s.config)
    steps = [n for n in SMALL_STEPS if n < asked.max_chunk]
    dtypes = sorted(asked.alternatives.items(), key=lambda item: -item[1])
    small: dict[str, object] = {"max_num_batched_tokens": steps[0]} if steps else {}
    smaller: dict[str, object] = {"max_num_batched_tokens": steps[-1]} if steps else {}
    if s.config.max_num_seqs > FEW_SEQUENCES:
        smaller["max_num_seqs"] = FEW_SEQUENCES
    ladder: list[tuple[dict[str, object], int | None]] = [({}, None), (small, None)]
    ladder += [({**small, "kv_cache_dtype": name}, size) for name, size in dtypes]
    last: dict[str, object] = {"kv_cache_dtype": dtypes[-1][0]} if dtypes else {}
    ladder.append(({**smaller, **last}, dtypes[-1][1] if dtypes else None))
    seen: list[dict[str, object]] = []
    for changes, block_bytes in ladder:
        if changes in seen:
            continue
        seen.append(changes)
        inputs = tuple(each.inputs(_changed(s.config, changes)) for each in kept)
        if block_bytes is not None:
            inputs = tuple(dataclasses.replace(each, block_bytes=block_bytes) for each in inputs)
        yield Rung(changes, inputs)


def _context(rungs: list[Rung], longest: int) -> Fit | None:
    """The first rung that holds `longest` tokens; else the longest context, as long as it is useful; else offload; else
    whatever context there is."""
    for rung in rungs:
        if found := rung.at(longest):
            return Fit("context", rung.changes, found)
    useful = min(longest, USEFUL)
    cut = [(rung, found) for rung in rungs if (found := rung.at(None))]
    best = max(cut, key=lambda item: item[1].max_model_len, default=None)
    if best is None or best[1].max_model_len < useful:
        if (moved := _least_offload(rungs, useful, "context")) is not None:
            return moved
        if best is None:
            return None
    rung, found = best
    return Fit("context", {**rung.changes, "max_model_len": found.max_model_len}, found)


def _streams(rungs: list[Rung], config: EngineConfig, longest: int) -> Fit | None:
    """The most requests of the length asked for at once, of equals those of the first rung."""
    length = config.max_model_len or min(longest, USEFUL)
    fitting = [(rung, found) for rung in rungs if (found := rung.at(length))]
    if not fitting:
        return _least_offload(rungs, length, "streams")
    rung, found = max(fitting, key=lambda item: _streams_of(item[0], item[1], config))
    changes = dict(rung.changes)
    if config.max_model_len is None:
        changes["max_model_len"] = length
    return Fit("streams", changes, found)


def _streams_of(rung: Rung, plan: MemoryPlan, config: EngineConfig) -> float:
    most = rung.changes.get("max_num_seqs", config.max_num_seqs)
    assert isinstance(most, int)
    return min(plan.concurrency(plan.max_model_len), most)


def _least_offload(rungs: list[Rung], length: int, goal: Goal) -> Fit | None:
    """The rung with which the fewest bytes go to host memory."""
    fitting = [(rung, found) for rung in rungs if (found := rung.at(length, offload=True))]
    if not fitting:
        return None
    rung, found = min(fitting, key=lambda item: item[1].inputs.offloaded.nbytes)
    changes = {**rung.changes, "max_model_len": found.max_model_len}
    if found.inputs.offloaded.units:
        changes["cpu_offload_gb"] = gib_for(found.inputs.units, found.inputs.offloaded)
    return Fit(goal, changes, found)
