"""Experts in slots: the same bits as with all of them on the device, in every format, on kernels that run in the
interpreter; what is copied and counted; and whole layers where slots can't be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloaded_models import FP8, GPTQ, AtItsWorst, StackedOp, Tower, loaded
from qengine.core.offload import copied_bytes
from qengine.errors import ConfigError
from qengine.models.model import Model
from qengine.plugin import ExpertsOp
from qengine.runtime import expert_slots
from qengine.runtime.expert_slots import SlotLayers
from qengine.runtime.offload_units import expert_units
from qengine_kernels.expert_slots import HITS, QUERIES, Copies, CopyPart, copies_of
from torch_kv import PagedRun
from toy_engine import request, run, toy_engine
from toy_models import awq_config, make_tiny

FORMATS: dict[str, dict[str, Any] | None] = {
    "16-bit": None, "awq": awq_config(32), "gptq": GPTQ, "fp8": FP8,
}  # fmt: skip


@functools.cache
def inputs(*tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, Tower.WIDTH, generator=generator) for n in tokens]


def counted(tower: Tower) -> tuple[int, int]:
    """Queries and hits."""
    assert tower.store is not None and tower.store.slots is not None, tower.store and tower.store.notes
    counts = tower.store.slots.totals().tolist()
    return counts[QUERIES], counts[HITS]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_bits_that_it_gives_on_the_device(name: str, tmp_path: Path) -> None:
    resident, lane = Tower(tmp_path, FORMATS[name]), AtItsWorst()
    tower = Tower(tmp_path, FORMATS[name], lane, slots=3)
    lane.copies.clear()
    for x, copies in zip(inputs(2, 1), (copied_bytes([1] * tower.LAYERS), 0), strict=True):
        want = resident(x)
        assert torch.isfinite(want).all() and not torch.allclose(want, x, atol=1e-3)
        assert torch.equal(tower(x), want)
        assert len(lane.copies) == copies, "slots for one token's experts: passes of one token copy no layer"
        lane.copies.clear()
    queries, hits = counted(tower)
    assert queries == tower.LAYERS * tower.TOP_K and 0 < hits <= queries


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_passes_in_any_order(slots: int, tmp_path: Path) -> None:
    """Few and many tokens, the same five times and others; fewer and as many slots as a token and a layer have."""
    resident = Tower(tmp_path, None, torch_only=True)
    tower = Tower(tmp_path, None, AtItsWorst(), slots, torch_only=True)
    passes = [*inputs(1, 4, 1, 2, 2, 1), *[inputs(1)[0]] * 5, *inputs(3, 1, 1)]
    assert tower.stream is not None and tower.stream.slots is not None
    for i, x in enumerate(passes):
        assert torch.equal(tower(x), resident(x))
        assert not tower.stream.slots.on, "who doesn't say how many tokens a pass has gets whole layers"
        if i % 3 == 0:  # a pass that ends somewhere
            tower.stream.begin(1)
            tower.layers[0](x[:1])
            tower.stream.restart()
    queries, hits = counted(tower)
    assert queries / 4 < hits <= queries and (hits == queries) is (slots == Tower.EXPERTS)
    assert tower.store is not None and tower.store.slots is not None
    tower.store.slots.reset()
    assert counted(tower) == (0, 0)
    assert torch.equal(tower(passes[0]), resident(passes[0])), "what slots hold stays when counting begins anew"
    for layer in tower.layers:  # the control: other experts in the slots
        assert layer.slots is not None
        layer.slots.copies.pool.copy_(layer.slots.copies.pool.roll(len(layer.slots.copies.pool) // slots))
    assert not torch.equal(tower(passes[0]), resident(passes[0]))


def test_a_whole_model(tmp_path: Path) -> None:
    """Attention stays on the device; prompts copy layers, and what follows takes experts from slots."""

    def steps(model: Model) -> torch.Tensor:
        run = PagedRun(model, [[7, 1, 5]])
        for tokens in (2, 1):
            run.step([tokens])
        return torch.cat(run.logits[0])

    want = steps(loaded(tmp_path, "16-bit experts", None)[0])
    lane = AtItsWorst()
    model, store = loaded(tmp_path, "16-bit experts", lane, slots=3)
    assert store is not None and store.slots is not None
    lane.copies.clear()
    assert torch.equal(steps(model), want)
    assert len(lane.copies) == copied_bytes([1] * Tower.LAYERS)
    assert {len(leaves) for leaves in expert_units(model, "model.layers.1.*.experts").values()} == {8}
    with pytest.raises(ConfigError, match=r"nothing else; have: .*\*\.o_proj, which names model.*o_proj too"):
        expert_units(model, "*.experts,*.o_proj")
    with pytest.raises(ConfigError, match="whole experts"):
        expert_units(model, "*.experts.*.down_proj")


def refused(store_notes: list[str], reason: str) -> bool:
    (note,) = store_notes
    return "WARNING: expert slots are not used, every step copies whole layers" in note and reason in note


def shifted(parts: list[CopyPart], source: torch.Tensor, pool: torch.Tensor) -> Copies:
    return copies_of(parts, source.roll(256), pool)


def broken(*_: object) -> Any:
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


def unlike(op: StackedOp, stacks: object) -> None:
    return None


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ((StackedOp, "over", ExpertsOp.over), "grouped operation has no slots"),
        ((StackedOp, "over", unlike), "experts can't run as one"),
        ((StackedOp, "buffers", ExpertsOp.buffers), "experts run one after the other"),
        ((expert_slots, "copies_of", shifted), "kernels do not read host memory rightly here (layer 0"),
        ((SlotLayers, "check", broken), "kernels can't read host memory here (Pointer argument"),
    ],
    ids=["third party", "unlike each other", "cannot move", "wrong bytes", "no access"],
)
def test_whole_layers_where_there_can_be_no_slots(
    patch: tuple[object, str, Callable[..., Any]], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Tower(tmp_path, None, torch_only=True)(inputs(1)[0])
    monkeypatch.setattr(*patch)
    tower = Tower(tmp_path, None, AtItsWorst(), slots=3, torch_only=True)
    assert tower.store is not None and tower.store.slots is None, tower.store
    assert refused(tower.store.notes[-1:], reason), tower.store.notes
    assert all(layer.slots is None for layer in tower.layers)
    torch.testing.assert_close(tower(inputs(1)[0]), want, rtol=1e-4, atol=1e-5)


def test_models_without_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for mixtures of experts; have: a model whose layers have none"):
        expert_units(loaded(tmp_path, "16-bit", None)[0], None)


def test_counts_come_with_the_sampled_ids(tmp_path: Path) -> None:
    """The engine's statistics show what the last collected step brought, and nothing of warming up; every step says how
    many tokens it has before it runs, and when it is over."""
    make_tiny(tmp_path)
    engine = toy_engine(tmp_path)
    counts = torch.zeros(4, dtype=torch.int64)
    slots = SimpleNamespace(totals=lambda: counts.add_(torch.tensor([1, 6, 2, 0])).clone(), reset=counts.zero_)
    engine.runner.expert_slots = slots  # type: ignore[assignment]
    passes: list[int | str] = []
    stream = SimpleNamespace(begin=passes.append, finish=lambda: passes.append("over"))
    engine.runner.weights = stream  # type: ignore[assignment]
    run(engine, [request("a", [1, 2, 3], max_tokens=4, ignore_eos=True)])
    assert passes == [3, "over", 1, "over", 1, "over", 1, "over"]
    stats = engine.stats()
    assert stats.expert_cache_queries == 6 * engine.steps and stats.expert_cache_hits == 2 * engine.steps
    engine.runner.count_anew()
    assert (engine.stats().expert_cache_queries, engine.stats().expert_cache_hits) == (0, 0) and not counts.any()
