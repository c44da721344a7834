"""AWQ and GPTQ made here, and by llm-compressor and GPTQModel: perplexity, time and peak memory on the demo model.

    python benchmarks/quantizers.py --llmcompressor PYTHON --gptqmodel PYTHON [--work FOLDER] [--tokens N]

PYTHON is the interpreter of an environment that holds the other package, whose pins differ from qengine's:

    python -m venv lc && lc/bin/pip install llmcompressor      # 0.14: torch 2.13, transformers 5.17
    python -m venv gm && gm/bin/pip install "gptqmodel<7.7" optimum  # 7.6: torch 2.13, transformers 5.24; 2.3
    (gptqmodel is built from source and needs setuptools, wheel and torch first, with --no-build-isolation)

Every quantizer gets the same token ids (the built-in calibration text), 4 bits, groups of 64, and a process of its own;
one after the other, on the CPU. Results are all measured by this engine on the built-in held-out text, in the layout
that each package writes. Time and memory cover the whole process: start, load, quantise, save; CPU seconds are those of
all its threads, which other work on the machine does not stretch.

Two things are needed on a CPU and done for the others here: llm-compressor's AWQ pins memory, which torch refuses
without a GPU, so pinning does nothing; GPTQModel's thread pool needs GPTQMODEL_CPU_WORKERS=2 on a machine with two
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BITS, GROUP, LENGTH = 4, 64, 512


def read_rows(file: str) -> list[list[int]]:
    rows: list[list[int]] = json.loads(Path(file).read_text())
    return rows


# ---- the makers: each runs in an interpreter of its own environment, so imports stand inside


def qengine(method: str, source: str, ids: str, out: str) -> None:
    from qengine_calibration.make import make_copy, weights_option
    from qengine_calibration.run import RunOptions
    from qengine_calibration.texts import Texts

    rows = read_rows(ids)
    texts = Texts(rows, LENGTH, "the built-in texts", len(rows), len(rows), "")
    make_copy(Path(source), Path(out), texts, RunOptions(weights_option(method, group_size=GROUP), device="cpu"))


def llmcompressor(method: str, source: str, ids: str, out: str) -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.Tensor.pin_memory = lambda self, *a, **k: self
    rows = read_rows(ids)
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    weights = {"num_bits": BITS, "type": "int", "symmetric": method == "gptq", "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if method == "awq":
        recipe = [AWQModifier(), QuantizationModifier(ignore=["lm_head"], config_groups=groups)]
    else:
        recipe = [GPTQModifier(ignore=["lm_head"], config_groups=groups)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    oneshot(
        model=model, tokenizer=tokenizer, dataset=data, recipe=recipe, max_seq_length=LENGTH,
        num_calibration_samples=len(rows),
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def gptqmodel(method: str, source: str, ids: str, out: str) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    if method == "awq":
        kind: dict[str, Any] = {"sym": False, "method": METHOD.AWQ, "format": FORMAT.GEMM}
    else:
        kind = {"sym": True, "desc_act": True}
    model = GPTQModel.load(source, QuantizeConfig(bits=BITS, group_size=GROUP, device="cpu", **kind))
    rows = read_rows(ids)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(out)


def optimum(method: str, source: str, ids: str, out: str) -> None:
    import torch
    from optimum.gptq import GPTQQuantizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = read_rows(ids)
    data = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row)).long()} for row in rows]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    quantizer = GPTQQuantizer(
        bits=BITS, dataset=data, group_size=GROUP, desc_act=True, act_group_aware=False, sym=True, model_seqlen=LENGTH
    )
    made = quantizer.quantize_model(model, tokenizer)
    quantizer.dataset = made.config.quantization_config["dataset"] = None  # tensors can't be written into a config
    quantizer.save(made, out)
    tokenizer.save_pretrained(out)


MAKERS: dict[str, Callable[[str, str, str, str], None]] = {
    "qengine": qengine, "llmcompressor": llmcompressor, "gptqmodel": gptqmodel, "optimum": optimum,
}  # fmt: skip
RUNS = (
    ("awq", "qengine"), ("awq", "llmcompressor"), ("awq", "gptqmodel"),
    ("gptq", "qengine"), ("gptq", "llmcompressor"), ("gptq", "gptqmodel"), ("gptq", "optimum"),
)  # fmt: skip


def make() -> None:
    """The child: `make PACKAGE METHOD SOURCE IDS OUT`; the last line is what it took."""
    package, method, source, ids, out = sys.argv[2:]
    start = time.perf_counter()
    MAKERS[package](method, source, ids, out)
    spent = os.times()
    cpu = spent.user + spent.system + spent.children_user + spent.children_system
    print("\n" + json.dumps({"seconds": time.perf_counter() - start, "cpu": cpu, "peak": peak_rss()}))


def peak_rss() -> int:
    """Bytes. The kernel counts VmHWM from exec on; ru_maxrss also holds what the parent had when it started this."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def run(python: str, package: str, method: str, source: Path, ids: Path, out: Path) -> dict[str, Any]:
    known = out.with_suffix(".json")
    if known.is_file():
        kept: dict[str, Any] = json.loads(known.read_text())
        return kept
    env = os.environ | {"GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [python, __file__, "make", package, method, str(source), str(ids), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    out.with_suffix(".log").write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    out.with_suffix(".json").write_text(json.dumps(figures))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmcompressor", metavar="PYTHON")
    parser.add_argument("--gptqmodel", metavar="PYTHON", help="also runs optimum, which quantises through it")
    parser.add_argument("--work", type=Path, help="folder for copies, used again by a later run (default: temporary)")
    parser.add_argument("--tokens", type=int, default=32768, help="held-out tokens, at most (default: %(default)s)")
    args = parser.parse_args()
    pythons = {"qengine": sys.executable, "llmcompressor": args.llmcompressor, "gptqmodel": args.gptqmodel,
               "optimum": args.gptqmodel}  # fmt: skip

    from qengine.runtime.demo import demo_folder
    from qengine.text.tokenizer import Tokenizer
    from qengine_calibration.texts import load_texts

    source = demo_folder()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        ids = work / "ids.json"
        ids.write_text(json.dumps(load_texts(None, Tokenizer.load(source), length=LENGTH).sequences))
        took = {}
        for method, package in RUNS:
            if pythons[package] is not None:
                out = work / f"{package}-{method}"
                print(f"{method} by {package}", file=sys.stderr, flush=True)
                took[method, package] = run(pythons[package], package, method, source, ids, out), out
        report(took, source, args.tokens)


def report(took: dict[tuple[str, str], tuple[dict[str, Any], Path]], source: Path, tokens: int) -> None:
    from calibration_quality import FIGURES, beside, cells, reference, table

    from qengine.config import EngineConfig

    made = {key: out for key, (figures, out) in took.items() if "error" not in figures}
    configs = {" ".join(key): EngineConfig(model=str(out), device="cpu") for key, out in made.items()}
    found = beside(EngineConfig(model=str(source), device="cpu"), configs, tokens)
    rows = []
    for key, (figures, _) in took.items():
        if "error" in figures:
            rows.append([*key, f"failed: {figures['error']}", *[""] * (2 + len(FIGURES))])
            continue
        spent = [f"{figures['seconds']:.0f}", f"{figures['cpu']:.0f}", f"{figures['peak'] / 2**20:.0f}"]
        rows.append([*key, *spent, *cells(found[" ".join(key)])])
    table("Quantizers", ["method", "package", "seconds", "CPU seconds", "peak RSS, MiB", *FIGURES], rows)
    print(reference(next(iter(found.values()))))


if __name__ == "__main__":
    make() if sys.argv[1:2] == ["make"] else main()
