"""KV dtypes that are wrong in one way each, for tests of the conformance kit. `Rows` is the right one: a byte a value
with a float32 scale a vector behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from qengine.plugin import (
    Capability,
    DeviceInfo,
    KVDtype,
    KVFunctions,
    KVLayout,
    KVRowFunctions,
    KVScales,
    SideLayout,
)
from qengine_kernels.cpu_attention import CpuPagedKV
from qengine_kv_fp8.backend import Fp8E4M3KV

ROUND = tl.constexpr(12582912.0)


@triton.jit
def _store(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    o_dim = tl.arange(0, x.shape[1])[None, :]
    b_top = tl.max(tl.abs(x), axis=1)[:, None]
    b_code = (x * tl.where(b_top > 0.0, STEPS / b_top, 0.0) + ROUND) - ROUND
    tl.store(p_rows + o_dim, b_code.to(tl.int8), mask=row_mask & (o_dim < WIDTH))
    tl.store((p_rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), b_top / STEPS, mask=row_mask)


@triton.jit
def store_row(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    _store(x, p_rows, row_mask, HEAD_DIM, HEAD_DIM, 127.0)


@triton.jit
def store_less(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """The last value is left as it was."""
    _store(x, p_rows, row_mask, HEAD_DIM, HEAD_DIM - 1, 127.0)


@triton.jit
def store_beyond(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """Also what a power of two has too much, over the scale and the next row."""
    o_dim = tl.arange(0, x.shape[1])[None, :]
    tl.store(p_rows + 4 + o_dim, (x * 0.0).to(tl.int8), mask=row_mask & (o_dim >= HEAD_DIM))
    _store(x, p_rows, row_mask, HEAD_DIM, HEAD_DIM, 127.0)


@triton.jit
def load_row(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    b_scale = tl.load((p_rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=row_mask, other=0.0)
    b_code = tl.load(p_rows + o_dim, mask=row_mask & (o_dim < HEAD_DIM), other=0)
    return b_code.to(tl.float32) * b_scale


@triton.jit
def load_one_more(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    """A zero point that is off by one."""
    b_scale = tl.load((p_rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), mask=row_mask, other=0.0)
    b_code = tl.load(p_rows + o_dim, mask=row_mask & (o_dim < HEAD_DIM), other=0)
    return (b_code.to(tl.float32) + 4.0) * b_scale


class Rows(KVDtype):
    name = "rows"
    contract = 1
    store, load = store_row, load_row

    def capability(self, device: DeviceInfo) -> Capability:
        if device.type == "cuda" and device.sm < 80 and self.compute_dtype is torch.bfloat16:
            return Capability.refused("no bfloat16")
        return Capability.native()

    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, torch.int8, row=self.spec.head_dim + 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        top = self.largest(x.float())
        codes = (x * torch.where(top > 0, 127 / top, 0.0)).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
        return torch.cat([codes, (top / 127).contiguous().view(torch.int8)], dim=-1)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 1]."""
        return x.abs().amax(-1, keepdim=True)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        d = self.spec.head_dim
        return (rows[..., :d] * rows[..., d:].contiguous().view(torch.float32)).to(dtype)

    def functions(self) -> KVFunctions | KVRowFunctions:
        return KVRowFunctions(store=type(self).store, load=type(self).load)


class LeavesAByte(Rows):
    store = store_less


class WritesBeyond(Rows):
    store = store_beyond


class ZeroOffByOne(Rows):
    load = load_one_more


class LiesAboutBytes(Rows):
    """The scales are forgotten."""

    def layout(self, block_size: int) -> SideLayout:
        good = super().layout(block_size)
        return dataclasses.replace(good, nbytes=block_size * self.spec.num_kv_heads * self.spec.head_dim)


class RowsOverlap(Rows):
    def layout(self, block_size: int) -> SideLayout:
        return dataclasses.replace(super().layout(block_size), head_stride=self.spec.head_dim)


