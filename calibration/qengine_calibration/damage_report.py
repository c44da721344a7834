"""What a calibration run cost, for people: lines for the terminal and an HTML page, from calibration.json's figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qengine_calibration.eval_report import rows_of_comparison, rows_of_data, rows_of_sides
from qengine_calibration.layer import COLD_TOKENS
from qengine_calibration.report import Heading, Part, Picture, Table, Text, draw, page

TITLE = "qengine calibrate"
NAMED = 5
"""Modules that a line names at most."""
WORST = 20
"""Linears in the page's table; the JSON has all."""
LAYER = re.compile(r"\.(\d+)\.")

Facts = Mapping[str, Any]


def output_error(figures: Facts) -> float:
    """Of a linear: of its outputs where inputs were seen, else of the weight."""
    return float(figures.get("output_error", figures["weight_error"]))


def lines(facts: Facts) -> list[str]:
    """A few lines about the damage."""
    text = facts["text"]
    out = [
        f"text: {text['tokens']:,} tokens in {text['num_sequences']} sequences of {text['length']} from "
        f"{text['source']} ({text['rows_used']} of {text['rows_given']} rows used)"
    ]
    if linears := facts.get("linears"):
        errors = {name: output_error(f) for name, f in linears.items()}
        worst = max(errors, key=lambda n: errors[n])
        mean = sum(errors.values()) / len(errors)
        figures = f"{mean:.3f} on average, {errors[worst]:.3f} at {worst}"
        out.append(f"{len(errors)} linears: relative output error {figures}")
    if cold := facts.get("cold"):
        first = _named([f"{name} ({tokens} tokens)" for name, tokens in cold.items()])
        out.append(f"{len(cold)} linears saw too little text, {facts['cold_rule']}: {first}")
    if kv := facts.get("kv"):
        out += _kv_lines(kv)
    if end := facts.get("end_to_end"):
        out += _end_lines(end)
    return out


def _kv_lines(kv: Facts) -> list[str]:
    layers = kv["layers"]
    keys = ("attention_output_error", "attention_output_error_at_scale_1")
    means = [sum(f[key] for f in layers.values()) / max(1, len(layers)) for key in keys]
    clipped = max((f[k].get("clip_rate", 0.0) for f in layers.values() for k in "kv"), default=0.0)
    out = [
        f"KV cache: relative attention-output error {means[0]:.4f}, at scale 1.0 {means[1]:.4f}; at most "
        f"{100 * clipped:.3g} % of a layer's values are clipped"
    ]
    if kept := kv.get("kept_16_bit"):
        limit = kv["most_damage"]
        much = "WARNING: all" if len(kept) == len(layers) else str(len(kept))
        # Scales in a checkpoint's own tensors are for all layers alike.
        keep = "should keep a 16-bit KV cache and do not" if kv.get("embedded") else "keep a 16-bit KV cache"
        out.append(f"{much} layers {keep}, as their error is above {limit}: {_named(kept)}")
    sides = [f[k] for f in layers.values() for k in "kv" if "scale" in f[k]]
    if left := sum(side.get("left_at_1", 0) for side in sides):
        of = sum(len(side["scale"]) for side in sides)
        out.append(f"{left} of {of} scales are 1.0, as with no other one the attention's output is surely nearer")
    silent = [f"{n} {k}" for n, f in layers.items() for k in "kv" if f[k].get("only_zeros")]
    if silent:
        out.append(f"only zeros came by, scale 1.0 is written: {_named(silent)}")
    return out


def _end_lines(end: Facts) -> list[str]:
    if "not_measured" in end:
        return [f"end to end: not measured ({end['not_measured']})"]
    c, a, b = end["comparison"], end["a"], end["b"]
    return [
        f"end to end on {end['data']['tokens']:,} tokens of {end['data']['source']}: perplexity {b['perplexity']:.4f}, "
        f"before {a['perplexity']:.4f}; KL mean {c['kl_mean']:.5f}, 99th percentile {c['kl_p99']:.5f} nats; top-1 "
        f"agreement {100 * c['top1_agreement']:.2f} %"
    ]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def html_page(facts: Facts) -> str:
    """The page with plots; raises ConfigError where matplotlib is missing."""
    parts: list[Part] = [Text(line) for line in lines(facts)]
    if end := facts.get("end_to_end"):
        parts += _end_parts(end)
    if linears := facts.get("linears"):
        parts += _weight_parts(linears, facts)
    if kv := facts.get("kv"):
        parts += _kv_parts(kv)
    rows = [[key, str(value)] for key, value in facts["text"].items()]
    parts += [Heading("Text that was calibrated with"), Table(["", ""], rows)]
    return page(TITLE, parts)


