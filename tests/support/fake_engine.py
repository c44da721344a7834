"""A scripted engine with the methods of `qengine.runtime.engine.Engine`, for the server's tests: no torch, no model.

Greedy output is a chain as in SUCC (`toy_models.make_succ`). The script lies in fake.json beside the model's files;
some prompts have effects, so that a test can break the engine from outside.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qengine.config import EngineConfig
from qengine.errors import CheckpointError
from qengine.messages import EngineStats, NewRequest, RequestOutput, StepOutputs, TokenLogprobs
from qengine.runtime.cache_dir import building
from qengine.runtime.facts import EngineFacts

BLOCK = 16
KV_BLOCKS = 4096
NONFINITE, CRASH, HANG = b"!nonfinite", b"!crash", b"!hang"
"""Prompts (ids are bytes) with an effect: an error after two tokens, an exception in step, a step without end."""


@dataclass
class Running:
    request: NewRequest
    output: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + len(self.output)) // BLOCK)


class FakeEngine:
    """Every step gives one token to every request."""

    def __init__(self, config: EngineConfig, after: dict[int, int], step_s: float) -> None:
        folder = str(config.model)
        self.facts = EngineFacts(
            model_folder=folder,
            tokenizer_folder=config.tokenizer or folder,
            vocab_size=320,
            max_model_len=config.max_model_len or 2048,
            kv_tokens=BLOCK * KV_BLOCKS,
            block_size=BLOCK,
            report=["a scripted engine"],
        )
        self.after = after
        self.step_s = step_s
        self.running: dict[str, Running] = {}
        self.counts = EngineStats(kv_blocks_total=KV_BLOCKS, last_progress=time.monotonic())

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, new: NewRequest) -> None:
        self.running[new.request_id] = Running(new)
        self.counts.prompt_tokens += len(new.prompt_token_ids)
        self.counts.prefix_cache_queries += len(new.prompt_token_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> StepOutputs:
        if self.running:
            time.sleep(self.step_s)
            self.counts.steps += 1
            self.counts.last_progress = time.monotonic()
        outputs = [self._advance(r) for r in list(self.running.values())]
        return StepOutputs(outputs=outputs, stats=self.stats())

    def _advance(self, running: Running) -> RequestOutput:
        new, p = running.request, running.request.sampling
        prompt = bytes(t for t in new.prompt_token_ids if t < 256)
        if CRASH in prompt:
            raise RuntimeError("scripted crash")
        if HANG in prompt:
            time.sleep(3600)
        if NONFINITE in prompt and len(running.output) == 2:
            self.running.pop(new.request_id)
            return RequestOutput(request_id=new.request_id, finish_reason="error", error="logits are not finite")
        last = (new.prompt_token_ids + running.output)[-1]
        token = self.after[last]
        if p.logit_bias:
            token = max(p.logit_bias, key=lambda t: p.logit_bias[t])
        running.output.append(token)
        self.counts.generation_tokens += 1
        out = RequestOutput(request_id=new.request_id, new_token_ids=[token])
        if len(running.output) == 1:
            out.num_prompt_tokens = len(new.prompt_token_ids)
            if p.prompt_logprobs is not None:
                known = [_logprobs(t, p.prompt_logprobs) for t in new.prompt_token_ids[1:]]
                out.prompt_logprobs = [None, *known]
        if p.logprobs is not None:
            out.logprobs = [_logprobs(token, p.logprobs)]
        enough = len(running.output) >= p.min_tokens
        if enough and token in new.eos_token_ids and not p.ignore_eos:
            out.finish_reason = "stop"
        elif enough and token in p.stop_token_ids:
            out.finish_reason, out.stop_reason = "stop", token
        elif len(running.output) == (p.max_tokens or self.facts.max_model_len - len(new.prompt_token_ids)):
            out.finish_reason = "length"
        if out.finish_reason:
            self.running.pop(new.request_id)
        return out

    def stats(self) -> EngineStats:
        used = sum(r.blocks for r in self.running.values())
        written = sum(len(r.request.prompt_token_ids) + len(r.output) for r in self.running.values())
        self.counts.time = time.monotonic()
        self.counts.num_running = len(self.running)
        self.counts.kv_blocks_used = used
        self.counts.kv_slots_allocated = used * BLOCK
        self.counts.kv_slots_wasted = used * BLOCK - written
        return self.counts

    def shutdown(self) -> None:
        self.running.clear()


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """The chosen token at -0.5, the runners-up below it; one of them at minus infinity, as a mask would give."""
    others = [t for t in (1, 2, 3, 4, 5) if t != token][: max(count - 1, 0)]
    values = [-2.0, float("-inf"), float("-inf"), float("-inf")][: len(others)]
    top_ids, top_logprobs = ([token, *others], [-0.5, *values]) if count else ([], [])
    return TokenLogprobs(token, -0.5, 1, top_ids, top_logprobs)


def write_script(
    folder: Path, after: dict[int, int], *, step_s: float = 0.001, build_s: float = 0, **effects: str
) -> None:
    """`effects`: refuse="text" makes the start fail with a user's error, crash="text" with another one, makes="path"
    makes a folder in the way that the cache's are made, for the time of the build."""
    script = {"after": after, "step_s": step_s, "build_s": build_s, **effects}
    (folder / "fake.json").write_text(json.dumps(script), encoding="utf-8")


def build(config: EngineConfig) -> FakeEngine:
    """The factory "fake_engine:build"."""
    script = json.loads((Path(str(config.model)) / "fake.json").read_text(encoding="utf-8"))
    with building(Path(script["makes"])) if "makes" in script else contextlib.nullcontext():
        time.sleep(script["build_s"])
    if "refuse" in script:
        raise CheckpointError(script["refuse"])
    if "crash" in script:
        raise RuntimeError(script["crash"])
    return FakeEngine(config, {int(k): v for k, v in script["after"].items()}, script["step_s"])