class InvertedScale(Rows):
    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        d = self.spec.head_dim
        return (rows[..., :d] / rows[..., d:].contiguous().view(torch.float32)).to(dtype)


class NaNSpreads(Rows):
    """One scale for all heads of a token: a NaN in one head reaches the others."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax((-1, -2), keepdim=True).expand(*x.shape[:-1], 1)


class PrefixDependent(Rows):
    """A scale that grows with what has come by, so that the same token is stored in another way later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen = torch.zeros(())

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.maximum(self.seen, x.abs().max())
        return self.seen.expand(*x.shape[:-1], 1)


class DependsOnNeighbours(Rows):
    """One scale for all tokens of a step."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().expand(*x.shape[:-1], 1)


class NotDeterministic(Rows):
    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return super().largest(x) * (1 + 0.1 * torch.rand(()))


class SilentRefusal(Rows):
    def capability(self, device: DeviceInfo) -> Capability:
        return super().capability(device) if device.type == "cpu" else Capability.refused("")


class TakesNoVersion(Rows):
    contract = "2.0"


class ScalesWithoutLargest(Fp8E4M3KV):
    max_value = None


class TooLargeMaximum(Fp8E4M3KV):
    """States more than the format holds: scales by it clip."""

    max_value = 4480.0


class Bound(Fp8E4M3KV):
    """Brings its own layer; subclasses break it."""

    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        return CpuPagedKV(storage, layout, self.spec, scales.k, scales.v, self, v, True)


class SwapsSides(Bound):
    """Reads V where K lies."""

    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        layer = super().bind(v, layout, storage, scales, info)
        turned = dataclasses.replace(layout, k_offset=layout.v_offset, v_offset=layout.k_offset)
        reader = CpuPagedKV(storage, turned, self.spec, scales.k, scales.v, self, v, True)
        layer.attend = reader.attend
        return layer


class IgnoresScales(Bound):
    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        ones = torch.ones_like(scales.k)
        return super().bind(v, layout, storage, KVScales(ones, ones), info)


class KeepsTokensElsewhere(Bound):
    """Reads from a copy that it makes on each write."""

    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        layer, copy = super().bind(v, layout, storage, scales, info), storage.clone()
        reader = CpuPagedKV(copy, layout, self.spec, scales.k, scales.v, self, v, True)
        plain = layer.write

        def write(*args: Any) -> None:
            plain(*args)
            reader.write(*args)

        layer.write, layer.attend = write, reader.attend
        return layer


class ForgetsTheWindow(Bound):
    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        spec = dataclasses.replace(self.spec, sliding_window=None)
        return CpuPagedKV(storage, layout, spec, scales.k, scales.v, self, v, True)


class LosesTheBlockEdge(Bound):
    """Leaves the token out that fills a block."""

    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        layer = super().bind(v, layout, storage, scales, info)
        plain = layer.write

        def write(k: torch.Tensor, values: torch.Tensor, batch: Any, group: int) -> None:
            full = batch.positions == layout.block_size - 1
            plain(torch.where(full[:, None, None], 0.0, k), values, batch, group)

        layer.write = write
        return layer


class ClaimsWhatDoesNotCompile(Fp8E4M3KV):
    """Hardware casts on every chip."""

    class Layer:
        kernel = "a cast"

        def write(self, k: torch.Tensor, v: torch.Tensor, batch: Any, group: int) -> None:
            cast_through_fp8[(1,)](k, v, SIZE=16)

        def attend(self, q: torch.Tensor, batch: Any, group: int) -> torch.Tensor:
            return torch.zeros_like(q)

    def bind(self, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo) -> Any:
        return self.Layer()


@triton.jit
def cast_through_fp8(p_x, p_y, SIZE: tl.constexpr):
    """A cast that sm_75 does not have."""
    o_x = tl.arange(0, SIZE)
    tl.store(p_y + o_x, tl.load(p_x + o_x).to(tl.float8e4nv).to(tl.float16))
