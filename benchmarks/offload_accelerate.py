"""The rows of offload.py with Hugging Face transformers and accelerate's device_map: the same shapes, the same cap.

    python benchmarks/offload_accelerate.py [--rows llama-3.1-8b-bf16,...] [--gib 15] [--spare 3] [--tokens 9]
                                            [--json FILE]

Weights are 16-bit in every row: what a quantised file needs to run in transformers are other packages' kernels, and
`device_map` streams what they hold in the same way. The map is what accelerate itself finds for `--gib` less
`--spare` GiB for activations and for what it copies at a time (an output layer of a large vocabulary is one piece);
layers that do not fit stay in (pageable) host memory and are copied by its hooks when they run. Weights are zeros.
Figures: decode tokens/s for one sequence and for eight, prompts of 128, from the first new token to the last of
--tokens + 1; bytes on the host; peak memory of the process and of the device. A row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import dispatch_model, infer_auto_device_map
from offload import GIB, ROWS, write_config
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria

from qengine.bench.rows import add_row_arguments, chosen, print_rows
from qengine.runtime import device as devices

HOST_ROOM = 4 << 30
"""Host memory that the map leaves free."""


def build(args: argparse.Namespace, row: str) -> tuple[Any, int]:
    """The dispatched model, and the bytes of the weights that stay on the host."""
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), row, args.shape)
        file = Path(name, "config.json")
        config = json.loads(file.read_text())
        config.pop("quantization_config", None)
        file.write_text(json.dumps(config))
        config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    room: dict[int | str, int] = {"cpu": psutil.virtual_memory().available - HOST_ROOM}
    if args.device == "cuda":
        room = {0: int((args.gib - args.spare) * GIB), **room}
    places = infer_auto_device_map(model, max_memory=room, no_split_module_classes=model._no_split_modules)
    if "disk" in places.values():
        raise SystemExit(f"{row}: the host has no room for what the device does not hold")
    on_host = [name for name, place in places.items() if place == "cpu"]
    held = sum(p.nbytes for name in on_host for p in model.get_submodule(name).parameters())
    return dispatch_model(model, places, force_hooks=True), held


class Clock(StoppingCriteria):
    """When each new token of a run was there; it never stops one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        last = input_ids[:, -1].cpu()  # waits for the device
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(last), dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def decode_rate(model: Any, batch: int, prompt: int, tokens: int) -> float:
    """Tokens a second of all sequences together."""
    ids = torch.randint(2, model.config.vocab_size, (batch, prompt), device=model.device)
    clock, new = Clock(), tokens + 1
    model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, stopping_criteria=[clock]
    )
    return batch * tokens / (clock.seconds[-1] - clock.seconds[0])


def measure(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """All figures of one row, in this process."""
    device = devices.select_device(args.device)[0]
    devices.limit_memory(device, int(args.gib * GIB))
    devices.start_peak(device)
    model, held = build(args, row)
    prompt = 16 if args.shape == "tiny" else 128
    # The slower batch first: its prompt is what everything is loaded and compiled for.
    rates = {f"decode_{batch}": decode_rate(model, batch, prompt, args.tokens) for batch in (8, 1)}
    peaks = {"peak_host": devices.peak_host_bytes(), "peak_device": devices.peak_bytes(device)}
    return {"row": row, "host_bytes": held, **rates, **peaks}


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| row, 16-bit weights | on the host, GiB | decode tok/s, 1 | 8 | host peak, GiB | device peak, GiB |"]
    lines.append("|---|" + "---|" * 5)
    for r in results:
        if "error" in r:
            lines.append(f"| {r['row']} | {r['error']} |" + " |" * 4)
            continue
        cells = [r["row"], f"{r['host_bytes'] / GIB:.2f}", f"{r['decode_1']:.2f}", f"{r['decode_8']:.2f}"]
        cells += [f"{r['peak_host'] / GIB:.2f}", f"{r['peak_device'] / GIB:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_row_arguments(parser, ROWS, default="llama-3.1-8b-bf16")
    parser.add_argument("--gib", type=float, default=15.0, help="memory of the card that is played")
    parser.add_argument("--spare", type=float, default=3.0, help="GiB of it that the map leaves free")
    parser.add_argument("--tokens", type=int, default=9, help="of each sequence")
    parser.add_argument("--shape", default="published", choices=("published", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    args.rows = chosen(parser, "row", args.rows, ROWS)
    return args


def main(argv: Sequence[str]) -> None:
    print_rows(__file__, argv, parse(argv), measure, table)


if __name__ == "__main__":
    main(sys.argv[1:])
