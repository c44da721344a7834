"""Linear layers over one or more checkpoint modules (q/k/v and gate/up run as one where their schemes agree)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from qengine.layers.module import Leaf, ModelContext
from qengine.plugin import DeviceInfo, LinearOp, LinearScheme, LinearShard, LinearSpec, TensorNeed


class Linear(Leaf):
    """y = x @ W.T + b for one checkpoint module, or several stacked along their outputs.

    The loader calls `resolve` with one scheme per shard before anything is read. Shards whose schemes have equal keys
    are bound as one op; otherwise each run of equal neighbours gets its own op and the outputs are concatenated.
    """

    quantizable = True
    """Whether making a quantised copy of a model may quantise it; a checkpoint may hold it in any format."""
    output_layer = False
    """Whether it makes logits: a decode step asks one row of a sequence, however long its prompt was."""
    before: Callable[[], None] | None = None
    """Called before each product: where weights live in host memory, it sees to it that they are here."""

    def __init__(
        self,
        ctx: ModelContext,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
    ) -> None:
        names = [names] if isinstance(names, str) else list(names)
        outs = [out_features] if isinstance(out_features, int) else list(out_features)
        self.name = names[0]
        self.in_features = in_features
        self.out_features = sum(outs)
        self.device, self.info, self.dtype = ctx.device, ctx.info, ctx.dtype
        self.specs = [LinearSpec(n, in_features, o, bias) for n, o in zip(names, outs, strict=True)]
        self.schemes: list[LinearScheme] = []
        self.ops: list[LinearOp] = []
        ctx.add(self)

    def resolve(self, schemes: Sequence[LinearScheme]) -> None:
        self.schemes = list(schemes)

    def compact(self) -> None:
        """Take the variant of each scheme that keeps fewer bytes, where there is one; before `load`."""
        self.schemes = [scheme.compact() or scheme for scheme in self.schemes]

    def few_rows(self) -> None:
        """Take the variant of each scheme that is faster for few rows, where there is one; before `load`."""
        pairs = zip(self.specs, self.schemes, strict=True)
        self.schemes = [scheme.few_rows(spec, self.info, self.dtype) or scheme for spec, scheme in pairs]

    def needs(self) -> list[tuple[str, TensorNeed]]:
        return [
            (f"{spec.name}.{need.leaf}", need)
            for spec, scheme in zip(self.specs, self.schemes, strict=True)
            for need in scheme.tensors(spec)
        ]

    def runs(self) -> list[tuple[LinearScheme, list[LinearSpec]]]:
        """Neighbouring shards that run as one op."""
        out: list[tuple[LinearScheme, list[LinearSpec]]] = []
        for spec, scheme in zip(self.specs, self.schemes, strict=True):
            if out and out[-1][0].key == scheme.key:
                out[-1][1].append(spec)
            else:
                out.append((scheme, [spec]))
        return out

    def resident_bytes(self, info: DeviceInfo) -> dict[str, int]:
        """Bytes that `load` will keep, by format."""
        total: dict[str, int] = {}
        for scheme, specs in self.runs():
            fused = whole(specs)
            total[scheme.format] = total.get(scheme.format, 0) + scheme.resident_bytes(fused, info, self.dtype)
        return total

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.ops = []
        for scheme, specs in self.runs():
            self.ops.append(scheme.bind(take_shards(specs, tensors), self.device, self.info, self.dtype))

    def buffers(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{k}": t for i, op in enumerate(self.ops) for k, t in op.buffers().items()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]."""
        if self.before is not None:
            self.before()
        ops = self.ops
        if len(ops) == 1:
            return ops[0](x)
        return torch.cat([op(x) for op in ops], dim=-1)

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> float32 [T, out_features], not rounded to 16 bits first where the format can."""
        if self.before is not None:
            self.before()
        parts = [op.float32(x) for op in self.ops]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def whole(specs: Sequence[LinearSpec]) -> LinearSpec:
    """The spec of shards that run fused: the first one's name, all their outputs."""
    return replace(specs[0], out_features=sum(spec.out_features for spec in specs))


def take_shards(specs: Sequence[LinearSpec], tensors: dict[str, torch.Tensor]) -> list[LinearShard]:
    """Move each spec's tensors out of `tensors` (full name -> tensor)."""
    shards = []
    for spec in specs:
        prefix = spec.name + "."
        own = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if n.startswith(prefix)}
        shards.append(LinearShard(spec, own))
    return shards
