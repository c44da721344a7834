"""Plans over random models, GPUs and options: advice that is taken works, and more memory never gives less."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from published_models import write_config
from qengine.config import EngineConfig
from qengine.core.memory import ActivationShape, group_layers
from qengine.core.offload import OffloadUnit, bytes_of, offload_bytes
from qengine.core.plan import OFFLOAD_LEN, MemoryPlan, PlanInput, attempt
from qengine.core.refusal import plan
from qengine.errors import CapacityError
from qengine.runtime.decide import Surveyed
from qengine.runtime.fit import Fit, fit
from qengine.runtime.machine import catalogue_machine
from qengine.runtime.planning import look_at_model

MIB, GIB = 2**20, 2**30
CORE = settings(max_examples=60)
WHOLE = settings(max_examples=10)


MIXTURES = [(8, 2), (128, 8)]
"""(experts of a layer, those that a token takes)"""


@st.composite
def inputs(draw: st.DrawFn, mixtures: Sequence[tuple[int, int]] = ((0, 0), (0, 0), *MIXTURES)) -> PlanInput:
    """From a toy on a small device to a large model, with and without windows, a claimed cache and offload."""
    layers = draw(st.integers(1, 8))
    windows = draw(st.lists(st.sampled_from([None, 128, 1024]), min_size=layers, max_size=layers))
    groups = group_layers(windows)
    layer_bytes = draw(st.integers(1, 64)) * 256
    block_bytes = layer_bytes * max(len(group.layers) for group in groups)
    width = draw(st.integers(64, 4096))
    per_layer = draw(st.integers(1, 400)) * MIB
    total = draw(st.integers(64, 24 * 1024)) * MIB
    model_max_len = draw(st.integers(2, 131072))
    experts, top_k = draw(st.sampled_from(mixtures))
    return PlanInput(
        total=total,
        free=int(total * draw(st.floats(0.05, 1.0))),
        weights={"format": layers * per_layer, "embedding": draw(st.integers(0, 512)) * MIB},
        shape=ActivationShape(
            width, 3 * width, draw(st.integers(100, 150_000)), 8, 2, 64, itemsize=2, residual_itemsize=4,
            workspace=draw(st.integers(0, 256)) * MIB,
        ),
        logit_rows=draw(st.integers(1, 256)),
        groups=groups,
        block_bytes=block_bytes,
        block_size=16,
        max_chunk=draw(st.integers(16, 8192)),
        model_max_len=model_max_len,
        max_model_len=draw(st.none() | st.integers(2, 140_000)),
        utilization=draw(st.floats(0.1, 1.0)),
        kv_cache_memory_bytes=draw(st.none() | st.none() | st.integers(1, 4096).map(lambda n: n * MIB)),
        kv_default=draw(st.none() | st.just(64 * MIB)),
        reserve=draw(st.integers(0, 512)) * MIB,
        graphs=draw(st.integers(0, 256)) * MIB,
        length_bytes=draw(st.sampled_from([0, 0, 2048])),
        alternatives=draw(st.sampled_from([{}, {"half": block_bytes // 2}])),
        units=[OffloadUnit(str(i), per_layer, experts, top_k) for i in range(layers)],
        host_free=draw(st.none() | st.integers(0, layers).map(lambda n: n * per_layer)),
    )  # fmt: skip


@st.composite
def crowded(draw: st.DrawFn, mixtures: Sequence[tuple[int, int]]) -> PlanInput:
    """Where offload is automatic and needed: the device lacks a part of what all layers but the buffers of two, and the
    slots of one token's experts, would leave free. By construction, as hardly any of `inputs` is such a case."""
    i = draw(inputs(mixtures))
    units = [dataclasses.replace(i.units[0], name=str(k)) for k in range(draw(st.integers(4, 8)))]
    longest = None if i.max_model_len is None else min(i.max_model_len, i.model_max_len)
    i = dataclasses.replace(
        i, weights=i.weights | {"format": len(units) * units[0].nbytes}, units=units, host_free=None,
        kv_cache_memory_bytes=None, max_model_len=longest,
    )  # fmt: skip
    goal = dataclasses.replace(i, max_model_len=longest or min(i.model_max_len, OFFLOAD_LEN))
    resident = goal.fixed + (goal.needed_blocks + 1) * i.block_bytes
    most = offload_bytes(units, len(units) * units[0].nbytes, units[0].top_k).saved
    budget = resident - max(MIB, int(most * draw(st.floats(0.0, 1.0))))
    total = max(int(budget / i.utilization) + 1, budget + i.reserve)
    return dataclasses.replace(i, offload=None, total=total, free=total)


