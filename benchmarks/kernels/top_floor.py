"""What top_p alone keeps of 128,256 logits: searching for the lowest kept value, and sorting, in one run.

    python benchmarks/kernels/top_floor.py [--json FILE]

Logits are normal with a standard deviation of 3, at temperature 1, so that a few hundred to some thousand tokens stay.
Sorting is what plain torch does, 32 rows at a time. Times are of replayed graphs, so launching from Python is not in
them: sorting launches a dozen kernels for every 32 rows, searching one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timing import arguments, header, write

from qengine_kernels.timing import COLD_BYTES, graph_us
from qengine_kernels.top_floor.kernel import launch_top_floor
from qengine_kernels.top_floor.reference import top_floor_reference

VOCAB = 128256
ROWS = (1, 2, 4, 16, 64, 256)
TOP_P = (0.5, 0.9, 0.99)


def measure(count: int, top_p: float) -> dict[str, Any]:
    calls: dict[str, list[Any]] = {"search": [], "sort": []}
    floors = {}
    for seed in range(max(1, COLD_BYTES // (count * VOCAB * 8))):
        x = torch.randn(count, VOCAB, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * 3
        x -= x.amax(dim=1, keepdim=True)
        filled = partial(torch.full, (count,), device="cuda")
        rows, limits = torch.arange(count, device="cuda"), (filled(VOCAB), filled(top_p), filled(-torch.inf))
        calls["search"].append(partial(launch_top_floor, x, rows, *limits))
        calls["sort"].append(partial(top_floor_reference, x, x.exp(), rows, VOCAB, *limits))
        floors = {name: own[-1]() for name, own in calls.items()}
    return {
        "rows": count, "top_p": top_p, "kept": round((x >= floors["search"][:, None]).sum(dim=1).float().mean().item()),
        "kept apart": int(((x >= floors["search"][:, None]) != (x >= floors["sort"][:, None])).sum()),
        **{name: graph_us(own) for name, own in calls.items()},
    }  # fmt: skip


def main() -> None:
    args = arguments(__doc__)
    rows = [measure(count, top_p) for count in ROWS for top_p in TOP_P]
    print(header())
    print("| rows | top_p | kept, mean | kept by one | search, us | sort, us | ratio |\n|---|---|---|---|---|---|---|")
    for row in rows:
        facts = [str(row[name]) for name in ("rows", "top_p", "kept", "kept apart")]
        times = [f"{us:.1f}" for us in (row["search"], row["sort"], row["sort"] / row["search"])]
        print(f"| {' | '.join(facts + times)} |")
    write(args.json, rows)


if __name__ == "__main__":
    main()
