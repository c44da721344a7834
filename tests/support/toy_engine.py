"""Builds real engines on toy checkpoints and runs requests through them, watching every step's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qengine.config import EngineConfig
from qengine.messages import NewRequest, RequestOutput
from qengine.runtime.engine import Engine
from qengine.sampling_params import SamplingParams


def toy_engine(folder: Path, **options: Any) -> Engine:
    """An engine on the CPU (float32 unless asked otherwise) with a small pool."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, **options}
    return Engine.from_config(EngineConfig(model=str(folder), tokenizer=str(folder), **settings))


def request(name: str, prompt: Sequence[int], **sampling: Any) -> NewRequest:
    fields = {k: sampling.pop(k) for k in ("priority", "cache_salt", "fork_of", "eos_token_ids") if k in sampling}
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("max_tokens", 16)
    return NewRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling=SamplingParams(**sampling), **fields
    )


class Run:
    """Everything that came out of an engine: `ids[name]` joined deltas, `last[name]` the finishing output."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.outputs: list[RequestOutput] = []
        self.steps = 0

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step().outputs
        self.steps += 1
        for out in outputs:
            assert out.request_id not in self.last, f"{out.request_id} spoke after it had finished"
            self.ids.setdefault(out.request_id, []).extend(out.new_token_ids)
            if out.finish_reason is not None:
                self.last[out.request_id] = out
        self.outputs += outputs
        return outputs


def run(engine: Engine, requests: Sequence[NewRequest], limit: int = 5000) -> Run:
    """Add all requests and step until the engine has nothing to do; the books must balance afterwards."""
    r = Run(engine)
    for new in requests:
        engine.add(new)
    while engine.has_work:
        r.step()
        assert r.steps < limit, "the engine never came to rest"
    engine.step()  # idle: checks the cache's books
    assert engine.stats().kv_blocks_used == 0
    return r
