"""The engine on a real GPU beside the float32 engine on the CPU: same weights, same KV dtype, same greedy text."""

from pathlib import Path

import pytest
import torch

from greedy_compare import first_clear_difference, greedy
from toy_engine import request, run, toy_engine
from toy_models import make_tiny, make_tiny_awq

pytestmark = pytest.mark.gpu
MARGINS = {"half": 0.1, "bfloat16": 0.25}
"""TINY's logits are small and close together; 16-bit rounding moves them by about this much."""


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(2)
    return [torch.randint(0, 250, (n,), generator=gen).tolist() for n in (1, 5, 16, 17, 33, 64, 130)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gpu")
    dense = make_tiny(root / "dense")
    awq, _ = make_tiny_awq(root / "awq")
    window = make_tiny(root / "window", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24)
    return {"dense": dense, "awq": awq, "window": window}


@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", list(MARGINS))
@pytest.mark.parametrize("model", ["dense", "awq", "window"])
def test_greedy_text_is_the_cpus(folders: dict[str, Path], model: str, dtype: str, kv: str) -> None:
    reference = greedy(toy_engine(folders[model], kv_cache_dtype=kv), prompts(), 24)
    gpu = toy_engine(folders[model], device="cuda", dtype=dtype, kv_cache_dtype=kv)
    found = greedy(gpu, prompts(), 24)
    margin = MARGINS[dtype]
    differences = [first_clear_difference(a, b, margin) for a, b in zip(reference, found, strict=True)]
    assert not any(differences), differences
    # power: another model's text is told apart
    other = greedy(toy_engine(folders["dense" if model != "dense" else "window"], kv_cache_dtype=kv), prompts(), 24)
    assert any(first_clear_difference(a, b, margin) for a, b in zip(reference, other, strict=True))


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_chunked_prefill_and_prefix_hits_change_nothing(folders: dict[str, Path], kv: str) -> None:
    options = {"device": "cuda", "dtype": "half", "kv_cache_dtype": kv}
    prompt = prompts()[-1]
    whole = toy_engine(folders["awq"], **options)
    cold = greedy(whole, [prompt], 24)[0]
    warm = greedy(whole, [prompt], 24)[0]
    assert whole.stats().prefix_cache_hits > 0
    chunked = greedy(toy_engine(folders["awq"], max_num_batched_tokens=48, **options), [prompt], 24)[0]
    assert first_clear_difference(cold, warm, MARGINS["half"]) is None
    assert first_clear_difference(cold, chunked, MARGINS["half"]) is None


def test_memory_of_the_plan_is_what_is_allocated(folders: dict[str, Path]) -> None:
    engine = toy_engine(folders["awq"], device="cuda", dtype="half", kv_cache_memory_bytes=1 << 30)
    assert not [line for line in engine.facts.report if line.startswith("WARNING") and "apart" in line]
    assert engine.runner.cache.nbytes == pytest.approx(1 << 30, rel=0.02)


def test_nonfinite_rows_end_alone(folders: dict[str, Path]) -> None:
    engine = toy_engine(folders["dense"], device="cuda", dtype="half")
    with torch.inference_mode():
        table = next(
            t for leaf in engine.runner.model.leaves for t in leaf.buffers().values()
            if tuple(t.shape) == (320, 256) and "embed" in leaf.name
        )
        table[250] = float("nan")
    never = {250: -100.0}
    out = run(engine, [
        request("bad", [*range(20), 250, *range(20)]),
        request("good", range(40), logit_bias=never),
    ])
    assert out.last["bad"].finish_reason == "error"
    assert out.last["good"].finish_reason == "length"


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("model", ["dense", "awq", "window"])
def test_graphs_change_nothing(folders: dict[str, Path], model: str, kv: str) -> None:
    """Replayed steps are padded to the captured sizes and use fixed buffers; values are those of eager steps."""
    options = {"device": "cuda", "dtype": "half", "kv_cache_dtype": kv, "kv_cache_memory_bytes": 16 << 20}
    eager = toy_engine(folders[model], enforce_eager=True, **options)
    graphs = toy_engine(folders[model], **options)
    assert eager.runner.graphs is None and graphs.runner.graphs is not None
    many = [p for p in prompts() for _ in range(3)]
    for batch in (many, many[:1], many[:5]):
        want, found = greedy(eager, batch, 24), greedy(graphs, batch, 24)
        differences = [first_clear_difference(a, b, MARGINS["half"]) for a, b in zip(want, found, strict=True)]
        assert not any(differences), differences
