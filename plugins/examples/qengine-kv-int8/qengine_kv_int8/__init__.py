"""The `int8` KV dtype: one signed byte a value, one scale for each token and head beside it. Nothing is calibrated.

A stored row is the vector's codes, padded to a multiple of four bytes, and a float32 scale, the vector's largest
magnitude / 127:

    codes [head_dim] | 0 to 3 bytes of padding | scale, 4 bytes

A vector that holds a NaN or an infinity gets a scale that is not finite, so the whole of it decodes to no number.
"""

from __future__ import annotations

import torch

from qengine.plugin import Capability, DeviceInfo, KVDtype, KVRowFunctions, SideLayout

LARGEST = 127
"""-128 is not used, so that a vector and its negative have the same magnitudes."""


class Int8KV(KVDtype):
    """K and V alike."""

    name = "int8"
    contract = 1
    sides_alike = True

    @property
    def scale_at(self) -> int:
        """Where the scale begins in a row."""
        return -(-self.spec.head_dim // 4) * 4

    def capability(self, device: DeviceInfo) -> Capability:
        if device.type == "cpu":
            return Capability.emulated("decoded to float32")
        if device.sm < 75:
            return Capability.refused(f"the kernels need compute capability 7.5, this GPU has {device.capability}")
        if device.sm < 80 and self.compute_dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        return Capability.native()

    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, torch.int8, row=self.scale_at + 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        top = x.abs().amax(-1, keepdim=True)
        inverse = torch.where(top > 0, LARGEST / top, 0.0)
        # nan_to_num: what the codes of a vector that is not finite are doesn't matter, but they are always the same.
        codes = (x * inverse).round().nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.int8)
        rows = torch.zeros(*x.shape[:-1], self.scale_at + 4, dtype=torch.int8, device=x.device)
        rows[..., : x.shape[-1]] = codes
        rows[..., self.scale_at :] = (top * (1 / LARGEST)).contiguous().view(torch.int8)
        return rows

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = rows[..., self.scale_at :].contiguous().view(torch.float32)
        return (rows[..., : self.spec.head_dim] * scale).to(dtype)

    def functions(self) -> KVRowFunctions:
        from qengine_kv_int8.device import load_row, store_row

        return KVRowFunctions(store=store_row, load=load_row)
