"""One layer's paged KV cache on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from qengine_kernels import cpu_fused
from qengine_kernels.cpu_attention.plan import DecodePart, Plan, PrefillPart, make_plan, write_rows
from qengine_kernels.cpu_attention.rows import RowMap


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, as many as before behind it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CpuPagedKV:
    """K and V of one layer, stored as `layout` says; everything is computed in float32.

    storage           uint8 [num_blocks, at least layout.block_bytes]; block 0 is the null block and stays zero
    k_scale, v_scale  float32 [num_kv_heads], multiply-to-dequantise; folded into the query and the result
    k_format, ...     objects with `encode`, `decode` and `elementwise` (`qengine.plugin.KVDtype`): [..., head_dim]
                      float -> [..., row] stored, and back as the given float dtype
    together          whether K and V are stored alike, so that either format may code both in one call

    A decode step of one sequence is bound by how many operations and calls it takes, not by what they do: each costs
    some microseconds, because a layer's weights have driven code and data out of the cache. Its way is kept straight.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        layout: Any,
        spec: Any,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        k_format: Any,
        v_format: Any,
        together: bool,
    ) -> None:
        self.spec, self.layout = spec, layout
        k_offset, v_offset = layout.k_offset, layout.v_offset
        self.formats = [k_format] if together else [k_format, v_format]
        self.sides = [layout.k] if together else [layout.k, layout.v]
        places = [(k_offset, v_offset)] if together else [(k_offset,), (v_offset,)]
        heads, size = spec.num_kv_heads, storage.shape[1]
        self.maps = tuple(RowMap.of(s, o, heads, size) for s, o in zip(self.sides, places, strict=True))
        self.rows = [m.view(storage, s.dtype) for m, s in zip(self.maps, self.sides, strict=True)]
        self.key = repr((self.maps, spec.num_heads, spec.sliding_window, spec.soft_cap))
        scales = torch.stack([k_scale, v_scale]).float()
        self.inverse = None if bool((scales == 1).all()) else (1.0 / scales)[:, None, :, None]
        group = spec.num_heads // spec.num_kv_heads
        self.scale = spec.scale
        self.q_factor: torch.Tensor | None = None
        if bool((scales[0] == scales[0, 0]).all()):
            self.scale *= float(scales[0, 0])
        else:
            self.q_factor = scales[0].repeat_interleave(group)[:, None]
        self.v_factor: torch.Tensor | None = None
        if not bool((scales[1] == 1).all()):
            self.v_factor = scales[1].repeat_interleave(group)[:, None]
        self.fused = cpu_fused.FusedDecode.of(storage, layout, spec, (k_format, v_format), (k_scale, v_scale))
        self.kernel = "gather and float32 SDPA" if spec.soft_cap is None else "gather and float32 softmax (soft cap)"

    def decode(
        self, qk: torch.Tensor, v: torch.Tensor, angles: Any, batch: Any, group: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """All of a small decode step's attention, see `qengine.layers.attention.FusedKVLayer`."""
        fused = self.fused
        if fused is None or not fused.takes(batch, qk, v, dtype):
            return None
        return fused(qk, v, angles.cos, angles.sin, batch, group, dtype)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Any, group: int) -> None:
        """Store k, v [num_tokens, num_kv_heads, head_dim] at the group's slots."""
        key = ("cpu write", group, self.key)
        rows = batch.scratch.get(key)
        if rows is None:
            rows = batch.scratch[key] = write_rows(batch, group, self.maps)
        x = torch.stack([k, v])
        if self.inverse is not None:
            x = x * self.inverse
        for i, part in enumerate((x,) if len(rows) == 1 else x.unbind(0)):
            stored = self.formats[i].encode(part)
            if stored.dtype is not self.sides[i].dtype:
                stored = stored.to(self.sides[i].dtype)
            self.rows[i].index_copy_(0, rows[i], stored.view(-1, self.maps[i].width))

    def attend(self, q: torch.Tensor, batch: Any, group: int) -> torch.Tensor:
        """q [num_tokens, num_heads, head_dim] -> same shape and dtype; causal over each sequence's cached tokens."""
        key = ("cpu attend", group, self.key)
        plan: Plan | None = batch.scratch.get(key)
        if plan is None:
            threads = torch.get_num_threads()
            plan = batch.scratch[key] = make_plan(batch, group, self.spec, self.maps, threads)
        x = q.float()
        if self.q_factor is not None:
            x = x * self.q_factor
        if plan.alone is not None:
            out = self._decode(x, plan.alone)
        elif not plan.prefills:
            out = self._decodes(x, plan)
        else:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            if plan.decodes:
                out[: plan.num_decodes] = self._decodes(x[: plan.num_decodes], plan)
            for part in plan.prefills:
                out[part.first : part.last] = self._prefill(x[part.first : part.last], part)
        if self.v_factor is not None:
            out.mul_(self.v_factor)
        return out if out.dtype is q.dtype else out.to(q.dtype)

    def _gather(self, rows: tuple[torch.Tensor, ...], *shape: int) -> Sequence[torch.Tensor]:
        """K and V of the given rows, decoded but not scaled: float32 [*shape, num_kv_heads, head_dim] each."""
        heads = self.spec.num_kv_heads
        if len(rows) == 1:
            both = self.rows[0].index_select(0, rows[0]).view(2, *shape, heads, self.sides[0].row)
            return self.formats[0].decode(both, torch.float32).unbind(0)  # type: ignore[no-any-return]
        return [
            format_.decode(table.index_select(0, index).view(*shape, heads, side.row), torch.float32)
            for format_, table, index, side in zip(self.formats, self.rows, rows, self.sides, strict=True)
        ]

    def _decodes(self, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """q [num_decodes, heads, D] -> the same shape."""
        if plan.one_thread and torch.get_num_threads() > 1:
            with one_thread():
                return self._decodes(q, plan)
        if plan.order is not None:
            q = q.index_select(0, plan.order)
        outs = [self._decode(q[p.first : p.last], p) for p in plan.decodes]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if plan.back is None else out.index_select(0, plan.back)

    def _decode(self, q: torch.Tensor, part: DecodePart) -> torch.Tensor:
        """q [batch, heads, D]: the query heads of one KV head are the rows of one product."""
        k, v = self._gather(part.rows, part.last - part.first, part.length)
        batch, _, dim = q.shape
        grouped = q.reshape(batch, self.spec.num_kv_heads, -1, dim)
        return self._attention(grouped, k.transpose(1, 2), v.transpose(1, 2), part.mask, False).reshape(q.shape)

    def _prefill(self, q: torch.Tensor, part: PrefillPart) -> torch.Tensor:
        """q [n, heads, D] -> the same shape."""
        n, heads, dim = q.shape
        kv_heads = self.spec.num_kv_heads
        k, v = self._gather(part.rows, part.length)
        grouped = q.reshape(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, heads // kv_heads, part.length, dim)
        keys, values = (t.transpose(0, 1)[:, None].expand(shape) for t in (k, v))
        out = self._attention(grouped, keys, values, part.mask, part.mask is None)
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """q [a, b, n, D], k and v [a, b, L, D] -> [a, b, n, D]. `causal` means n == L."""
        cap = self.spec.soft_cap
        if cap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)
        scores = torch.tanh((q @ k.transpose(-1, -2)) * (self.scale / cap)) * cap
        if causal:
            n = q.shape[-2]
            scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), float("-inf"))
        elif mask is not None:
            scores += mask
        return scores.softmax(-1) @ v
