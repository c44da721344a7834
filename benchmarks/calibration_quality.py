"""What quantised weights and KV caches cost on the demo model, each way of making them beside the others.

    python benchmarks/calibration_quality.py [--work FOLDER] [--tokens N] [--parts NAME ...] [--device cpu]

Copies are made with the built-in calibration text and measured on the built-in held-out text, which shares no line with
it; all are compared with the 16-bit model in one run. Parts:

    weights   rounded to nearest, AWQ, GPTQ and FP8, each with an unquantised KV cache
    kv        each 4-bit copy with an fp8 KV cache: scale 1.0, calibrated per tensor and per head, e4m3 and e5m2
    methods   how KV scales are chosen: output, mse, amax, percentile
    offsets   a toy Qwen2 whose key biases are large: fp8 keys with and without calibrated scales

Copies in the work folder are used again by a later run. Tables are printed as Markdown; "beside scale 1.0" is the
difference of the mean -log p on the same tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qengine.config import EngineConfig
from qengine.runtime.demo import demo_folder
from qengine.runtime.engine import Engine
from qengine.runtime.scoring import score
from qengine.text.tokenizer import Tokenizer
from qengine_calibration.eval_text import TextSource, pack
from qengine_calibration.evaluate import evaluate, planned
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_copy, make_kv_scales, weights_option
from qengine_calibration.metrics import Tally, compare, comparison, perplexity
from qengine_calibration.quantize import quantize_checkpoint
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts, load_texts

PARTS = ("weights", "kv", "methods", "offsets")
WINDOW, ROWS = 1024, 256
"""Tokens that are scored together; rows of logits at a time."""
GROUP = 64
"""The largest usual group size that divides the demo model's 576 inputs."""
METHODS = ("output", "mse", "amax", "percentile")
DTYPES = ("fp8_e4m3", "fp8_e5m2")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a copy is made; `rounded`: from the weights alone."""

    name: str
    format: str
    options: dict[str, Any]
    rounded: bool = False

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "-").replace(",", "").lower()


RECIPES = (
    Recipe("RTN 4-bit, asymmetric", "awq", {"group_size": GROUP}, rounded=True),
    Recipe("RTN 4-bit, symmetric", "gptq", {"group_size": GROUP, "act_order": False}, rounded=True),
    Recipe("AWQ 4-bit", "awq", {"group_size": GROUP}),
    Recipe("GPTQ 4-bit", "gptq", {"group_size": GROUP}),
    Recipe("GPTQ 4-bit, asymmetric", "gptq", {"group_size": GROUP, "symmetric": False}),
    Recipe("RTN 3-bit, symmetric", "gptq", {"group_size": GROUP, "bits": 3, "act_order": False}, rounded=True),
    Recipe("GPTQ 3-bit", "gptq", {"group_size": GROUP, "bits": 3}),
    Recipe("GPTQ 2-bit", "gptq", {"group_size": 32, "bits": 2}),
    Recipe("GPTQ 8-bit", "gptq", {"group_size": GROUP, "bits": 8}),
    Recipe("FP8 per channel", "fp8", {}),
    Recipe("FP8 in blocks", "fp8", {"granularity": "block"}),
)
SERVED_WITH_KV = ("16-bit", "RTN 4-bit, asymmetric", "AWQ 4-bit", "GPTQ 4-bit")


class Bench:
    """One model, one held-out text; copies and scales in `work`. `served`: weights whose KV caches are compared."""

    def __init__(self, model: Path, work: Path, tokens: int, device: str, served: Sequence[str]) -> None:
        self.model, self.work, self.tokens, self.device = bare(model, work), work, tokens, device
        self.served = served
        self.texts = load_texts(None, Tokenizer.load(model))
        self.base = EngineConfig(model=str(self.model), device=device)

    def copy(self, recipe: Recipe) -> tuple[Path, float]:
        """The folder, and the seconds that making it took (0 for one of an earlier run)."""
        target = self.work / recipe.folder
        if target.is_dir():
            return target, 0.0
        start = time.perf_counter()
        weights = weights_option(recipe.format, **recipe.options)
        if recipe.rounded:
            quantize_checkpoint(self.model, target, weights.quantizer)
        else:
            make_copy(self.model, target, self.texts, RunOptions(weights, device=self.device))
        return target, time.perf_counter() - start

    def scales(self, model: Path, kv_dtype: str, granularity: str, method: str = "output") -> Path:
        """The folder of KV scales measured behind a model's own weights."""
        target = self.work / f"kv-{model.name}-{kv_dtype}-{granularity}-{method}"
        if not target.is_dir():
            kv = KVOptions(kv_dtype, granularity, method, most_damage=1e9)
            make_kv_scales(model, target, self.texts, RunOptions(kv=kv, device=self.device, resume=True))
        return target

    def beside(self, others: Mapping[str, EngineConfig]) -> dict[str, Tally]:
        """Figures of several engines beside the 16-bit model."""
        return beside(self.base, others, self.tokens)


