"""The sparse layer: routing, experts one by one and grouped, mixed formats, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from hf_reference import context
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearScheme, LinearShard, LinearSpec
from qengine_kernels.moe_gemm.reference import grouped_reference
from torch_linear import TorchLinearOp, TorchLinearScheme, load_leaves

SPEC = MoESpec(num_experts=5, top_k=2, hidden_size=16, intermediate_size=12, activation="silu", normalize=True)
NAMES = ExpertNames("moe", "w1", "w3", "w2")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(seed: int = 0, spec: MoESpec = SPEC) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    h, i = spec.hidden_size, spec.intermediate_size
    out = {"moe.gate.weight": torch.randn(spec.num_experts, h, generator=gen) / h**0.5}
    for e in range(spec.num_experts):
        for leaf, shape in (("w1", (i, h)), ("w3", (i, h)), ("w2", (h, i))):
            out[f"moe.experts.{e}.{leaf}.weight"] = torch.randn(shape, generator=gen) / shape[1] ** 0.5
    return out


def by_definition(x: torch.Tensor, state: dict[str, torch.Tensor], spec: MoESpec = SPEC) -> torch.Tensor:
    """Token by token, in float64."""
    state = {name: w.double() for name, w in state.items()}
    out = []
    for row in x.double():
        probabilities = torch.softmax(state["moe.gate.weight"] @ row, 0)
        best = sorted(range(spec.num_experts), key=lambda e: -float(probabilities[e]))[: spec.top_k]
        total = sum(probabilities[e] for e in best) if spec.normalize else 1.0
        y = torch.zeros_like(row)
        for e in best:
            w1, w3, w2 = (state[f"moe.experts.{e}.{leaf}.weight"] for leaf in ("w1", "w3", "w2"))
            y += probabilities[e] / total * (w2 @ (functional.silu(w1 @ row) * (w3 @ row)))
        out.append(y)
    return torch.stack(out).float()


def layer(state: dict[str, torch.Tensor], spec: MoESpec = SPEC) -> SparseMoE:
    ctx = context(None)
    moe = SparseMoE(ctx, "moe", spec, NAMES)
    assert load_leaves(ctx.leaves, state) == set(state)
    return moe


class GroupedScheme(TorchLinearScheme):
    """A third party's format that has a grouped op; `at` tells apart what would not fuse."""

    def __init__(self, at: str = "", most_pairs: int = 1000) -> None:
        self.key = ("grouped", at)
        self.most_pairs = most_pairs

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        return GroupedOp(self, spec, count)


class GroupedOp(ExpertsOp):
    def __init__(self, scheme: GroupedScheme, spec: LinearSpec, count: int) -> None:
        self.scheme, self.most_pairs = scheme, scheme.most_pairs
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.dense = torch.full((count, spec.out_features, spec.in_features), torch.nan)
        self.calls = 0

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        self.dense[expert] = torch.cat([s.tensors["weight"] for s in shards])
        return TorchLinearOp(self.dense[expert], None)

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        self.calls += 1
        weights = pairs.weights if combine else None
        return grouped_reference(x, self.dense, pairs.order, pairs.offsets, pairs.top_k, weights).to(x.dtype)


def grouped_layer(
    state: dict[str, torch.Tensor], schemes: dict[str, LinearScheme], most_pairs: int = 1000
) -> SparseMoE:
    """A layer whose experts' schemes are GroupedScheme, or those that `schemes` gives by module name."""
    ctx = context(None)
    moe = SparseMoE(ctx, "moe", SPEC, NAMES)
    moe.router.resolve([TorchLinearScheme()])
    leaves = [moe.router, *moe.gate_up.leaves, *moe.down.leaves]
    for leaf in leaves[1:]:
        leaf.resolve([schemes.get(spec.name, GroupedScheme(most_pairs=most_pairs)) for spec in leaf.specs])
    for leaf in reversed(leaves):
        leaf.load({name: state[name].clone() for name, _ in leaf.needs()})
    return moe


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 7])
def test_equals_the_definition(tokens: int, top_k: int, normalize: bool) -> None:
    spec = replace(SPEC, top_k=top_k, normalize=normalize)
    state, x = weights(), torch.randn(tokens, 16)
    got, want = layer(state, spec)(x), by_definition(x, state, spec)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    if top_k < 5:  # probabilities of all five sum to 1 anyway
        wrong = by_definition(x, state, replace(spec, normalize=not normalize))
        assert not torch.allclose(got, wrong, atol=1e-3)
    rolled = {**state, "moe.gate.weight": state["moe.gate.weight"].roll(1, 0)}
    assert not torch.allclose(got, by_definition(x, rolled, spec), atol=1e-3)


def test_routing_lists_every_pair_once_and_in_the_order_of_experts() -> None:
    moe = layer(weights())
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0, -9.0], [5.0, 0.0, 0.0, 6.0, -9.0], [0.0, 1.0, 0.0, 2.0, -9.0]])
    pairs = moe.route(scores)
    # token 0 takes experts 1 and 3, token 1 takes 3 and 0, token 2 takes 3 and 1; expert 2 and 4 get nobody
    assert pairs.offsets.tolist() == [0, 1, 3, 3, 6, 6]
    assert pairs.order.tolist() == [3, 0, 5, 1, 2, 4]
    by_token = pairs.weights.view(3, 2)
    torch.testing.assert_close(by_token.sum(1), torch.ones(3))
    torch.testing.assert_close(by_token[0, 0] / by_token[0, 1], torch.tensor(1.0).exp())


