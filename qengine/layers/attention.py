"""Attention over a paged cache: the layer, and the seam to whatever stores and reads the cache."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from qengine.layers.batch import Batch
from qengine.layers.module import ModelContext
from qengine.layers.rotary import RopeAngles, Rotary
from qengine.plugin import AttentionSpec


class KVLayer(Protocol):
    """The cache of one layer, bound to its storage, scales and kernels (see `qengine.layers.kv_layer`)."""

    kernel: str

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Batch, group: int) -> None:
        """Store k, v [num_tokens, num_kv_heads, head_dim] at the group's slots."""
        ...

    def attend(self, q: torch.Tensor, batch: Batch, group: int) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim] -> same shape and dtype; causal over each sequence's cached tokens."""
        ...


@runtime_checkable
class RotatingKVLayer(KVLayer, Protocol):
    """A cache that rotates keys as it stores them, which saves a pass over queries and keys."""

    def rotate_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Batch,
        group: int,
    ) -> None:
        """As `write` for q [num_tokens, num_heads, head_dim] and k that are not rotated yet. Rotates q in place; k may
        stay as it was. cos, sin: float32 [num_tokens, half] on CUDA (`RopeAngles`)."""
        ...


@runtime_checkable
class DeviceLengths(KVLayer, Protocol):
    """A cache on a GPU that says whether prompts can be replayed in a CUDA graph."""

    @property
    def prompts_by_device_lengths(self) -> bool:
        """Whether `attend` and `write` read the lengths of prompts on the device, and take `host_query_lens` as upper
        bounds: sequences may have fewer tokens, or none, and tokens with negative slots belong to none."""
        ...


@runtime_checkable
class FusedKVLayer(KVLayer, Protocol):
    """A cache on a CPU that does all of a small decode step in one call."""

    def decode(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        angles: RopeAngles,
        batch: Batch,
        group: int,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """qk [num_tokens, num_heads + num_kv_heads, head_dim], not rotated yet, and v [num_tokens, num_kv_heads,
        head_dim]: rotates, writes and attends -> [num_tokens, num_heads * head_dim] of `dtype`. None, with nothing
        done, for a step that is not for it."""
        ...


class Attention:
    """One attention layer. The runtime sets `cache` and `group` before the first step.

    `name` is the checkpoint's attention module ("model.layers.0.self_attn"): KV scales are looked up under it.
    """

    def __init__(self, ctx: ModelContext, name: str, spec: AttentionSpec) -> None:
        self.name = name
        self.spec = spec
        self.dtype = ctx.dtype
        self.index = len(ctx.attention)
        self.group = 0
        self._cache: KVLayer | None = None
        self._rotating: RotatingKVLayer | None = None
        self._fused: FusedKVLayer | None = None
        ctx.attention.append(self)

    @property
    def cache(self) -> KVLayer | None:
        return self._cache

    @cache.setter
    def cache(self, cache: KVLayer | None) -> None:
        self._cache = cache
        self._rotating = cache if isinstance(cache, RotatingKVLayer) else None
        self._fused = cache if isinstance(cache, FusedKVLayer) else None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] (after RoPE) -> [T, num_heads * head_dim]."""
        cache = self._cache
        assert cache is not None, f"{self.name}: no KV cache bound"
        cache.write(k, v, batch, self.group)
        return cache.attend(q, batch, self.group).flatten(1)

    def rotated(
        self, qk: torch.Tensor, v: torch.Tensor, rotary: Rotary, angles: RopeAngles, batch: Batch
    ) -> torch.Tensor:
        """qk [T, num_heads + num_kv_heads, head_dim] before RoPE, which may be overwritten, and v [T, num_kv_heads,
        head_dim] -> as `__call__`."""
        heads, cache = self.spec.num_heads, self._rotating
        if not qk.is_cuda:
            if self._fused is not None:
                out = self._fused.decode(qk, v, angles, batch, self.group, self.dtype)
                if out is not None:
                    return out
            return self(*rotary(qk, heads, angles), v.float(), batch)
        if cache is None:
            return self(*rotary(qk, heads, angles), v, batch)
        q, k = qk[:, :heads], qk[:, heads:]
        cache.rotate_and_write(q, k, v, angles.cos, angles.sin, batch, self.group)
        return cache.attend(q, batch, self.group).flatten(1)