def with_changes(i: PlanInput, changes: Mapping[str, Any]) -> PlanInput:
    """Config fields as fields of the plan's input, the way `plan_input` maps them."""
    names = {
        "max_model_len": "max_model_len", "gpu_memory_utilization": "utilization",
        "kv_cache_memory_bytes": "kv_cache_memory_bytes", "max_num_batched_tokens": "max_chunk",
        "max_num_seqs": "logit_rows", "cpu_offload_gb": "offload", "expert_slots": "expert_slots",
    }  # fmt: skip
    fields = {names[name]: value for name, value in changes.items() if name in names}
    if "offload" in fields:
        fields["offload"] = bytes_of(fields["offload"])
    if "kv_cache_dtype" in changes:
        fields |= {"block_bytes": i.alternatives[changes["kv_cache_dtype"]], "alternatives": {}}
    assert set(changes) <= {*names, "kv_cache_dtype"}
    return dataclasses.replace(i, **fields)


@CORE
@given(inputs() | crowded([(0, 0), *MIXTURES]))
def test_a_plan_keeps_within_the_budget_and_holds_its_length(i: PlanInput) -> None:
    found = attempt(i)
    assume(found is not None)
    assert found is not None
    assert found.planned <= found.inputs.budget
    assert found.inputs.blocks_for(found.max_model_len) <= found.num_usable_blocks
    assert 2 <= found.max_model_len <= i.model_max_len
    assert sum(size for _, size in found.items()[5:]) == found.planned


@CORE
@given(inputs(), st.none() | st.integers(0, 9000).map(lambda n: n * MIB), st.none() | st.integers(8, 140))
def test_advice_that_is_taken_works(i: PlanInput, offload: int | None, slots: int | None) -> None:
    i = dataclasses.replace(i, offload=offload, expert_slots=slots if i.units[0].experts else 0)
    try:
        plan(i)
    except CapacityError as e:
        if e.changes:
            plan(with_changes(i, e.changes))
        else:
            assert e.hint is None or "memory" in e.hint or "a device with" in e.hint


@CORE
@given(inputs(), st.integers(1, 200_000))
def test_a_length_above_the_models_own_is_answered_with_what_fits(i: PlanInput, more: int) -> None:
    """With the longest that fits, where any does: one token more does not."""
    i = dataclasses.replace(i, max_model_len=i.model_max_len + more)
    with pytest.raises(CapacityError, match=r"^--max-model-len is above.*what would work: --max-model-len ") as caught:
        plan(i)
    changes = caught.value.changes
    if attempt(dataclasses.replace(i, max_model_len=2)) is None:
        assert changes.get("max_model_len") is None, "more has to change than the length"
    else:
        asked = changes["max_model_len"]
        assert isinstance(asked, int) and set(changes) == {"max_model_len"}
        assert f"--max-model-len {asked}, or auto" in str(caught.value)
        assert attempt(dataclasses.replace(i, max_model_len=asked + 1)) is None
    if changes:
        plan(with_changes(i, changes))