def test_scores_are_float32_whatever_the_compute_dtype() -> None:
    """Two experts whose scores differ by less than bfloat16 shows."""
    ctx = context(None, dtype=torch.bfloat16)
    moe = SparseMoE(ctx, "moe", replace(SPEC, top_k=1), NAMES)
    state = weights()
    state["moe.gate.weight"] = torch.zeros(5, 16)
    state["moe.gate.weight"][1, 0], state["moe.gate.weight"][3, 0] = 1.0, 1.001
    load_leaves(ctx.leaves, state)
    pairs = moe.route(moe.router(torch.full((1, 16), 4.0, dtype=torch.bfloat16)))
    assert pairs.offsets.tolist() == [0, 0, 0, 0, 1, 1]
    assert moe(torch.randn(3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_grouped_op_gives_what_the_loop_gives(tokens: int) -> None:
    state, x = weights(), torch.randn(tokens, 16)
    moe = grouped_layer(state, {})
    up, down = moe.gate_up.op(), moe.down.op()
    assert isinstance(up, GroupedOp) and isinstance(down, GroupedOp)
    torch.testing.assert_close(moe(x), by_definition(x, state), atol=1e-5, rtol=1e-4)
    assert (up.calls, down.calls) == (1, 1)
    # the experts' own linears are views into the grouped op
    assert moe.down.leaves[3].ops[0].buffers()["weight"].data_ptr() == down.dense[3].data_ptr()
    pairs = moe.route(moe.router(x))
    one_by_one = moe.one_by_one(x, pairs).view(tokens, 2, 16).sum(1)
    torch.testing.assert_close(moe(x), one_by_one, atol=1e-5, rtol=1e-4)
    up.dense = up.dense.roll(1, 0)
    assert not torch.allclose(moe(x), one_by_one, atol=1e-3)


def test_many_pairs_run_one_by_one() -> None:
    state = weights()
    moe = grouped_layer(state, {}, most_pairs=8)
    up = moe.gate_up.op()
    assert isinstance(up, GroupedOp)
    for tokens, calls in ((4, 1), (5, 1), (3, 2)):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(moe(x), by_definition(x, state), atol=1e-5, rtol=1e-4)
        assert up.calls == calls


@pytest.mark.parametrize("odd", ["moe.experts.2.w2", "moe.experts.0.w1", "moe.experts.4.w3"])
def test_experts_of_different_formats_run_one_by_one(odd: str) -> None:
    state, x = weights(), torch.randn(6, 16)
    moe = grouped_layer(state, {odd: GroupedScheme("other")})
    mixed, uniform = (moe.down, moe.gate_up) if odd.endswith("w2") else (moe.gate_up, moe.down)
    assert mixed.op() is None and uniform.op() is not None
    torch.testing.assert_close(moe(x), by_definition(x, state), atol=1e-5, rtol=1e-4)


def test_bytes_are_those_of_the_experts() -> None:
    moe = grouped_layer(weights(), {})
    leaves = [*moe.gate_up.leaves, *moe.down.leaves]
    planned = sum(sum(leaf.resident_bytes(DeviceInfo("cpu")).values()) for leaf in leaves)
    held = sum(t.numel() * t.element_size() for leaf in leaves for t in leaf.buffers().values())
    assert planned == held == 4 * 5 * 3 * 12 * 16
    assert len({t.data_ptr() for leaf in leaves for t in leaf.buffers().values()}) == 10


def test_on_a_cpu_experts_take_the_smaller_variant() -> None:
    class Roomy(TorchLinearScheme):
        def compact(self) -> LinearScheme:
            return TorchLinearScheme()

    moe = SparseMoE(context(None), "moe", SPEC, NAMES)
    moe.down.leaves[0].resolve([Roomy()])
    moe.router.resolve([Roomy()])
    assert type(moe.down.leaves[0].schemes[0]) is TorchLinearScheme
    assert type(moe.router.schemes[0]) is Roomy


def test_grouped_experts_keep_their_range_in_float16() -> None:
    """Products of gate and up far beyond float16, through the grouped op; the control is the op without the scales."""
    state = weights()
    for name in state:
        state[name] *= {"w1": 30, "w3": 3000}.get(name.split(".")[-2], 1)
    moe = grouped_layer(state, {})
    moe.dtype = torch.float16
    groups = (moe.gate_up.op(), moe.down.op())
    for op in groups:
        assert isinstance(op, GroupedOp)
        op.dense = op.dense.half().float()
    x = torch.randn(6, 16).half()
    halves = {name: t.half().float() if "experts" in name else t for name, t in state.items()}
    want = by_definition(x.float(), halves)
    got = moe(x)
    assert want.abs().max() > 65504 and got.dtype is torch.float32
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 5e-3
    up, down = groups
    assert up is not None and down is not None
    pairs = moe.route(moe.router(x))
    assert not torch.isfinite(down(moe.activation(up(x, pairs, False)), pairs, True)).all()
