"""4-bit codes in the order in which matrix units take them; see `tiled_kernel.py` for what reads it.

A tile has 64 outputs and 64 inputs. An int16 holds four codes of one output: inputs c, 16 + c, 32 + c and 48 + c of the
tile, from the lowest bits up, so that one slot of all int16 of a tile is a [64, 16] slice of the weight that belongs to
16 neighbouring columns of x. The int16 (n, c) are stored so that each of 128 threads finds what it passes to the matrix
units in neighbouring bytes (the fragment of the left operand of mma.m16n8k16 and wgmma, PTX ISA 9.7):

    n = 16 w + 8 r + g      w 0..3, r 0..1, g 0..7
    c = 8 h + 2 t + b       h 0..1, t 0..3, b 0..1
    order, slowest first: w, g, t, h, r, b

Tiles follow each other along K, then along N: any number of neighbouring ones can be taken in one piece. Scale and zero
of a group are one int32, which is wide enough to be copied ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine_kernels.wna16_gemm.layout import PackedWeight, pack_codes, unpack_words

OUTPUTS = 64
"""Outputs in a tile."""
INPUTS = 64
"""Inputs in a tile."""


@dataclass(frozen=True)
class TiledWeight:
    """A 4-bit weight [K, N] on its device; value = (code - zero) * scale, by group of K rows.

    words       int16 [K * N / 4], see above
    meta        int32 [G, N]: the bits of the scale (`scale_dtype`, float16 or bfloat16) and 65536 times the zero
    group_size  K rows that share a row of meta: whole tiles, or whole slices of one
    """

    words: torch.Tensor
    meta: torch.Tensor
    scale_dtype: torch.dtype
    in_features: int
    group_size: int

    @property
    def out_features(self) -> int:
        return self.meta.shape[1]

    @property
    def group(self) -> int:
        """group_size, or 0 where one group has all of K."""
        return 0 if self.group_size >= self.in_features else self.group_size

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"words": self.words, "meta": self.meta}

    def codes(self) -> torch.Tensor:
        """uint8 [K, N]."""
        k, n = self.in_features, self.out_features
        words = self.words.view(n // OUTPUTS, k // INPUTS, 4, 8, 4, 2, 2, 2)  # n k w g t h r b
        words = words.permute(1, 5, 4, 7, 0, 2, 6, 3).reshape(-1, 16, n).to(torch.int32)
        return torch.stack([((words >> 4 * s) & 15).to(torch.uint8) for s in range(4)], dim=1).reshape(k, n)

    def packed(self) -> PackedWeight:
        """The same weight in the layout that serves every shape and format."""
        scales = (self.meta & 0xFFFF).to(torch.uint16).view(self.scale_dtype)
        zeros = (self.meta >> 16).to(torch.uint8)
        return PackedWeight(pack_codes(self.codes()), scales, zeros, self.in_features, self.group_size)


def fills_tiles(in_features: int, out_features: int, group_size: int, bits: int) -> bool:
    """Whether tiles fill a weight of this shape and keep to its groups."""
    groups = group_size >= in_features or group_size % INPUTS == 0 or group_size in (16, 32)
    return bits == 4 and out_features % OUTPUTS == 0 and in_features % INPUTS == 0 and groups


def has_tiles(
    in_features: int,
    out_features: int,
    group_size: int,
    bits: int,
    scale_bytes: int,
    dtype: torch.dtype,
    tensor_cores: bool,
) -> bool:
    """Whether a weight is held in tiles where x has `dtype`: matrix units take 16 bits."""
    fits = fills_tiles(in_features, out_features, group_size, bits)
    return tensor_cores and dtype in (torch.float16, torch.bfloat16) and scale_bytes == 2 and fits


def tiled_bytes(in_features: int, out_features: int, group_size: int) -> int:
    """Bytes of a `TiledWeight`."""
    return in_features * out_features // 2 + 4 * -(-in_features // group_size) * out_features


def to_tiles(weight: PackedWeight) -> TiledWeight:
    """The same weight in tiles; peak: its codes as one byte each. Raises ValueError for a shape that has none."""
    k, n = weight.in_features, weight.out_features
    if not fills_tiles(k, n, weight.group_size, weight.bits):
        raise ValueError(f"a weight [{k}, {n}] of {weight.bits} bits with groups of {weight.group_size} has no tiles")
    codes = unpack_words(weight.words, k).view(-1, 4, 16, n)
    words = torch.zeros(codes.shape[0], 16, n, dtype=torch.int16, device=codes.device)
    for slot in range(4):
        words |= codes[:, slot].to(torch.int16) << (4 * slot)
    words = words.view(k // INPUTS, 2, 4, 2, n // OUTPUTS, 4, 2, 8)  # k h t b n w r g
    words = words.permute(4, 0, 5, 7, 2, 1, 6, 3).reshape(-1)
    bits = weight.scales.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    zeros = weight.symmetric_zero if weight.zeros is None else weight.zeros.to(torch.int32)
    return TiledWeight(words, bits | (zeros << 16), weight.scales.dtype, k, weight.group_size)
