"""Sparse feed-forward layers: a router that picks a few experts for each token, and the experts.

Every linear of every expert is an ordinary checkpoint module with a scheme of its own, so experts may be stored in any
format and even in different ones. Where all experts of a layer agree and their format has a grouped op for the device
(`LinearScheme.bind_experts`), they run as one; else one expert after the other, those with tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from qengine.layers.activation import GatedActivation
from qengine.layers.expert_slots import ExpertSlots
from qengine.layers.feeds import Feed
from qengine.layers.linear import Linear, take_shards, whole
from qengine.layers.module import ModelContext
from qengine.plugin import ExpertPairs, ExpertsOp, LinearScheme


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the parts: `block` under the decoder layer, and an expert's three linears."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class MoESpec:
    """One sparse layer. `normalize`: the weights of a token's experts are scaled to a sum of 1."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    normalize: bool


class Router(Linear):
    """Scores of all experts, in float32: rounding them to 16 bits would sometimes pick other experts."""

    quantizable = False

    def __init__(self, ctx: ModelContext, name: str, hidden_size: int, num_experts: int) -> None:
        super().__init__(ctx, name, hidden_size, num_experts)
        self.dtype = torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> float32 [T, num_experts]."""
        return super().__call__(x.float())


class ExpertLinear(Linear):
    """One linear (or fused pair) of one expert; belongs to the group of the same linears of the other experts."""

    def __init__(
        self, ctx: ModelContext, group: ExpertGroup, names: Sequence[str], in_features: int, outs: Sequence[int]
    ) -> None:
        super().__init__(ctx, names, in_features, outs)
        self.group = group
        self.index = len(group.leaves)
        group.leaves.append(self)

    def resolve(self, schemes: Sequence[LinearScheme]) -> None:
        """On a CPU the variants that keep fewer bytes: a batch spreads over the experts, so few rows reach each, and a
        dense copy of every expert beside its packed weights would be most of the model."""
        super().resolve([scheme.of_experts() for scheme in schemes])
        if self.info.type == "cpu":
            self.compact()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        grouped = self.group.op()
        if grouped is None:
            super().load(tensors)
        else:
            self.ops = [grouped.bind(self.index, take_shards(self.specs, tensors))]


class ExpertGroup:
    """The same linear of all experts of a layer; `share` of them are chosen for each token."""

    def __init__(self, layer: SparseMoE, share: float) -> None:
        self.layer, self.share = layer, share
        self.leaves: list[ExpertLinear] = []
        self._made: list[ExpertsOp | None] = []

    def op(self) -> ExpertsOp | None:
        """The grouped op, made (empty) when it is first asked for, after all schemes are known."""
        if not self._made:
            self._made.append(self._bind())
        return self._made[0]

    def run_apart(self) -> None:
        """Never group: each expert's own linear runs, so that what it reads can be looked at. Before `load`."""
        self._made = [None]

    def _bind(self) -> ExpertsOp | None:
        first = self.leaves[0]
        scheme = first.schemes[0]
        if any(s.key != scheme.key for leaf in self.leaves for s in leaf.schemes):
            return None
        return scheme.bind_experts(whole(first.specs), len(self.leaves), first.device, first.info, first.dtype)


