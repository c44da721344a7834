"""A KV format for tests whose rows are more than their values: bytes, then a float32 step and a float32 least value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qengine.plugin import Capability, DeviceInfo, KVDtype, KVRowFunctions, SideLayout


@triton.jit
def store_row(x, p_rows, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    o_dim = tl.arange(0, x.shape[1])[None, :]
    b_low = tl.min(tl.where(o_dim < HEAD_DIM, x, float("inf")), axis=1)[:, None]
    b_high = tl.max(tl.where(o_dim < HEAD_DIM, x, float("-inf")), axis=1)[:, None]
    b_step = (b_high - b_low) / 255.0
    b_code = (x - b_low) / tl.where(b_step > 0.0, b_step, 1.0) + 0.5
    tl.store(p_rows + o_dim, b_code.to(tl.uint8), mask=row_mask & (o_dim < HEAD_DIM))
    p_pair = (p_rows + HEAD_DIM).to(tl.pointer_type(tl.float32))
    tl.store(p_pair, b_step, mask=row_mask)
    tl.store(p_pair + 1, b_low, mask=row_mask)


@triton.jit
def load_row(p_rows, o_dim, row_mask, HEAD_DIM: tl.constexpr, NATIVE: tl.constexpr):
    p_pair = (p_rows + HEAD_DIM).to(tl.pointer_type(tl.float32))
    b_step = tl.load(p_pair, mask=row_mask, other=0.0)
    b_low = tl.load(p_pair + 1, mask=row_mask, other=0.0)
    mask = row_mask & (o_dim < HEAD_DIM)
    b_code = tl.load(p_rows + o_dim, mask=mask, other=0).to(tl.float32)
    return tl.where(mask, b_code * b_step + b_low, 0.0)


class RowKV(KVDtype):
    """head_dim has to be a multiple of 4."""

    name = "rows"
    contract = 1

    def capability(self, device: DeviceInfo) -> Capability:
        return Capability.native()

    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, torch.uint8, row=self.spec.head_dim + 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        step = (high - low) / 255
        codes = ((x.float() - low) / torch.where(step > 0, step, 1.0) + 0.5).to(torch.uint8)
        return torch.cat([codes, torch.cat([step, low], -1).view(torch.uint8)], -1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pair = rows[..., self.spec.head_dim :].contiguous().view(torch.float32)
        return (rows[..., : self.spec.head_dim] * pair[..., :1] + pair[..., 1:]).to(dtype)

    def functions(self) -> KVRowFunctions:
        return KVRowFunctions(store=store_row, load=load_row)
