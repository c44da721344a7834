"""CASES C16: an fp8 cache really holds twice the tokens, and a length that cannot fit is refused with the numbers."""

import dataclasses
from pathlib import Path

import pytest

from qengine.errors import CapacityError
from toy_engine import toy_engine
from toy_models import make_tiny

POOL = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), dtype="bfloat16", max_position_embeddings=131072)


@pytest.mark.parametrize(("kv", "tokens", "bytes_per_token"), [("auto", 1024, 1024), ("fp8", 2048, 512)])
def test_auto_length_is_the_pool(tiny: Path, kv: str, tokens: int, bytes_per_token: int) -> None:
    engine = toy_engine(tiny, dtype="bfloat16", kv_cache_dtype=kv, kv_cache_memory_bytes=POOL)
    assert engine.facts.max_model_len == tokens
    assert engine.facts.kv_tokens == tokens
    blocks = engine.stats().kv_blocks_total
    assert blocks == tokens // 16
    # The storage holds the pool and one null block on top, which the report states.
    assert engine.runner.cache.nbytes == POOL + 16 * bytes_per_token
    assert any("null block" in line for line in engine.facts.report)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_longer_length_is_refused_with_both_numbers(tiny: Path, kv: str) -> None:
    with pytest.raises(CapacityError) as e:
        toy_engine(tiny, dtype="bfloat16", kv_cache_dtype=kv, kv_cache_memory_bytes=POOL, max_model_len=4096)
    text = str(e.value)
    assert "4096" in text.replace(",", "")
    assert ("1024" if kv == "auto" else "2048") in text.replace(",", "")
    if kv == "auto":
        assert "fp8" in text and "2048" in text.replace(",", "")


def test_short_memory_takes_the_compact_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where int4 with its dense copy does not fit, the copy is left out and the report says so."""
    from qengine.config import EngineConfig
    from qengine.runtime import device
    from qengine.runtime.decide import decide
    from qengine.runtime.plan_input import CPU_RESERVE
    from toy_models import make_tiny_awq

    folder, _ = make_tiny_awq(tmp_path, group=64)
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", max_num_batched_tokens=32, max_num_seqs=4)
    roomy = decide(config)
    kept = roomy.load_plan.total_bytes
    need = kept + roomy.memory.inputs.activations + CPU_RESERVE
    monkeypatch.setattr(device, "memory", lambda d: device.DeviceMemory(need, need))
    tight = decide(config)
    assert tight.load_plan.total_bytes < kept
    assert any("Memory is short" in note for note in tight.notes)
    none = CPU_RESERVE + (1 << 16)
    monkeypatch.setattr(device, "memory", lambda d: device.DeviceMemory(none, none))
    with pytest.raises(CapacityError):
        decide(config)


def test_fit_is_never_worse_than_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only fits without copies of weights fits for --fit too, whose plan then is the one of serving."""
    from qengine.config import EngineConfig
    from qengine.runtime import device
    from qengine.runtime.decide import divide, look_at
    from qengine.runtime.fit import fit
    from qengine.runtime.plan_input import CPU_RESERVE
    from toy_models import make_tiny_awq

    folder, _ = make_tiny_awq(tmp_path, group=64)
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", max_num_batched_tokens=32, max_num_seqs=4)
    roomy = divide(look_at(config))
    need = roomy.load_plan.total_bytes + roomy.memory.inputs.activations + CPU_RESERVE
    monkeypatch.setattr(device, "memory", lambda d: device.DeviceMemory(need, need))
    tight = divide(look_at(config)).memory
    for asked in (None, tight.max_model_len):
        s = look_at(dataclasses.replace(config, max_model_len=asked))
        for goal in ("context", "streams"):
            found = fit(s, goal)
            assert found is not None and found.plan.max_model_len >= (asked or 1), (asked, goal)
            again = divide(look_at(dataclasses.replace(s.config, **found.changes))).memory
            assert again.max_model_len == found.plan.max_model_len and again.kv_tokens == found.plan.kv_tokens


def test_no_more_requests_at_once_than_may_run(tiny: Path) -> None:
    from qengine.config import EngineConfig
    from qengine.runtime.decide import look_at
    from qengine.runtime.fit import fit

    config = EngineConfig(model=str(tiny), device="cpu", kv_cache_memory_bytes=1 << 26, max_num_seqs=3)
    for goal in ("context", "streams"):
        found = fit(look_at(dataclasses.replace(config, max_model_len=64)), goal)
        assert found is not None and found.streams == 3 < found.plan.concurrency(64)
