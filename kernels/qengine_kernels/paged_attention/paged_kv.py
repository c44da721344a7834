"""One layer's paged cache on a GPU: what attention layers call."""

from __future__ import annotations

from typing import Any, Literal

import torch

from qengine_kernels.kv_side import CacheSide
from qengine_kernels.kv_write import rotate_write_kv, write_kv
from qengine_kernels.launch import Chip, ceil_div, power_of_2
from qengine_kernels.overlap import overlap
from qengine_kernels.paged_attention.config import MAX_SPLITS, AttentionTile, attention_tile, decode_splits
from qengine_kernels.paged_attention.gathered import dense_attention
from qengine_kernels.paged_attention.kernel import combine_kernel, gather_kernel, paged_attention_kernel

PrefillRoute = Literal["template", "gather"]
COMBINE_SPLITS = (8, MAX_SPLITS)
"""Splits that the joining kernel takes: few variants, all of which a start compiles."""


class TritonPagedKV:
    """K and V of one layer in a paged cache, written and read by Triton kernels with injected device functions.

    storage        uint8 [num_blocks, at least layout.block_bytes]; block 0 is the null block and holds zeros
    layout, spec   objects with the fields of `qengine.plugin.KVLayout` and `AttentionSpec`
    k_scale, ...   float32 [num_kv_heads], multiply-to-dequantise
    *_functions    Triton device functions of each side (`qengine.plugin.KVFunctions` or `KVRowFunctions`)
    native         whether those may use hardware conversions
    compute_dtype  dtype of q, k and v: float16, bfloat16 (sm_80 up) or float32
    chip, prefill  for tests: another chip's tiles; "template" or "gather" instead of the chip's own choice
    """

    def __init__(
        self,
        storage: torch.Tensor,
        layout: Any,
        spec: Any,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        k_functions: Any,
        v_functions: Any,
        native: bool,
        compute_dtype: torch.dtype,
        *,
        chip: Chip | None = None,
        prefill: PrefillRoute | None = None,
        splits: int | None = None,
    ) -> None:
        self.k = CacheSide.of(storage, layout, "k", k_scale, k_functions)
        self.v = CacheSide.of(storage, layout, "v", v_scale, v_functions)
        for side in (self.k, self.v):
            side.check(spec.head_dim)
        self.layout, self.spec = layout, spec
        self.native, self.compute_dtype = native, compute_dtype
        self.chip = Chip.of(storage.device) if chip is None else chip
        self.splits = splits
        self.prefill: PrefillRoute = prefill or ("template" if self.chip.tensor_cores else "gather")
        self.read_k, self.read_v, self.pairs = self._readers(spec.head_dim)
        # what `pairs` functions know as plain, packed and hardware
        self.mode = native if not self.pairs else 0 if storage.device.type == "cpu" else 2 if native else 1
        sizes = (layout.k.dtype.itemsize, layout.v.dtype.itemsize), compute_dtype.itemsize
        self.decode_tile = attention_tile(self.chip, spec.group, spec.head_dim, *sizes, decode=True)
        if self.prefill == "template":
            self.prefill_tile = attention_tile(self.chip, spec.group, spec.head_dim, *sizes, decode=False)
        plain = layout.k.dtype == layout.v.dtype == compute_dtype
        conversion = "" if plain else (" native casts," if native else " integer casts,")
        how = "Triton" if self.prefill == "template" else "gather + torch SDPA (no tensor cores in Triton on this chip)"
        self.kernel = f"Triton paged decode (split KV),{conversion} prefill by {how}"

    @property
    def prompts_by_device_lengths(self) -> bool:
        """Whether a captured prompt may be replayed with other lengths: the kernels read them, the gather does not."""
        return self.prefill == "template"

    def _readers(self, head_dim: int) -> tuple[CacheSide, CacheSide, bool]:
        """The sides as the attention kernel reads them, and whether that is by pairs: products in float16, which is a
        gain where computing is in 16 bits on tensor cores."""
        k, v = self.k.paired(), self.v.paired()
        wanted = self.chip.tensor_cores and self.compute_dtype != torch.float32 and head_dim % 2 == 0
        if k is None or v is None or not wanted:
            return self.k, self.v, False
        return k, v, True

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Any, group: int) -> None:
        """Store k, v [num_tokens, num_kv_heads, head_dim] at the group's slots."""
        write_kv(k, v, self.k, self.v, batch.groups[group].slot_mapping, self.layout.block_size, self.native)

    def rotate_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Any,
        group: int,
    ) -> None:
        """As `write` for k that is not rotated yet; q is rotated in place. cos and sin: float32 [num_tokens, half]."""
        slots = batch.groups[group].slot_mapping
        rotate_write_kv(q, k, v, cos, sin, self.k, self.v, slots, self.layout.block_size, self.native)

    def attend(self, q: torch.Tensor, batch: Any, group: int) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim] -> same shape and dtype; causal over each sequence's cached tokens.

        `batch` has the fields of `qengine.layers.batch.Batch`: its first `num_decodes` sequences have one token each.
        """
        if q.stride(-1) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        table = batch.groups[group].block_tables
        decodes, sequences = batch.num_decodes, batch.num_seqs
        if decodes:
            self._decode(q, out, batch, table, decodes)
        if sequences > decodes and self.prefill == "template":
            longest = max(batch.host_query_lens[decodes:])
            tiles = ceil_div(longest, self.prefill_tile.block_m // self.prefill_tile.heads)
            self._launch(q, out, batch, table, self.prefill_tile, decodes, sequences - decodes, tiles, splits=1)
        elif sequences > decodes:
            for i in range(decodes, sequences):
                self._gathered(q, out, batch, table, i)
        return out

    def _decode(self, q: torch.Tensor, out: torch.Tensor, batch: Any, table: torch.Tensor, decodes: int) -> None:
        spec, tile = self.spec, self.decode_tile
        capacity = table.shape[1] * self.layout.block_size
        if spec.sliding_window is not None:
            capacity = min(capacity, spec.sliding_window)
        splits = self.splits or decode_splits(self.chip, decodes, spec.num_kv_heads, capacity, tile.block_n)
        if splits == 1:
            self._launch(q, out, batch, table, tile, 0, decodes, 1, splits)
            return
        rows = decodes * spec.num_heads
        partial = torch.empty((rows * splits, spec.head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((2, rows * splits), dtype=torch.float32, device=q.device)
        self._launch(q, out, batch, table, tile, 0, decodes, 1, splits, (partial, stats[0], stats[1]))
        combine_kernel[(rows,)](
            partial,
            stats[0],
            stats[1],
            out,
            self.v.scale,
            splits,
            GROUP=spec.group,
            HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            BLOCK_D=tile.block_d,
            BLOCK_SPLITS=next(block for block in COMBINE_SPLITS if splits <= block),
            num_warps=4,
            **overlap(q.device),
        )

    def _launch(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        batch: Any,
        table: torch.Tensor,
        tile: AttentionTile,
        first: int,
        sequences: int,
        tiles: int,
        splits: int,
        partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        spec, layout = self.spec, self.layout
        parts = partial or (self.k.scale, self.k.scale, self.k.scale)
        head_tiles = spec.num_kv_heads * ceil_div(spec.group, tile.heads)
        paged_attention_kernel[(tiles * splits, head_tiles, sequences)](
            q,
            self.read_k.cache,
            self.read_v.cache,
            out,
            *parts,
            table,
            batch.query_start,
            batch.seq_lens,
            self.k.scale,
            self.v.scale,
            spec.scale,
            spec.soft_cap or 1.0,
            first,
            splits,
            table.stride(0),
            q.stride(0),
            q.stride(1),
            *self.read_k.strides,
            *self.read_v.strides,
            HEADS=spec.num_heads,
            GROUP=spec.group,
            TILE_HEADS=tile.heads,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=layout.block_size,
            WINDOW=spec.sliding_window or 0,
            SOFT_CAP=spec.soft_cap is not None,
            SPLIT=partial is not None,
            K_READ=self.read_k.read,
            K_ROWS=self.read_k.rows,
            K_ALIGN=self.read_k.alignment,
            V_READ=self.read_v.read,
            V_ROWS=self.read_v.rows,
            V_ALIGN=self.read_v.alignment,
            NATIVE=self.mode,
            PAIRS=self.pairs,
            CAUSAL=tile is not self.decode_tile,
            WHOLE=tile is not self.decode_tile and spec.sliding_window is None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=tile.block_d,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap(q.device),
        )

    def _gathered(self, q: torch.Tensor, out: torch.Tensor, batch: Any, table: torch.Tensor, i: int) -> None:
        """One sequence's prefill by gathering its cache into dense tensors."""
        spec, layout = self.spec, self.layout
        n, high = batch.host_query_lens[i], batch.host_seq_lens[i]
        start = sum(batch.host_query_lens[:i])
        window = spec.sliding_window
        low = 0 if window is None else max(0, high - n - window + 1)
        dense = torch.empty(
            (2, spec.num_kv_heads, high - low, spec.head_dim), dtype=self.compute_dtype, device=q.device
        )
        block_n = 32
        gather_kernel[(ceil_div(high - low, block_n), spec.num_kv_heads)](
            self.k.cache,
            self.v.cache,
            dense[0],
            dense[1],
            table[i],
            self.k.scale,
            self.v.scale,
            low,
            high,
            *self.k.strides,
            *self.v.strides,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=layout.block_size,
            K_READ=self.k.read,
            K_ROWS=self.k.rows,
            K_ALIGN=self.k.alignment,
            V_READ=self.v.read,
            V_ROWS=self.v.rows,
            V_ALIGN=self.v.alignment,
            NATIVE=self.native,
            BLOCK_N=block_n,
            BLOCK_D=power_of_2(spec.head_dim),
            num_warps=4,
        )
        out[start : start + n] = dense_attention(
            q[start : start + n], dense[0], dense[1], spec.scale, high - n, low, window, spec.soft_cap
        )
