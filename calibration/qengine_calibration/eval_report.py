"""An evaluation for people: lines for the terminal and an HTML page."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from qengine.runtime.report import gib
from qengine_calibration.evaluate import Evaluation
from qengine_calibration.report import Heading, Part, Picture, Table, Text, draw, page

TITLE = "qengine eval"
BINS = 60
PLACE_GROUPS = 32
PATH = re.compile(r"/\S*/")
"""Folders in the source of KV scales: too long for a table, complete in the JSON."""
FLOOR = 1e-8
"""Smallest KL that the logarithmic plots show."""


def rows_of_sides(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table with a column for each side."""
    sides = [summary[i] for i in ("a", "b") if summary[i] is not None]
    rows = [
        ["model", *(str(s["model"]) for s in sides)],
        ["weights", *(s["weights"] for s in sides)],
        ["weights in memory", *(gib(s["weights_bytes"]) for s in sides)],
        ["KV dtype", *(s["kv_dtype"] for s in sides)],
        ["KV scales, layers x source", *(PATH.sub("", s["kv_scale_sources"]) for s in sides)],
        ["KV bytes for one token", *(f"{s['kv_bytes_per_token']:,.0f}" for s in sides)],
        ["compute dtype", *(s["dtype"] for s in sides)],
        ["device", *(s["device"] for s in sides)],
        ["perplexity", *(f"{s['perplexity']:.4f}" for s in sides)],
    ]
    return ["", *"AB"[: len(sides)]], rows


def rows_of_comparison(c: dict[str, Any]) -> list[list[str]]:
    """Figure and value of B against A."""
    return [
        ["KL(A || B), mean", f"{c['kl_mean']:.6f} nats"],
        ["KL(A || B), 99th percentile", f"{c['kl_p99']:.6f} nats"],
        ["KL(A || B), median and largest", f"{c['kl_median']:.6f} and {c['kl_max']:.6f} nats"],
        ["top-1 agreement", f"{100 * c['top1_agreement']:.2f} %"],
        ["perplexity of B over A's", f"{c['perplexity_ratio']:.5f}"],
        ["change of mean -log p", f"{c['nll_change']:+.6f} +- {c['nll_change_standard_error']:.6f} nats a token"],
    ]


def rows_of_data(summary: dict[str, Any]) -> list[list[str]]:
    d = summary["data"]
    return [
        ["text", f"{d['source']} (sha256 {d['sha256'][:12]})"],
        ["rows used / given", f"{d['rows_used']:,} / {d['rows_given']:,}"],
        ["tokens used", f"{d['tokens']:,} (limit {d['max_tokens']:,})"],
        ["predictions scored", f"{d['positions']:,} in {d['windows']:,} windows of up to {d['window']:,} tokens"],
    ]


def lines(e: Evaluation) -> list[str]:
    """The tables as aligned text."""
    summary = e.summary()
    headers, sides = rows_of_sides(summary)
    out = _aligned([headers, *sides])
    if summary["comparison"] is not None:
        out += ["", *_aligned(rows_of_comparison(summary["comparison"]))]
    out += ["", *_aligned(rows_of_data(summary))]
    return out + [f"note: {note}" for note in e.notes]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def html_page(e: Evaluation) -> str:
    """The page with plots; raises ConfigError where matplotlib is missing."""
    summary = e.summary()
    headers, sides = rows_of_sides(summary)
    parts: list[Part] = [Text(_in_words(summary)), Heading("The two settings" if summary["b"] else "The setting")]
    parts.append(Table(headers, sides))
    if summary["comparison"] is not None:
        parts += [Heading("What B costs"), Table(["figure", "value"], rows_of_comparison(summary["comparison"]))]
    parts += [Heading("Where"), *_pictures(e)]
    parts += [Heading("Text"), Table(["", ""], rows_of_data(summary))]
    for i in ("a", "b"):
        if summary[i] is not None and summary[i]["kv_scales"]:
            parts.append(Heading(f"KV scales of {i.upper()}"))
            parts += [Text(line) for line in summary[i]["kv_scales"]]
    if e.notes:
        parts += [Heading("Notes"), *(Text(note) for note in e.notes)]
    return page(TITLE, parts)


def _in_words(summary: dict[str, Any]) -> str:
    c = summary["comparison"]
    if c is None:
        return f"Perplexity {summary['a']['perplexity']:.4f} on {summary['data']['positions']:,} predictions."
    change, error = c["nll_change"], c["nll_change_standard_error"]
    sure = "more than two standard errors" if abs(change) > 2 * error else "within two standard errors of no change"
    return (
        f"B's perplexity is {c['perplexity_ratio']:.4f} times A's ({sure}). In {100 * c['top1_agreement']:.2f} % of "
        f"the positions both hold the same token likeliest. The mean KL divergence from A is {c['kl_mean']:.5f} nats; "
        f"in one of a hundred positions it is above {c['kl_p99']:.5f}."
    )


def _pictures(e: Evaluation) -> list[Part]:
    out: list[Part] = []
    kl = e.kl
    if kl is not None:
        out.append(Picture(draw(lambda axes: _kl_histogram(axes, kl)), "KL(A || B) of every position, logarithmic"))
        caption = "KL(A || B) by position in the window: mean and 99th percentile of runs of positions"
        out.append(Picture(draw(lambda axes: _kl_by_place(axes, kl, e.places)), caption))
    caption = "Mean -log p of the token that follows, by position in the window"
    out.append(Picture(draw(lambda axes: _nll_by_place(axes, e)), caption))
    return out


def _kl_histogram(axes: Any, kl: np.ndarray) -> None:
    shown = np.maximum(kl, FLOOR)
    low = float(shown.min())
    edges = np.geomspace(low, max(float(shown.max()), 10 * low), BINS)
    axes.hist(shown, bins=edges, color="#4477aa")
    for value, name in ((kl.mean(), "mean"), (np.percentile(kl, 99), "99th percentile")):
        axes.axvline(max(float(value), FLOOR), color="#aa3377", linestyle="--" if name == "mean" else ":", label=name)
    axes.set(xscale="log", xlabel=f"KL in nats ({FLOOR:g} holds all below)", ylabel="positions")
    axes.legend(frameon=False)


def _groups(places: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """(middle position, indices) of runs of neighbouring positions."""
    edges = np.unique(np.linspace(0, int(places.max()) + 1, PLACE_GROUPS + 1).astype(int))
    found = ((low, high, (places >= low) & (places < high)) for low, high in itertools.pairwise(edges))
    return [((low + high - 1) / 2, np.flatnonzero(own)) for low, high, own in found if own.any()]


def _kl_by_place(axes: Any, kl: np.ndarray, places: np.ndarray) -> None:
    groups = _groups(places)
    x = [middle for middle, _ in groups]
    axes.plot(x, [max(float(kl[i].mean()), FLOOR) for _, i in groups], color="#4477aa", label="mean")
    tops = [max(float(np.percentile(kl[i], 99)), FLOOR) for _, i in groups]
    axes.plot(x, tops, color="#aa3377", linestyle=":", label="99th percentile")
    axes.set(yscale="log", xlabel="position in the window", ylabel="KL in nats")
    axes.legend(frameon=False)


def _nll_by_place(axes: Any, e: Evaluation) -> None:
    groups = _groups(e.places)
    for name, nll, style in (("A", e.nll_a, "-"), ("B", e.nll_b, "--")):
        if nll is not None:
            axes.plot([m for m, _ in groups], [float(nll[i].mean()) for _, i in groups], style, label=name)
    axes.set(xlabel="position in the window", ylabel="-log p in nats")
    axes.legend(frameon=False)
