"""Linears of one shape on this GPU: 4-bit and FP8 kernels beside cuBLAS in bfloat16.

Microseconds a call from CUDA graphs replayed in turns, weights rotated through the L2 cache, x random; every result is
checked against float32 in the same run. W4 is 4 bits in groups with zeros, and cuBLAS multiplies what they mean; FP8 is
e4m3 with a scale a row and activations rounded by token (the rounding is not timed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from qengine.errors import QEngineError
from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear
from qengine_kernels.fp8_linear.weight import Fp8Shard, stack_shards
from qengine_kernels.launch import Chip
from qengine_kernels.timing import copies, error, turns_us
from qengine_kernels.wna16_gemm import TiledWeight, held_weight, wna16_matmul
from qengine_kernels.wna16_gemm.layout import PackedWeight, pack_codes
from qengine_kernels.wna16_gemm.reference import dequantize_reference
from qengine_kernels.wna16_gemm.tiled_config import plan_tiles

LIMITS = {"cuBLAS": 0.01, "W4": 0.01, "FP8": 0.05}
"""Relative errors above which a result is wrong."""


def measure(n: int, k: int, rows: Sequence[int], group: int) -> list[dict[str, Any]]:
    """One dict for each number of rows: microseconds and errors by kernel (W4 only where it has tiles, FP8 only where
    the chip has it), the W4 route, and the time that reading its bytes at 4.2 TB/s takes. Raises QEngineError for a
    wrong result."""
    chip = Chip.of(torch.device("cuda"))
    found = contenders(n, k, group, chip)
    out = []
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = {"n": n, "k": k, "m": m, "floor": n * k / 2 * (1 + 8 / group) / 4.2e6}
        timed = []
        for kind, (ops, meaning) in found.items():
            wrong = error(ops[0](x), x.float() @ meaning.t())
            if not wrong < LIMITS[kind]:
                raise QEngineError(f"{kind} N {n} K {k} M {m}: relative error {wrong:.3g} above {LIMITS[kind]}")
            calls = fp8_calls(ops, x) if kind == "FP8" else [partial(op, x) for op in ops]
            timed.append(calls if m <= 512 else calls[:4])
            row[f"{kind} error"] = wrong
        row |= zip(found, turns_us(timed, 12), strict=True)
        if "W4" in found:
            row["route"] = plan_tiles(chip, m, n, k, 0 if group >= k else group).kind
        out.append(row)
    return out


def contenders(n: int, k: int, group: int, chip: Chip) -> dict[str, tuple[list[Any], torch.Tensor]]:
    """Name -> (a call for each cold weight, the first weight's meaning in float32 [N, K])."""
    packed = [w4(n, k, group) for _ in range(copies(n * k // 2))]
    meaning = dequantize_reference(packed[0]).t()
    # What is multiplied decides what power matrix units draw: cuBLAS gets the same weights.
    dense = [dequantize_reference(p).t().to(torch.bfloat16).contiguous() for p in packed[: copies(2 * n * k)]]
    found: dict[str, Any] = {"cuBLAS": ([lambda x, w=w: F.linear(x, w) for w in dense], dense[0].float())}
    tiled = [held_weight(w, torch.bfloat16, chip) for w in packed]
    if all(isinstance(w, TiledWeight) for w in tiled):
        found["W4"] = ([lambda x, w=w: wna16_matmul(x, w, None, None, chip) for w in tiled], meaning)
    del packed
    if chip.sm >= 89:
        shards = [fp8(n, k) for _ in range(copies(n * k))]
        meaning = shards[0].codes.float() * shards[0].scale
        found["FP8"] = (
            [Fp8CudaLinear(stack_shards([s], None, s.codes.device), None, torch.bfloat16, chip) for s in shards],
            meaning,
        )
    return found


def w4(n: int, k: int, group: int) -> PackedWeight:
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(-(-k // group), n, device="cuda") * 0.05 + 0.01).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    return PackedWeight(pack_codes(codes), scales, zeros, k, min(group, k))


def fp8(n: int, k: int) -> Fp8Shard:
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return Fp8Shard(codes, torch.rand(n, 1, device="cuda") * 0.01 + 0.001)


def fp8_calls(linears: Sequence[Fp8CudaLinear], x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """Calls of the products alone, with x rounded before."""
    codes, scales = linears[0].round_rows(x, linears[0].segments[0])
    return [partial(op.multiply, codes, scales, op.segments[0]) for op in linears]
