"""Linear kernels on the shapes of an 8B Llama beside cuBLAS in bfloat16 and beside what other engines' kernels reach.

    python benchmarks/kernels/linear.py [--json FILE]

Microseconds a call from CUDA graph replay, weights rotated through the L2 cache, x random; every result is
checked against float32 in the same run. W4 is 4 bits in groups of 128 with zeros; FP8 is e4m3 with a scale a row and
activations rounded by token (the rounding is not timed). Peers were read on an H200 (Marlin, Machete and CUTLASS in
vLLM 0.26).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, header, write
from torch.nn import functional as F

from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear
from qengine_kernels.fp8_linear.weight import Fp8Shard, stack_shards
from qengine_kernels.launch import Chip
from qengine_kernels.timing import copies, error, graph_us
from qengine_kernels.wna16_gemm import TiledWeight, held_weight, wna16_matmul
from qengine_kernels.wna16_gemm.layout import PackedWeight, pack_codes
from qengine_kernels.wna16_gemm.reference import dequantize_reference
from qengine_kernels.wna16_gemm.tiled_config import plan_tiles

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUP = 128
# shape, rows: Marlin W4, Machete W4, CUTLASS FP8, goal W4
PEERS: dict[tuple[str, int], tuple[float, float, float, float]] = {
    ("qkv", 1): (11.0, 15.7, 9.8, 6), ("qkv", 16): (11.9, 15.9, 9.9, 7), ("qkv", 64): (21.8, 30.9, 10.0, 12),
    ("qkv", 256): (43.7, 28.2, 15.8, 24), ("qkv", 2048): (299, 137, 74, 137),
    ("o", 1): (9.9, 15.8, 7.8, 5), ("o", 16): (9.8, 15.0, 7.6, 6), ("o", 64): (15.9, 19.5, 8.2, 10),
    ("o", 256): (31.1, 22.9, 15.1, 18), ("o", 2048): (193, 105, 49, 95),
    ("gate_up", 1): (31.3, 33.3, 36.1, 20), ("gate_up", 16): (32.7, 29.5, 35.4, 22),
    ("gate_up", 64): (52.4, 44.1, 38.6, 36), ("gate_up", 256): (175, 88.3, 52.7, 88),
    ("gate_up", 2048): (1423, 619, 338, 620),
    ("down", 1): (23.6, 27.4, 18.9, 12), ("down", 16): (23.5, 25.4, 18.8, 13), ("down", 64): (40.6, 29.3, 20.5, 24),
    ("down", 256): (90.4, 57.6, 39.7, 52), ("down", 2048): (639, 390, 171, 305),
}  # fmt: skip


def w4(n: int, k: int) -> PackedWeight:
    device = torch.device("cuda")
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, device=device)
    scales = (torch.rand(k // GROUP, n, device=device) * 0.05 + 0.01).half()
    zeros = torch.randint(0, 16, (k // GROUP, n), dtype=torch.uint8, device=device)
    return PackedWeight(pack_codes(codes), scales, zeros, k, GROUP)


def fp8(n: int, k: int) -> Fp8Shard:
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return Fp8Shard(codes, torch.rand(n, 1, device="cuda") * 0.01 + 0.001)


def contenders(n: int, k: int) -> dict[str, tuple[list[Any], torch.Tensor]]:
    """Name -> (a call for each cold weight, the first weight's meaning in float32 [N, K])."""
    chip = Chip.of(torch.device("cuda"))
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
    found: dict[str, Any] = {"cuBLAS": ([lambda x, w=w: F.linear(x, w) for w in dense], dense[0].float())}
    packed = [w4(n, k) for _ in range(copies(n * k // 2))]
    meaning = dequantize_reference(packed[0]).t()
    tiled = [held_weight(w, torch.bfloat16, chip) for w in packed]
    assert all(isinstance(w, TiledWeight) for w in tiled)
    found["W4"] = ([lambda x, w=w: wna16_matmul(x, w, None, None, chip) for w in tiled], meaning)
    del packed
    shards = [fp8(n, k) for _ in range(copies(n * k))]
    meaning = shards[0].codes.float() * shards[0].scale
    linears = [Fp8CudaLinear(stack_shards([s], None, s.codes.device), None, torch.bfloat16, chip) for s in shards]
    found["FP8"] = (linears, meaning)
    return found


def fp8_calls(linears: list[Fp8CudaLinear], x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    """Calls of the products alone, with x rounded before."""
    codes, scales = linears[0].round_rows(x, linears[0].segments[0])
    return [lambda op=op: op.multiply(codes, scales, op.segments[0]) for op in linears]  # type: ignore[misc]


def measure(name: str, n: int, k: int, rows: list[dict[str, Any]]) -> None:
    found = contenders(n, k)
    chip = Chip.of(torch.device("cuda"))
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        row: dict[str, Any] = {"shape": name, "n": n, "k": k, "m": m}
        for kind, (ops, meaning) in found.items():
            wrong = error(ops[0](x), x.float() @ meaning.t())
            limit = 0.05 if kind == "FP8" else 0.01
            if not wrong < limit:
                raise SystemExit(f"{name} M={m} {kind}: relative error {wrong:.3g} above {limit}")
            calls = fp8_calls(ops, x) if kind == "FP8" else [lambda op=op, x=x: op(x) for op in ops]
            row[kind], row[f"{kind} error"] = graph_us(calls if m <= 512 else calls[:4]), wrong
        row["plan"] = plan_tiles(chip, m, n, k, GROUP).kind
        row["floor"] = n * k / 2 * (1 + 8 / GROUP) / 4.2e6
        marlin, machete, cutlass, goal = PEERS.get((name, m), (None,) * 4)
        rows.append(row | {"Marlin": marlin, "Machete": machete, "CUTLASS FP8": cutlass, "goal": goal})


def main() -> None:
    args = arguments(__doc__)
    rows: list[dict[str, Any]] = []
    for name, (n, k) in SHAPES.items():
        measure(name, n, k, rows)
        torch.cuda.empty_cache()
    print(header())
    columns = ["cuBLAS", "W4", "goal", "Marlin", "Machete", "FP8", "CUTLASS FP8"]
    print("| shape (N x K) | M | " + " | ".join(columns) + " | W4 / cuBLAS | route |\n" + "|---" * 11 + "|")
    for row in rows:
        shape = f"{row['shape']} {row['n']}x{row['k']}" if row["m"] == ROWS[0] else ""
        cells = ["" if row[c] is None else f"{row[c]:.1f}" for c in columns]
        ratio = f"{row['W4'] / row['cuBLAS']:.2f}"
        print(f"| {shape} | {row['m']} | " + " | ".join(cells) + f" | {ratio} | {row['plan']} |")
    write(args.json, rows)


if __name__ == "__main__":
    main()