@CORE
@given(inputs(), st.integers(70, 90))
def test_a_kv_cache_that_is_too_large_is_answered_with_a_large_one(i: PlanInput, bits: int) -> None:
    """No more than 3 % and two blocks below what is there; the smallest that would do is the control."""
    i = dataclasses.replace(i, kv_cache_memory_bytes=1 << bits, max_model_len=None, offload=0)
    least = dataclasses.replace(i, kv_cache_memory_bytes=i.needed_blocks * i.block_bytes)
    assume(attempt(least) is not None)
    with pytest.raises(CapacityError) as caught:
        plan(i)
    assert set(caught.value.changes) == {"kv_cache_memory_bytes"}
    found, there = plan(with_changes(i, caught.value.changes)), i.budget - i.fixed
    assert there * 0.968 - 2 * i.block_bytes <= found.kv_bytes <= there


def test_offload_is_advised_where_nothing_else_helps(folders: Path) -> None:
    """Qwen2.5-32B AWQ on a T4. The smallest number is named: with a layer less it does not fit."""
    s = looked_at("Qwen2.5-32B", "awq", "t4", "fp8", folders / "large")
    config = dataclasses.replace(s.config, max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=4)
    with pytest.raises(CapacityError) as caught:
        plan(s.inputs(config))
    changes = caught.value.changes
    assert changes is not None and set(changes) == {"cpu_offload_gb"} and "--cpu-offload-gb" in str(caught.value)
    asked = float(str(changes["cpu_offload_gb"]))
    found = plan(s.inputs(dataclasses.replace(config, cpu_offload_gb=asked)))
    moved = found.inputs.offloaded
    less = (moved.nbytes - found.inputs.units[0].nbytes - MIB) / GIB
    with pytest.raises(CapacityError):
        plan(s.inputs(dataclasses.replace(config, cpu_offload_gb=less)))
    # Where no length is asked for, a useful one is made room for.
    with pytest.raises(CapacityError) as caught:
        plan(s.inputs(dataclasses.replace(config, max_model_len=None)))
    asked = float(str((caught.value.changes or {})["cpu_offload_gb"]))
    assert plan(s.inputs(dataclasses.replace(config, max_model_len=None, cpu_offload_gb=asked))).max_model_len >= 4096
    # Host memory is checked too: with less of it than that, there is no such advice, and asking is refused by name.
    short = dataclasses.replace(s, machine=dataclasses.replace(s.machine, host_free=2 * GIB))
    with pytest.raises(CapacityError, match="a device with") as caught:
        plan(short.inputs(config))
    with pytest.raises(CapacityError, match="host memory does not hold"):
        plan(short.inputs(dataclasses.replace(config, cpu_offload_gb=asked)))


