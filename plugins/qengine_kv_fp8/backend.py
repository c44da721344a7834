"""The `fp8_e4m3` (`fp8`) and `fp8_e5m2` KV dtypes."""

from __future__ import annotations

from typing import ClassVar

import torch

from qengine.plugin import Capability, DeviceInfo, KVDtype, KVFunctions, SideLayout
from qengine_kernels.fp8 import decode, encode


class Fp8KV(KVDtype):
    """One byte a value; scales per tensor or per KV head, or none."""

    contract = 1
    scale_granularity = ("none", "tensor", "head")
    sides_alike = True
    elementwise = True
    fp8: ClassVar[torch.dtype]

    def layout(self, block_size: int) -> SideLayout:
        return SideLayout.dense(self.spec, block_size, torch.uint8)

    def capability(self, device: DeviceInfo) -> Capability:
        if device.type == "cpu":
            return Capability.emulated("decoded by a table lookup, computed in float32")
        if device.sm < 75:
            return Capability.refused(
                f"attention kernels need compute capability 7.5, this GPU has {device.capability}"
            )
        if device.sm < 80 and self.compute_dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        if device.sm < 89:
            return Capability.emulated("converted by integer arithmetic (hardware conversion from sm_89 on)")
        return Capability.native()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return encode(x, self.fp8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return decode(rows, self.fp8, dtype)


class Fp8E4M3KV(Fp8KV):
    """3 fraction bits, largest 448."""

    name = "fp8_e4m3"
    max_value = 448.0
    fp8 = torch.float8_e4m3fn

    def functions(self) -> KVFunctions:
        from qengine_kernels.fp8.device import e4m3_decode, e4m3_encode, e4m3_pairs

        return KVFunctions(encode=e4m3_encode, decode=e4m3_decode, pairs=e4m3_pairs)

    @classmethod
    def uncalibrated_note(cls) -> str:
        return (
            "fp8_e4m3 KV cache without scales: 1.0 is used, so values beyond 448 are clipped and small ones lose "
            "precision (scales come with checkpoints that were calibrated for an fp8 KV cache)"
        )


class Fp8E5M2KV(Fp8KV):
    """2 fraction bits, largest 57344."""

    name = "fp8_e5m2"
    max_value = 57344.0
    fp8 = torch.float8_e5m2

    def functions(self) -> KVFunctions:
        from qengine_kernels.fp8.device import e5m2_decode, e5m2_encode, e5m2_pairs

        return KVFunctions(encode=e5m2_encode, decode=e5m2_decode, pairs=e5m2_pairs)

    @classmethod
    def uncalibrated_note(cls) -> str:
        return (
            "fp8_e5m2 KV cache without scales: 1.0 is used; its range rarely clips, but 2 fraction bits are coarse "
            "(fp8_e4m3 with scales is more exact)"
        )