class SparseMoE:
    """y = sum over a token's experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x))."""

    def __init__(self, ctx: ModelContext, name: str, spec: MoESpec, names: ExpertNames) -> None:
        """`name` is the checkpoint's module: its router is `name`.gate, its experts are `name`.experts.0 and so on."""
        h, i = spec.hidden_size, spec.intermediate_size
        self.spec = spec
        self.dtype = ctx.dtype
        self.router = Router(ctx, f"{name}.gate", h, spec.num_experts)
        share = spec.top_k / spec.num_experts
        self.gate_up, self.down = ExpertGroup(self, share), ExpertGroup(self, share)
        self.slots: ExpertSlots | None = None
        """Set where the experts live in host memory, and some of them on the device as well."""
        for e in range(spec.num_experts):
            expert = f"{name}.experts.{e}"
            ExpertLinear(ctx, self.gate_up, [f"{expert}.{names.gate}", f"{expert}.{names.up}"], h, [i, i])
            ExpertLinear(ctx, self.down, [f"{expert}.{names.down}"], i, [h])
        self.activation = GatedActivation(spec.activation)
        self._numbers: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Elements a token that live at once, in units of an MLP's intermediate size (see GatedMLP): gate and up, their
        product and the float32 result, for each of its experts."""
        return -(-self.spec.top_k * (3 * self.spec.intermediate_size + 2 * self.spec.hidden_size) // 3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; float32 where the compute dtype is float16, whose range a product of
        gate and up can leave in models that were trained in bfloat16."""
        weights, experts = self._choose(self.router(x))
        up, down = self.gate_up.op(), self.down.op()
        places, count = experts.flatten(), self.spec.num_experts
        if self.slots is not None and self.slots.use.on:
            up, down = self.slots.up, self.slots.down
            places, count = self.slots.named(places), self.slots.count
        pairs = self._sorted(places, weights, count)
        if up is None or down is None or len(pairs.order) > min(up.most_pairs, down.most_pairs):
            y = self.one_by_one(x, pairs)
        elif self.dtype is torch.float16:
            inner, scale = self.activation.scaled(up(x, pairs, False))
            y = down(inner, pairs, True).float().mul_(torch.empty_like(scale).index_copy_(0, pairs.order, scale))
        else:
            y = down(self.activation(up(x, pairs, False)), pairs, True)
        y = y.view(x.shape[0], -1, self.spec.hidden_size).sum(1)
        return y if self.dtype is torch.float16 else y.to(self.dtype)

    def inputs(self) -> list[Linear]:
        """The router, which sees every token, and the first linears of all experts."""
        return [self.router, *self.gate_up.leaves]

    def feeds(self) -> list[Feed]:
        rows = self.spec.intermediate_size + torch.arange(self.spec.intermediate_size)
        return [Feed([down], up, rows) for up, down in zip(self.gate_up.leaves, self.down.leaves, strict=True)]

    def route(self, scores: torch.Tensor) -> ExpertPairs:
        """scores float32 [T, num_experts] -> the pairs."""
        weights, experts = self._choose(scores)
        return self._sorted(experts.flatten(), weights, self.spec.num_experts)

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """scores float32 [T, num_experts] -> weights float32 and experts int64, both [T, top_k]. Probabilities over all
        experts first, then the best of them, as the models were trained."""
        weights, experts = scores.softmax(-1).topk(self.spec.top_k, dim=-1)
        if self.spec.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts

    def _sorted(self, places: torch.Tensor, weights: torch.Tensor, count: int) -> ExpertPairs:
        """places int64 [P]: of each pair its expert, or the slot that holds it, below `count`."""
        ids, order = places.sort(stable=True)
        if self._numbers is None:
            self._numbers = torch.arange(self.spec.num_experts + 1, device=ids.device)
        offsets = torch.searchsorted(ids, self._numbers[: count + 1], out_int32=True)
        return ExpertPairs(order, offsets, weights.flatten(), self.spec.top_k)

    def one_by_one(self, x: torch.Tensor, pairs: ExpertPairs) -> torch.Tensor:
        """x [T, hidden_size] -> float32 [P, hidden_size] by pair number, weighted."""
        tokens = pairs.order // pairs.top_k
        out = x.new_empty((len(tokens), self.spec.hidden_size), dtype=torch.float32)
        for e, (a, b) in enumerate(pairwise(pairs.offsets.tolist())):
            if a == b:
                continue
            order = pairs.order[a:b]
            gate_up = self.gate_up.leaves[e](x.index_select(0, tokens[a:b]))
            if self.dtype is torch.float16:
                inner, scale = self.activation.scaled(gate_up)
                y = self.down.leaves[e](inner).float().mul_(scale)
            else:
                y = self.down.leaves[e](self.activation(gate_up))
            out.index_copy_(0, order, y * pairs.weights[order, None])
        return out