def _end_parts(end: Facts) -> list[Part]:
    if "not_measured" in end:
        return []
    headers, sides = rows_of_sides(dict(end))
    return [
        Heading("End to end, on text that was not calibrated with"),
        Text("A is the model before, B the one with quantised weights, KV cache or both."),
        Table(headers, sides), Table(["figure", "value"], rows_of_comparison(end["comparison"])),
        Table(["", ""], rows_of_data(dict(end))), *(Text(f"Note: {note}") for note in end["notes"]),
    ]  # fmt: skip


def _weight_parts(linears: Facts, facts: Facts) -> list[Part]:
    worst = sorted(linears, key=lambda name: -output_error(linears[name]))[:WORST]
    rows = [
        [name, f"{f['tokens']:,}", f"{f['weight_error']:.4f}", f"{output_error(f):.4f}"]
        for name, f in ((name, linears[name]) for name in worst)
    ]
    made = facts["weights"]
    options = ", ".join(f"{k} {v}" for k, v in made["options"].items())
    parts: list[Part] = [
        Heading("Weights"),
        Text(
            f"{made['format']} weights ({options or 'default options'}). Errors are relative: the root of the squared "
            f"error by that of the exact values. The {len(rows)} largest of {len(linears)}:"
        ),
        Table(["linear", "tokens", "error of the weight", "error of the outputs"], rows),
        Picture(draw(lambda axes: _by_layer(axes, linears)), "Relative error of each linear's outputs, by layer"),
    ]
    if cold := facts.get("cold"):
        parts += [
            Heading("Linears that saw too little text"),
            Text(f"Each saw fewer than {COLD_TOKENS} tokens; {facts['cold_rule']}."),
            Table(["linear", "tokens"], [[name, f"{n:,}"] for name, n in cold.items()]),
        ]
    return parts


def _by_layer(axes: Any, linears: Facts) -> None:
    kinds: dict[str, list[tuple[int, float]]] = {}
    for name, figures in linears.items():
        found = LAYER.search(name)
        kinds.setdefault(name.rpartition(".")[2], []).append((int(found[1]) if found else 0, output_error(figures)))
    for kind, points in kinds.items():
        axes.plot([i for i, _ in points], [e for _, e in points], ".", label=kind)
    axes.set(xlabel="layer", ylabel="relative output error", ylim=(0, None))
    axes.legend(frameon=False, ncols=4, fontsize="small")


def _kv_parts(kv: Facts) -> list[Part]:
    layers, kept = kv["layers"], () if kv.get("embedded") else kv.get("kept_16_bit", ())
    rows = [
        [
            name, *(f"{max(f[k]['amax']):.4g}" for k in "kv"), *(_figure(f[k], "clip_rate", 100, ".3g") for k in "kv"),
            *(_figure(f[k], "relative_error", 1, ".4f") for k in "kv"), f"{f['attention_output_error']:.4f}",
            f"{f['attention_output_error_at_scale_1']:.4f}", "16-bit" if name in kept else "scaled",
        ]
        for name, f in layers.items()
    ]  # fmt: skip
    headers = [
        "layer", "largest |K|", "largest |V|", "K clipped, %", "V clipped, %", "K rounding error", "V rounding error",
        "attention-output error", "the same at scale 1.0", "cache",
    ]  # fmt: skip
    return [
        Heading("KV cache"),
        Text(
            f"Scales by {kv['method']}, one per {kv['granularity']}. Errors of the output are relative and measured on "
            "the text's first sequences."
        ),
        Table(headers, rows),
        Picture(draw(lambda axes: _kv_errors(axes, kv)), "Relative error of each layer's attention output"),
        Picture(draw(lambda axes: _kv_sizes(axes, layers)), "Largest magnitude of keys (rotated) and values, by head"),
    ]


def _figure(side: Facts, key: str, times: float, form: str) -> str:
    """Empty for a side that takes no scales."""
    return format(times * side[key], form) if key in side else ""


def _kv_errors(axes: Any, kv: Facts) -> None:
    layers = list(kv["layers"].values())
    axes.plot([f["attention_output_error"] for f in layers], ".-", label="calibrated scales")
    axes.plot([f["attention_output_error_at_scale_1"] for f in layers], ".--", label="scale 1.0")
    if kv.get("most_damage") is not None:
        axes.axhline(kv["most_damage"], color="#aa3377", linestyle=":", label="16 bits above")
    axes.set(xlabel="layer", ylabel="relative error", ylim=(0, None))
    axes.legend(frameon=False)


def _kv_sizes(axes: Any, layers: Facts) -> None:
    for k, mark in (("k", "o"), ("v", "x")):
        points = [(i, a) for i, f in enumerate(layers.values()) for a in f[k]["amax"] if a > 0]
        axes.plot([i for i, _ in points], [a for _, a in points], mark, markersize=3, label=k.upper())
    axes.set(xlabel="layer", ylabel="largest magnitude", yscale="log")
    axes.legend(frameon=False)
