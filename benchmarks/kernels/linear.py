"""Linear kernels on the shapes of an 8B Llama beside cuBLAS in bfloat16 and beside what other engines' kernels reach.

    python benchmarks/kernels/linear.py [--json FILE]

How they are measured: `qengine.bench.linear_kernels` (`qengine bench kernels` takes other shapes). Peers were read on
an H200 (Marlin, Machete and CUTLASS in vLLM 0.26).
"""

from __future__ import annotations

from typing import Any

import torch
from timing import arguments, header, write

from qengine.bench.linear_kernels import measure

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


def main() -> None:
    args = arguments(__doc__)
    rows: list[dict[str, Any]] = []
    for name, (n, k) in SHAPES.items():
        for row in measure(n, k, ROWS, GROUP):
            marlin, machete, cutlass, goal = PEERS.get((name, row["m"]), (None,) * 4)
            beside = {"Marlin": marlin, "Machete": machete, "CUTLASS FP8": cutlass, "goal": goal}
            rows.append({"shape": name} | row | beside)
        torch.cuda.empty_cache()
    print(header())
    columns = ["cuBLAS", "W4", "goal", "Marlin", "Machete", "FP8", "CUTLASS FP8"]
    print("| shape (N x K) | M | " + " | ".join(columns) + " | W4 / cuBLAS | route |\n" + "|---" * 11 + "|")
    for row in rows:
        shape = f"{row['shape']} {row['n']}x{row['k']}" if row["m"] == ROWS[0] else ""
        cells = ["" if row.get(c) is None else f"{row[c]:.1f}" for c in columns]
        ratio = f"{row['W4'] / row['cuBLAS']:.2f}"
        print(f"| {shape} | {row['m']} | " + " | ".join(cells) + f" | {ratio} | {row['route']} |")
    write(args.json, rows)


if __name__ == "__main__":
    main()