def beside(base: EngineConfig, others: Mapping[str, EngineConfig], tokens: int) -> dict[str, Tally]:
    """Figures of several engines beside one, whose logits are computed once, on the built-in held-out text."""
    plans, _ = planned([base, *others.values()], WINDOW)
    windows = pack(TextSource.open(None), [Tokenizer.load(base.model or "")], WINDOW, tokens)
    engines = [Engine.from_config(plan.config) for plan in plans]
    tallies = {name: Tally() for name in others}
    for i, ids in enumerate(windows.ids, 1):
        at = 1
        for first, *rest in zip(*(score(engine, ids, ROWS) for engine in engines), strict=True):
            targets = torch.tensor(ids[at : at + len(first)])
            at += len(first)
            for tally, logits in zip(tallies.values(), rest, strict=True):
                tally.add(compare(first[: len(targets)], logits[: len(targets)], targets))
        print(f"{i} of {len(windows.ids)} windows", file=sys.stderr, flush=True)
    return tallies


def bare(model: Path, work: Path) -> Path:
    """The model without the KV scales that serving may have put beside it."""
    folder = work / "16-bit"
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        link = folder / path.name
        if not path.name.startswith("kv_scales") and not link.exists():
            link.symlink_to(path)
    return folder


FIGURES = ["perplexity", "change of mean -log p", "mean KL", "99th percentile KL", "top-1 agreement"]


def cells(found: Tally) -> list[str]:
    nll_a, nll_b, kl, agree = (found.array(name) for name in ("nll_a", "nll_b", "kl", "agree"))
    assert nll_a is not None and nll_b is not None and kl is not None and agree is not None
    c = comparison(nll_a, nll_b, kl, agree)
    return [
        f"{perplexity(nll_b):.4f}", f"{c['nll_change']:+.4f} +- {c['nll_change_standard_error']:.4f}",
        f"{c['kl_mean']:.4f}", f"{c['kl_p99']:.3f}", f"{100 * c['top1_agreement']:.2f} %",
    ]  # fmt: skip


def against(found: Tally, other: Tally) -> str:
    """The difference of two engines' mean -log p."""
    one, two = found.array("nll_b"), other.array("nll_b")
    assert one is not None and two is not None
    change: np.ndarray = one - two
    return f"{change.mean():+.4f} +- {change.std(ddof=1) / math.sqrt(len(change)):.4f}"


def reference(found: Tally) -> str:
    nll = found.array("nll_a")
    assert nll is not None
    return f"16-bit: perplexity {perplexity(nll):.4f} on {len(nll):,} predictions"


def weights(bench: Bench) -> None:
    rows = []
    for recipe in RECIPES:
        folder, seconds = bench.copy(recipe)
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 2**20
        found = bench.beside({recipe.name: dataclasses.replace(bench.base, model=str(folder))})[recipe.name]
        rows.append([recipe.name, f"{size:.0f}", f"{seconds:.0f}" if seconds else "", *cells(found)])
    table("Weights", ["weights", "MiB", "seconds to make", *FIGURES], rows)
    print(reference(found))


