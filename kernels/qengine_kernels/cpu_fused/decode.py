"""Attention of a decode step in one call: rotation, cache write, and attention over the cached tokens."""

from __future__ import annotations

from typing import Any

import torch

from qengine_kernels.cpu_fused.state import FLOATS, loaded, most_rows
from qengine_kernels.cpu_fused.tables import code_table, look_up, value_table


class FusedDecode:
    """One layer's paged cache (see `cpu_attention.CpuPagedKV`), for steps of a few decodes.

    Formats must be `elementwise`: those of 8 bits are coded by tables, bfloat16 and float32 by a cast. `of` gives None
    for others. `numbers` int64 [3, 8] describes layer, K and V to the kernel (`attention.AT` and so on); what it
    points at is kept here.
    """

    def __init__(self, storage: torch.Tensor, layout: Any, spec: Any, sides: list[tuple[Any, ...]]) -> None:
        self.shape = (spec.num_heads, spec.head_dim)
        self.scale, self.cap = float(spec.scale), float(spec.soft_cap or 0)
        window = spec.sliding_window or 0
        shape = [spec.num_heads, spec.num_kv_heads, spec.head_dim, layout.block_size, window]
        rows = [[*shape, storage.data_ptr(), storage.stride(0), 0]]
        self.kept: list[torch.Tensor] = [storage]
        for side, at, scale, codes, values in sides:
            scales = scale.float().contiguous()
            tensors = [codes, values, scales, 1.0 / scales]
            self.kept += tensors
            addresses = [t.data_ptr() for t in tensors]
            rows.append([at, side.dtype.itemsize, side.token_stride, side.head_stride, *addresses])
        self.numbers = torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(
        cls, storage: torch.Tensor, layout: Any, spec: Any, formats: tuple[Any, Any], scales: tuple[torch.Tensor, ...]
    ) -> FusedDecode | None:
        places = ((layout.k, layout.k_offset), (layout.v, layout.v_offset))
        found = []
        for (side, at), own, scale in zip(places, formats, scales, strict=True):
            tables = tables_of(own, side, spec.head_dim)
            if tables is None:
                return None
            found.append((side, at, scale, *tables))
        return cls(storage, layout, spec, found)

    def takes(self, batch: Any, qk: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the step is few decodes and nothing else, and the kernel is there and knows all dtypes."""
        decodes = batch.num_decodes == batch.num_tokens <= most_rows()
        return decodes and loaded() is not None and qk.dtype in FLOATS and v.dtype in FLOATS and dtype in FLOATS

    def __call__(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: Any,
        group: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """qk [T, num_heads + num_kv_heads, head_dim] before rotation, v [T, num_kv_heads, head_dim], with dense heads;
        cos and sin as `qengine.layers.rotary.RopeAngles` has them on a CPU -> [T, num_heads * head_dim] of `dtype`."""
        kernels = loaded()
        assert kernels is not None
        step = batch.scratch.get(("cpu fused", group))
        if step is None:
            step = batch.scratch["cpu fused", group] = step_addresses(batch, group)
        heads, dim = self.shape
        out = torch.empty((batch.num_tokens, heads * dim), dtype=dtype)
        turning = cos.shape[-1] // 2
        kernels.decode_attention(
            qk.data_ptr(), FLOATS[qk.dtype], qk.stride(0), v.data_ptr(), FLOATS[v.dtype], v.stride(0),
            # the second half of the sines is the one that isn't negated
            cos.data_ptr(), sin.data_ptr() + 4 * turning, cos.stride(0), turning, out.data_ptr(), FLOATS[dtype],
            *step, self.numbers.data_ptr(), self.scale, self.cap,
        )  # fmt: skip
        return out


def step_addresses(batch: Any, group: int) -> tuple[int, int, int, int, int]:
    """Where a step's slots, block tables and lengths lie, the tables' stride, and the number of tokens."""
    own = batch.groups[group]
    slots, tables, lens = own.slot_mapping, own.block_tables, batch.seq_lens
    wanted = ((slots, torch.int64), (tables, torch.int32), (lens, torch.int32))
    assert all(t.dtype is dtype and t.stride(-1) == 1 for t, dtype in wanted)
    return slots.data_ptr(), tables.data_ptr(), tables.stride(0), lens.data_ptr(), batch.num_tokens


Tables = tuple[torch.Tensor, torch.Tensor]
_tables: dict[tuple[type, torch.dtype, int], Tables] = {}
"""By plugin class, stored dtype and head_dim: an elementwise format codes all layers alike."""


def tables_of(own: Any, side: Any, dim: int) -> Tables | None:
    """(codes, values) of a side's format, empty ones where a cast does it; None where the kernel can't store it.
    Raises ValueError for a format that says it is elementwise and isn't."""
    cast = side.dtype in FLOATS
    if not own.elementwise or side.row != dim or not (cast or side.dtype.itemsize == 1):
        return None
    key = type(own), side.dtype, dim
    if key not in _tables:
        tables = NO_TABLES if cast else (code_table(own.encode, dim), _values(own, side.dtype, dim))
        if not _holds(own, side.dtype, tables, dim):
            raise ValueError(f"KV dtype {type(own).__name__} says `elementwise`, but codes values otherwise")
        _tables[key] = tables
    return _tables[key]


NO_TABLES: Tables = (torch.empty(0), torch.empty(0))


def _values(own: Any, dtype: torch.dtype, dim: int) -> torch.Tensor:
    return value_table(lambda codes: own.decode(codes.view(dtype), torch.float32), dim)


def _holds(own: Any, dtype: torch.dtype, tables: Tables, dim: int) -> bool:
    """Whether vectors of all magnitudes are stored and read as the tables, or casts, say."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, dim, generator=generator) * torch.logspace(-8, 8, 256)[:, None]
    stored = own.encode(x)
    if tables is NO_TABLES:
        stored, want = stored.to(dtype), x.to(dtype).float()
    else:
        codes = look_up(tables[0], x)
        want = tables[1][codes.long()]
        if not torch.equal(stored.view(torch.uint8), codes):
            return False
    return torch.equal(own.decode(stored, torch.float32), want)
