"""Attention over a paged cache: the layer, and the seam to whatever stores and reads the cache."""

from __future__ import annotations

from typing import Protocol

import torch

from qengine.layers.batch import Batch
from qengine.layers.module import ModelContext
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


class Attention:
    """One attention layer. The runtime sets `cache` and `group` before the first step.

    `name` is the checkpoint's attention module ("model.layers.0.self_attn"): KV scales are looked up under it.
    """

    def __init__(self, ctx: ModelContext, name: str, spec: AttentionSpec) -> None:
        self.name = name
        self.spec = spec
        self.index = len(ctx.attention)
        self.group = 0
        self.cache: KVLayer | None = None
        ctx.attention.append(self)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] (after RoPE) -> [T, num_heads * head_dim]."""
        cache = self.cache
        assert cache is not None, f"{self.name}: no KV cache bound"
        cache.write(k, v, batch, self.group)
        return cache.attend(q, batch, self.group).flatten(1)