def kv(bench: Bench) -> None:
    for name in bench.served:
        folder = next((bench.copy(r)[0] for r in RECIPES if r.name == name), bench.model)
        base = dataclasses.replace(bench.base, model=str(folder))
        engines = {} if folder == bench.model else {"auto": base}
        for dtype in DTYPES:
            own = dataclasses.replace(base, kv_cache_dtype=dtype)
            engines[f"{dtype}, scale 1.0"] = own
            for granularity in ("tensor", "head"):
                scales = bench.scales(folder, dtype, granularity)
                engines[f"{dtype}, per {granularity}"] = dataclasses.replace(own, kv_scales=str(scales))
        found = bench.beside(engines)
        rows = []
        for how, tally in found.items():
            unscaled = found.get(f"{how.partition(',')[0]}, scale 1.0")
            change = "" if unscaled is None or unscaled is tally else against(tally, unscaled)
            rows.append([name, how, *cells(tally), change])
        table(f"KV cache, {name} weights", ["weights", "KV cache", *FIGURES, "beside scale 1.0"], rows)
        print(reference(tally))


def methods(bench: Bench) -> None:
    engines = {}
    for dtype in DTYPES:
        own = dataclasses.replace(bench.base, kv_cache_dtype=dtype)
        engines[dtype, "scale 1.0"] = own
        for method in METHODS:
            scales = bench.scales(bench.model, dtype, "head", method)
            engines[dtype, method] = dataclasses.replace(own, kv_scales=str(scales))
    found = bench.beside({" ".join(key): config for key, config in engines.items()})
    rows = []
    for dtype, method in engines:
        tally, unscaled = found[f"{dtype} {method}"], found[f"{dtype} scale 1.0"]
        rows.append([dtype, method, *cells(tally), "" if tally is unscaled else against(tally, unscaled)])
    headers = ["KV cache", "method", *FIGURES, "beside scale 1.0"]
    table("How KV scales are chosen: 16-bit weights, scales per head", headers, rows)
    print(reference(tally))


def offsets(bench: Bench) -> None:
    """Random weights, so perplexity says nothing; how far the outputs move does."""
    folder = bench.work / "toy-qwen2"
    if not folder.is_dir():
        toy_qwen2(folder, bench.model)
    base = EngineConfig(model=str(folder), device=bench.device, dtype="float32")
    ids = torch.randint(0, TOY_VOCAB, (16, 256), generator=torch.Generator().manual_seed(1)).tolist()
    texts = Texts(ids, 256, "random ids", 16, 16, "random ids")
    found: dict[str, float] = {}
    for dtype in DTYPES:
        for how in ("1.0", "tensor", "head"):
            changed: dict[str, Any] = {"kv_cache_dtype": dtype}
            if how != "1.0":
                target = bench.work / f"kv-toy-{dtype}-{how}"
                options = KVOptions(dtype, how, most_damage=1e9)
                make_kv_scales(folder, target, texts, RunOptions(kv=options, device=bench.device))
                changed["kv_scales"] = str(target)
            pair = [base, dataclasses.replace(base, **changed)]
            summary = evaluate(pair, TextSource.open(None), max_tokens=4096, window=256).summary()
            found[f"{dtype}, scale 1.0" if how == "1.0" else f"{dtype}, per {how}"] = summary["comparison"]["kl_mean"]
    unscaled = {name: found[f"{name.split(',')[0]}, scale 1.0"] for name in found}
    rows = [[name, f"{kl:.3e}", f"{unscaled[name] / kl:.1f}x"] for name, kl in found.items()]
    headers = ["KV cache", "mean KL to a float32 cache", "smaller than at scale 1.0"]
    table("Toy Qwen2, key biases of +-900", headers, rows)


TOY_VOCAB = 49152


def toy_qwen2(folder: Path, tokenizer_of: Path) -> None:
    """Four layers with random weights, the demo model's tokenizer, and key biases of +-900 in every channel."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=TOY_VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, 900.0, -900.0))
        layer.self_attn.q_proj.weight.data.mul_(0.01)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)


def table(title: str, headers: list[str], rows: list[list[str]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(headers)} |\n|{'---|' * len(headers)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for copies and scales (default: a temporary one)")
    parser.add_argument("--tokens", type=int, default=32768, help="held-out tokens, at most (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--served", nargs="+", choices=SERVED_WITH_KV, default=SERVED_WITH_KV, help="weights in the part kv"
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    run: dict[str, Callable[[Bench], None]] = {"weights": weights, "kv": kv, "methods": methods, "offsets": offsets}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(demo_folder(), work, args.tokens, args.device, args.served)
        print(f"calibrated with {bench.texts.describe()}", flush=True)
        for part in args.parts:
            run[part](bench)


if __name__ == "__main__":
    main()
