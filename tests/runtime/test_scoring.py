"""Scoring: every position's logits, as serving computes them, whatever the chunks; nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_reference import reference_logits
from qengine.errors import CapacityError, QEngineError
from qengine.runtime.engine import Engine
from qengine.runtime.scoring import score
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

IDS = [(11 * i + 3) % 251 for i in range(75)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def scored(engine: Engine, ids: list[int], rows: int = 512) -> torch.Tensor:
    parts = list(score(engine, ids, rows))
    assert all(len(part) <= rows and part.dtype == torch.float32 for part in parts)
    return torch.cat(parts)


@pytest.mark.parametrize(("budget", "rows"), [(512, 512), (32, 512), (20, 7), (1, 3)])
def test_every_position_against_transformers(tiny: Path, budget: int, rows: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    want = reference_logits(model, [IDS])[0]
    got = scored(toy_engine(tiny, max_num_batched_tokens=budget), IDS, rows)
    assert got.shape == want.shape
    assert torch.allclose(got, want, atol=1e-4)
    assert not torch.allclose(got[1:], want[:-1], atol=1e-1)


@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_e5m2"])
def test_the_same_numbers_as_prompt_logprobs_in_serving(tiny: Path, kv: str) -> None:
    """The KV dtype is in play: the very logprobs that a request gets, and other ones for every other dtype."""
    options = {"kv_cache_dtype": kv, "max_num_batched_tokens": 32}
    out = run(toy_engine(tiny, **options), [request("a", IDS, max_tokens=1, prompt_logprobs=0)])
    served = next(o.prompt_logprobs for o in out.outputs if o.prompt_logprobs)
    want = torch.tensor([entry.logprob for entry in served[1:]])

    def own(**changed: object) -> torch.Tensor:
        logits = scored(toy_engine(tiny, **options | changed), IDS)[:-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]

    assert torch.allclose(own(), want, atol=1e-6)
    for other in {"auto", "fp8", "fp8_e5m2"} - {kv}:
        assert not torch.allclose(own(kv_cache_dtype=other), want, atol=1e-4)


def test_nothing_stays_behind(tiny: Path) -> None:
    engine = toy_engine(tiny)
    first = scored(engine, IDS)
    for _ in score(engine, IDS, 16):
        break  # leaving early gives the blocks back too
    run(engine, [request("served", IDS, max_tokens=4)])  # fills the prefix cache, which scoring must not read
    assert torch.equal(scored(engine, IDS), first)
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    engine.step()  # idle: checks the cache's books


def test_the_whole_context_and_not_a_token_more(tiny: Path) -> None:
    engine = toy_engine(tiny, max_model_len=75)
    assert len(scored(engine, IDS)) == 75
    with pytest.raises(CapacityError, match="75 tokens"):
        scored(engine, [*IDS, 1])
    assert not engine.has_work


def test_a_busy_engine_is_refused(tiny: Path) -> None:
    engine = toy_engine(tiny)
    engine.add(request("a", IDS))
    with pytest.raises(QEngineError, match="idle"):
        scored(engine, IDS)
