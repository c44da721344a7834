"""The `int4` KV dtype: four bits a value, a scale and a zero beside them. Nothing is calibrated.

A value is code * scale + zero, where the zero is the least value of its group and the scale a fifteenth of the spread,
both float16. K and V are set apart: keys have a few channels that are large in every token, so a group is KEY_GROUP of
their channels; values have none, and a group is the whole vector. A stored row:

    codes, 4 bytes for 8 values | scale and zero of each group, 2 + 2 bytes

Of eight values, byte i holds number i in its low half and number 4 + i in its high half: a GPU thread that loads four
bytes then has eight values without moving any between threads.

A vector that holds a NaN or an infinity (or a spread beyond float16) decodes to no number.
"""

from __future__ import annotations

import torch

from qengine.plugin import Capability, DeviceInfo, KVDtype, KVRowFunctions, SideLayout

KEY_GROUP = 32
"""Perplexity on SmolLM2-135M (heads of 64), 4,096 tokens, 14.31 with a 16-bit cache: 16.18 with one group of 64,
15.21 with 32, 14.74 with 16; 32 and 16 add 6 and 17 % to the bytes of 64."""
LEVELS = 15


class Int4KV(KVDtype):
    """4.5 to 5 bits a value in all."""

    name = "int4"
    contract = 1

    @property
    def group(self) -> int:
        """Values that share a scale and a zero."""
        return KEY_GROUP if self.side == "k" else self.spec.head_dim

    @property
    def groups(self) -> int:
        return -(-self.spec.head_dim // self.group)

    @property
    def code_bytes(self) -> int:
        return -(-self.spec.head_dim // 8) * 4

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
        return SideLayout.dense(self.spec, block_size, torch.uint8, row=self.code_bytes + 4 * self.groups)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        lead, dim = x.shape[:-1], self.spec.head_dim
        # The last group may be short: its own last value fills it up, which changes neither extreme.
        filling = x[..., -1:].expand(*lead, self.groups * self.group - dim)
        values = torch.cat([x, filling], -1).float().view(*lead, self.groups, self.group)
        low, high = values.aminmax(dim=-1, keepdim=True)
        zero = low.half()
        scale = ((high - zero.float()) * (1 / LEVELS)).half()
        inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
        codes = ((values - zero.float()) * inverse).round().nan_to_num(0.0).clamp(0, LEVELS).to(torch.uint8)
        codes = torch.nn.functional.pad(codes.flatten(-2)[..., :dim], (0, 2 * self.code_bytes - dim))
        halves = codes.view(*lead, -1, 2, 4)
        packed = (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)
        return torch.cat([packed, torch.cat([scale, zero], -1).view(torch.uint8).flatten(-2)], -1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        lead, dim = rows.shape[:-1], self.spec.head_dim
        packed = rows[..., : self.code_bytes].unflatten(-1, (-1, 1, 4))
        codes = torch.cat([packed & 15, packed >> 4], -2).flatten(-3)[..., :dim]
        codes = torch.nn.functional.pad(codes, (0, self.groups * self.group - dim))
        pairs = rows[..., self.code_bytes :].contiguous().view(torch.float16).view(*lead, self.groups, 2).float()
        values = codes.view(*lead, self.groups, self.group) * pairs[..., :1] + pairs[..., 1:]
        return values.flatten(-2)[..., :dim].to(dtype)

    def functions(self) -> KVRowFunctions:
        from qengine_kv_int4.device import load_keys, load_values, store_keys, store_values

        if self.side == "k":
            return KVRowFunctions(store=store_keys, load=load_keys)
        return KVRowFunctions(store=store_values, load=load_values)