@CORE
@given(inputs())
def test_what_no_flag_can_do_a_larger_device_can(i: PlanInput) -> None:
    """The size that is named is enough; the control is one that lacks a tenth of it."""
    try:
        plan(i)
    except CapacityError as e:
        assume(not e.changes and e.hint is not None and "a device with" in e.hint)
        size, unit = str(e.hint).split("a device with ")[1].split(",")[0].split()
        total = int((float(size) + 0.01) * {"MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}[unit])
        if "--max-model-len auto and " in str(e.hint):
            i = dataclasses.replace(i, max_model_len=None)
        plan(dataclasses.replace(i, total=total, free=total))
        with pytest.raises(CapacityError):
            plan(dataclasses.replace(i, total=int(total * 0.9), free=int(total * 0.9)))


def given_by(found: MemoryPlan | None) -> tuple[int, int]:
    """(context, minus what had to leave the device)"""
    return (0, 0) if found is None else (found.max_model_len, -found.inputs.offloaded.nbytes)


@CORE
@given(inputs(), st.integers(1, 4096), st.booleans())
def test_more_memory_never_gives_less(i: PlanInput, more_mib: int, offload: bool) -> None:
    i = dataclasses.replace(i, offload=None if offload else 0)
    more = dataclasses.replace(i, total=i.total + more_mib * MIB, free=i.free + more_mib * MIB)
    less, found = attempt(i), attempt(more)
    assume(less is not None)
    assert less is not None and found is not None
    assert given_by(found) >= given_by(less)
    assert found.inputs.offloaded.nbytes <= less.inputs.offloaded.nbytes
    if not less.inputs.offloaded.units:
        assert found.num_blocks >= less.num_blocks


@settings(max_examples=30)
@given(crowded(MIXTURES), st.integers(1, 16_000))
def test_more_memory_never_gives_fewer_slots(i: PlanInput, more_mib: int) -> None:
    """And those that are given are the most: one more leaves too little room for the length."""
    i = dataclasses.replace(i, expert_slots=None)
    less = attempt(i)
    assert less is not None and less.inputs.offloaded.slots and less.inputs.expert_slots is not None
    one_more = dataclasses.replace(less.inputs, expert_slots=less.inputs.expert_slots + 1)
    assert less.inputs.expert_slots >= i.units[0].top_k
    assert attempt(one_more) is None or less.inputs.expert_slots == i.units[0].experts
    found = attempt(dataclasses.replace(i, total=i.total + more_mib * MIB, free=i.free + more_mib * MIB))
    assert found is not None and found.max_model_len >= less.max_model_len
    if found.inputs.offloaded.units:
        assert (found.inputs.expert_slots or 0) >= less.inputs.expert_slots
    assert found.planned <= found.inputs.budget


@settings(max_examples=20)
@given(crowded([(0, 0), *MIXTURES]))
def test_automatic_offload_takes_the_fewest_layers(i: PlanInput) -> None:
    found = attempt(i)
    assert found is not None and len(found.inputs.offloaded.units) > 1
    one_less = sum(i.units[k].nbytes for k in range(len(found.inputs.offloaded.units) - 1))
    asked = dataclasses.replace(i, offload=one_less, max_model_len=found.max_model_len)
    assert attempt(asked) is None


# Whole configs, through the model and the formats


@functools.cache
def looked_at(model: str, quantised: str, gpu: str, kv: str, folder: Path) -> Surveyed:
    layers = {"num_hidden_layers": LAYERS[model]} if model in LAYERS else {}
    write_config(folder, model, quantised, **layers)
    config = EngineConfig(model=str(folder), kv_cache_dtype=kv)
    return look_at_model(config, catalogue_machine(gpu))[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


LAYERS = {"Qwen2.5-72B": 8, "Llama-3.1-70B": 9, "Gemma-3-27B": 14}
"""So many layers of large models are quickly looked at, and fill small cards in 16 bits and not in 4."""
MODEL_NAMES = st.sampled_from(sorted(LAYERS))
OPTIONS = st.fixed_dictionaries(
    {
        "gpu_memory_utilization": st.sampled_from([0.5, 0.9, 0.92, 0.98]),
        "max_model_len": st.sampled_from([None, 512, 4096, 32768, 131072]),
        "max_num_batched_tokens": st.sampled_from([None, 256, 2048, 16384]),
        "max_num_seqs": st.sampled_from([1, 16, 256]),
        "kv_cache_memory_bytes": st.sampled_from([None, None, None, 256 * MIB, 8 * GIB]),
        "enforce_eager": st.booleans(),
    }
)
CARDS = st.sampled_from(["2080ti", "t4", "a10", "a100-40"])
QUANTISATIONS = st.sampled_from(["16-bit", "awq", "gptq"])


@WHOLE
@given(MODEL_NAMES, QUANTISATIONS, CARDS, st.sampled_from(["auto", "fp8"]), OPTIONS)
def test_flags_that_are_advised_start_a_published_model(
    folders: Path, model: str, quantised: str, gpu: str, kv: str, options: dict[str, Any]
) -> None:
    s = looked_at(model, quantised, gpu, kv, folders / f"{model}-{quantised}")
    s = dataclasses.replace(s, config=dataclasses.replace(s.config, **options))
    try:
        plan(s.inputs(s.config))
    except CapacityError as e:
        if e.changes:
            fields = {k: v for k, v in e.changes.items() if k != "kv_cache_dtype"}
            config = dataclasses.replace(s.config, **fields)  # type: ignore[arg-type]
            asked_kv = str(e.changes.get("kv_cache_dtype", kv))
            other = looked_at(model, quantised, gpu, asked_kv, folders / f"{model}-{quantised}")
            plan(other.inputs(dataclasses.replace(config, kv_cache_dtype=asked_kv)))


@WHOLE
@given(MODEL_NAMES, QUANTISATIONS, CARDS, st.sampled_from(["context", "streams"]), OPTIONS)
def test_what_fit_finds_fits(
    folders: Path, model: str, quantised: str, gpu: str, goal: Any, options: dict[str, Any]
) -> None:
    s = looked_at(model, quantised, gpu, "auto", folders / f"{model}-{quantised}")
    if (options["max_model_len"] or 0) > s.model.max_position:
        options["max_model_len"] = None
    s = dataclasses.replace(s, config=dataclasses.replace(s.config, **options))
    found = fit(s, goal)
    as_asked = attempt(s.inputs(s.config))
    if found is None:
        assert as_asked is None
        return
    fields = {k: v for k, v in found.changes.items() if k != "kv_cache_dtype"}
    config = dataclasses.replace(s.config, **fields)  # type: ignore[arg-type]
    other = looked_at(
        model, quantised, gpu, str(found.changes.get("kv_cache_dtype", "auto")), folders / f"{model}-{quantised}"
    )
    again = plan(other.inputs(config))
    assert again.num_blocks == found.plan.num_blocks and again.max_model_len == found.plan.max_model_len
    check_goal(found, as_asked)


def check_goal(found: Fit, as_asked: MemoryPlan | None) -> None:
    """Never less than without any change, and offload only where nothing else does."""
    if as_asked is None:
        return
    assert not found.plan.inputs.offloaded.units
    if found.goal == "context":
        assert found.plan.max_model_len >= as_asked.max_model_len


@WHOLE
@given(MODEL_NAMES, QUANTISATIONS, st.sampled_from([("t4", "a10"), ("a10", "a100-40")]))
def test_a_larger_card_never_fits_less(folders: Path, model: str, quantised: str, cards: tuple[str, str]) -> None:
    small, large = (looked_at(model, quantised, card, "auto", folders / f"{model}-{quantised}") for card in cards)
    less, more = fit(small, "context"), fit(large, "context")
    if less is not None:
        assert more is not None and given_by(more.plan) >= given_by(less.plan)


def test_the_order_of_harm(folders: Path) -> None:
    """Qwen2.5-14B AWQ on a T4: 16-bit KV does not hold 16k tokens, fp8 KV does. It does not hold 32k, and the context
    is cut before anything is offloaded. 32B has to leave the card."""
    s = looked_at("Qwen2.5-14B", "awq", "t4", "auto", folders / "harm")
    configs = [dataclasses.replace(s.config, max_model_len=n) for n in (2048, 16384, 32768)]
    easy, half, cut = (fit(dataclasses.replace(s, config=config), "context") for config in configs)
    assert easy is not None and "kv_cache_dtype" not in easy.changes
    assert half is not None and half.changes["kv_cache_dtype"] == "fp8" and half.plan.max_model_len == 16384
    assert cut is not None and cut.changes["kv_cache_dtype"] == "fp8" and "cpu_offload_gb" not in cut.changes
    moved = fit(looked_at("Qwen2.5-32B", "awq", "t4", "auto", folders / "large"), "context")
    assert moved is not None and moved.plan.inputs.offloaded.units and "cpu_offload_gb" in moved.changes
