"""A KV dtype under test: toy caches of it, steps over them, and what attention over them means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.conformance.kit import need
from qengine.conformance.places import Place
from qengine.layers.attention import KVLayer
from qengine.layers.batch import Batch, GroupBatch
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import AttentionSpec, KVDtype, KVLayout, KVScales
from qengine_kernels.testing import relative_error


def attention_spec(heads: int, kv_heads: int, head_dim: int, **rules: Any) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, **rules)


SMALL = attention_spec(4, 2, 64)
SPECS = (
    SMALL,
    attention_spec(7, 1, 128),
    attention_spec(2, 2, 80),
    attention_spec(3, 1, 96, sliding_window=20),
    attention_spec(2, 1, 256, soft_cap=30.0),
)
"""Head dims 64 to 256, one to seven query heads a KV head, a window and a soft cap."""
BLOCK_SIZES = (16, 32)


class KVSubject:
    """What the checks of a KV dtype ask about; `targets` as in WeightSubject."""

    kind = "kv"

    def __init__(
        self, plugin: type[KVDtype], places: Sequence[Place], targets: Sequence[int] | None = None
    ) -> None:
        self.plugin, self.places, self.targets = plugin, places, targets

    def runs(
        self, *specs: AttentionSpec, one_dtype: bool = False
    ) -> Iterator[tuple[AttentionSpec, Place, torch.dtype, float]]:
        """Every (spec, place, compute dtype, error limit) that the format claims for both sides; `one_dtype`: the last
        of each place, its 16-bit one."""
        for spec in specs:
            for place in self.places:
                for dtype, limit in place.limits[-1:] if one_dtype else place.limits:
                    sides = (self.plugin(spec, "k", dtype), self.plugin(spec, "v", dtype))
                    if all(side.capability(place.info) for side in sides):
                        yield spec, place, dtype, limit


@dataclass
class Cache:
    """One layer's toy cache. `blocks` deals out block ids in a fixed disorder; block 0 is never dealt."""

    k: KVDtype
    v: KVDtype
    layout: KVLayout
    storage: torch.Tensor
    layer: KVLayer
    scales: KVScales
    place: Place
    dtype: torch.dtype
    blocks: list[int] = field(default_factory=list)

    @property
    def spec(self) -> AttentionSpec:
        return self.k.spec

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def take(self, num_tokens: int) -> list[int]:
        """Blocks for a sequence."""
        return [self.blocks.pop() for _ in range(-(-num_tokens // self.block_size))]

    def rows(self, side: str) -> torch.Tensor:
        """The stored rows of K or V, [num_blocks, block_size, num_kv_heads, row], on the CPU."""
        own = self.layout.k if side == "k" else self.layout.v
        offset = self.layout.k_offset if side == "k" else self.layout.v_offset
        flat = self.storage.cpu().view(own.dtype)[:, offset // own.dtype.itemsize :]
        shape = (len(flat), self.block_size, self.spec.num_kv_heads, own.row)
        return flat.as_strided(shape, (flat.stride(0), own.token_stride, own.head_stride, 1), flat.storage_offset())

    def meaning(self, side: str) -> torch.Tensor:
        """What the plugin says of them, scales applied: float32 [num_blocks, block_size, num_kv_heads, head_dim]."""
        plugin, scale = (self.k, self.scales.k) if side == "k" else (self.v, self.scales.v)
        return plugin.decode(self.rows(side).contiguous(), torch.float32).float() * scale[:, None]

    def write(self, batch: Batch, k: torch.Tensor, v: torch.Tensor) -> None:
        self.layer.write(k.to(self.dtype).to(self.place.device), v.to(self.dtype).to(self.place.device), batch, 0)

    def attend(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        out = self.layer.attend(q.to(self.dtype).to(self.place.device), batch, 0)
        need(out.shape == q.shape and out.dtype is self.dtype, f"attend gives {out.dtype} {tuple(out.shape)}")
        return out.float().cpu()


def make_cache(
    plugin: type[KVDtype],
    spec: AttentionSpec,
    block_size: int,
    place: Place,
    dtype: torch.dtype,
    *,
    num_blocks: int = 24,
    background: int = 255,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    v_plugin: type[KVDtype] | None = None,
) -> Cache:
    """A cache full of `background` bytes (255: NaN in every float format), its null block zero. `scales`: those of K
    and V, float32 [num_kv_heads]."""
    k, v = plugin(spec, "k", dtype), (v_plugin or plugin)(spec, "v", dtype)
    layout = KVLayout.of(block_size, k.layout(block_size), v.layout(block_size))
    storage = torch.full((num_blocks, layout.block_bytes), background, dtype=torch.uint8, device=place.device)
    storage[0] = 0
    ones = torch.ones(spec.num_kv_heads)
    own = KVScales(*(scales or (ones, ones.clone())))
    layer = bind_kv_layer(k, v, layout, storage, own, place.info)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
    return Cache(k, v, layout, storage, layer, own, place, dtype, order.tolist())


def step(cache: Cache, sequences: Sequence[tuple[Sequence[int], int, int]]) -> Batch:
    """A step over (blocks, tokens cached before, tokens new) of each sequence; those with one new token come first."""
    size, device = cache.block_size, cache.place.device
    tables = torch.zeros(len(sequences), max(len(blocks) for blocks, _, _ in sequences), dtype=torch.int32)
    positions, slots = [], []
    for row, (blocks, before, new) in enumerate(sequences):
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        at = torch.arange(before, before + new)
        positions.append(at)
        slots.append(torch.tensor(blocks)[at // size] * size + at % size)
    lens, news = [before + new for _, before, new in sequences], [new for _, _, new in sequences]
    return Batch(
        num_tokens=sum(news),
        num_seqs=len(news),
        num_decodes=next((i for i, n in enumerate(news) if n != 1), len(news)),
        positions=torch.cat(positions).to(device),
        query_start=torch.tensor([0, *news]).cumsum(0).to(torch.int32).to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        host_query_lens=news,
        host_seq_lens=lens,
        groups=[GroupBatch(tables.to(device), torch.cat(slots).to(device))],
        block_size=size,
    )


def vectors(spec: AttentionSpec, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, num_heads, D], k and v [tokens, num_kv_heads, D], float32; K has channels that stand out, as real ones
    have, and V another size than K."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, spec.num_heads, spec.head_dim, generator=generator)
    k, v = torch.randn(2, tokens, spec.num_kv_heads, spec.head_dim, generator=generator)
    k[..., 3] *= 4
    return q, k, v * 0.3 + 0.1


def attention(cache: Cache, q: torch.Tensor, blocks: Sequence[int], before: int) -> torch.Tensor:
    """q [new, num_heads, D] of one sequence with `before` tokens cached earlier -> float32, in plain torch."""
    spec, new = cache.spec, len(q)
    index = torch.tensor(blocks)
    k, v = (cache.meaning(side)[index].flatten(0, 1)[: before + new] for side in ("k", "v"))
    k, v = (t.repeat_interleave(spec.group, dim=1).transpose(0, 1) for t in (k, v))
    scores = (q.to(cache.dtype).float().transpose(0, 1) @ k.transpose(1, 2)) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    at, query = torch.arange(before + new), torch.arange(before, before + new)[:, None]
    hidden = at > query
    if spec.sliding_window is not None:
        hidden |= at <= query - spec.sliding_window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def near(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    error = relative_error(got, want)
    need(error <= limit, f"{name}: off by {error:.2g}, need <= {limit:.2g}")


def where(spec: AttentionSpec, block_size: int, place: Place, dtype: torch.dtype) -> str:
    """For messages."""
    rules = f", window {spec.sliding_window}" if spec.sliding_window else ""
    rules += f", soft cap {spec.soft_cap:g}" if spec.soft_cap else ""
    shape = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}{rules}, blocks of {block_size}"
    return f"{shape} on {place} in {str(dtype).removeprefix('torch.')}"
