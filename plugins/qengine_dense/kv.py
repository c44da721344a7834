"""The `auto` KV dtype: K and V are stored in the compute dtype, unscaled."""

from __future__ import annotations

import torch

from qengine.plugin import Capability, DeviceInfo, KVDtype, KVFunctions, SideLayout


class AutoKV(KVDtype):
    """float16, bfloat16 or float32, whatever attention computes in."""

    name = "auto"
    contract = 1
    sides_alike = True
    elementwise = True

    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, self.compute_dtype)

    def capability(self, device: DeviceInfo) -> Capability:
        if device.type == "cuda" and device.sm < 75:
            return Capability.refused(
                f"attention kernels need compute capability 7.5, this GPU has {device.capability}"
            )
        if device.type == "cuda" and device.sm < 80 and self.compute_dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        return Capability.native()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Unchanged: the store casts to the cache's dtype."""
        return x

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.to(dtype)

    def functions(self) -> KVFunctions:
        from qengine_dense.kernels import identity_decode, identity_encode

        return KVFunctions(encode=identity_encode, decode=identity_decode)
