"""The values of NF4 codes, and how two codes lie in a byte. W[n, k] = LEVELS[code[n, k]] * scale[n, k // group]."""

from __future__ import annotations

import torch

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to -1..1, with an exact zero (QLoRA, appendix E)."""


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] of 0..15 -> uint8 [N, ceil(K / 2)]: even inputs in the low half; an odd last one leaves the high
    half 0."""
    if codes.shape[1] % 2:
        codes = torch.cat([codes, codes.new_zeros(len(codes), 1)], dim=1)
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """uint8 [N, ceil(K / 2)] -> uint8 [N, K]."""
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :in_features]


def dequantize(packed: torch.Tensor, scales: torch.Tensor, in_features: int, group: int) -> torch.Tensor:
    """packed uint8 [N, ceil(K / 2)], scales [N, groups] -> float32 [N, K]."""
    levels = torch.tensor(LEVELS, device=packed.device)[unpack(packed, in_features).int()]
    return levels * scales.float().repeat_interleave(group, dim=1)[:, :in_features]
