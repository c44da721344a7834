"""From a checkpoint's e4m3 tensors, or from a 16-bit weight, to one `ByteWeight` on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine_kernels.fp8.codes import encode
from qengine_kernels.w8a16_gemm.layout import ByteWeight, block_scales, byte_weight_bytes, row_scales

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite e4m3 value."""
LEAST_SCALE = 2.0**-40
"""Scale of a row of zeros: positive, and too small for any weight that matters."""
CHUNK_BYTES = 64 << 20
"""Most bytes of a wide copy that conversions hold at a time."""
NATIVE_SM = 89


@dataclass
class Fp8Shard:
    """One module's e4m3 weight: codes [N, K] (float8_e4m3fn or uint8) and its multiplier `scale`: one number, one for
    each output ([N] or [N, 1]), or a grid by block. `input_scale`: one number; None where activations are dynamic."""

    codes: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None


def native_reason(sm: int, dtype: torch.dtype) -> str | None:
    """None where activations can be rounded to e4m3 and multiplied natively, else why not. `sm` 0 is a CPU."""
    if sm == 0:
        return "a CPU has no FP8 GEMM"
    if sm < NATIVE_SM:
        return f"FP8 matrix units come with sm_{NATIVE_SM}, this GPU is sm_{sm}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations in {str(dtype).removeprefix('torch.')} are not rounded to FP8"
    return None


def fp8_bytes(
    out_features: int, in_features: int, block: tuple[int, int] | None, bias: bool, dtype: torch.dtype
) -> int:
    """Bytes that a bound linear keeps, static input scales (a few bytes) aside."""
    return byte_weight_bytes(out_features, in_features, block) + (out_features * dtype.itemsize if bias else 0)


def stack_shards(shards: Sequence[Fp8Shard], block: tuple[int, int] | None, device: torch.device) -> ByteWeight:
    """One weight of all shards on `device`, each with its own scales. `block`: (outputs, inputs) of the scale grids."""
    codes = stack_codes([shard.codes for shard in shards], device)
    k = codes.shape[1]
    parts = [(len(shard.codes), shard.scale) for shard in shards]
    if block is None:
        return ByteWeight(codes, row_scales(parts).to(device), None, k)
    scales, rows = block_scales(parts, block[0])
    return ByteWeight(codes, scales.to(device), rows.to(device), block[1])


def stack_codes(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """uint8 [sum of N, K] on `device`; a single part that lies there already is not copied."""
    views = [part.view(torch.uint8) for part in parts]
    if len(views) == 1:
        return views[0].contiguous().to(device)
    out = torch.empty((sum(map(len, views)), views[0].shape[1]), dtype=torch.uint8, device=device)
    first = 0
    for view in views:
        out[first : first + len(view)] = view
        first += len(view)
    return out


def holds_nan(codes: torch.Tensor) -> bool:
    """Whether a NaN code (0x7f or 0xff) is among e4m3 codes."""
    flat = codes.view(torch.uint8).flatten()
    # The largest of uint8 takes a twentieth of the time that comparing and any() do.
    return any(int(part.bitwise_and(0x7F).max()) == 0x7F for part in flat.split(CHUNK_BYTES))


def quantize_weight(weight: torch.Tensor, device: torch.device) -> Fp8Shard:
    """weight [N, K] of any float dtype -> e4m3 per output channel on `device`: scale = largest magnitude / 448.

    A bounded number of rows is wide at a time. Raises ValueError where the weight is not finite.
    """
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=torch.uint8, device=device)
    scales = torch.empty((n, 1), dtype=torch.float32, device=device)
    step = max(1, CHUNK_BYTES // (4 * k))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        wide = weight[rows].to(device, torch.float32, copy=True)
        scale = wide.abs().amax(1, keepdim=True).div_(LARGEST).clamp_min_(LEAST_SCALE)
        codes[rows] = encode(wide.div_(scale), E4M3)
        scales[rows] = scale
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("the weight is not finite")
    return Fp8Shard(codes, scales)
