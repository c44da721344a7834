"""Checks of what a KV dtype says about itself, its layout, and its rows in plain torch."""

from __future__ import annotations

from typing import Literal

import torch

from qengine.conformance.kit import NotApplicable, Registry, need
from qengine.conformance.kv_subject import BLOCK_SIZES, SMALL, SPECS, KVSubject, vectors
from qengine.conformance.weight_format import DTYPES, devices
from qengine.plugin import AttentionSpec, KVDtype, SideLayout
from qengine.plugin.version import accepts_contract, written_for
from qengine_kernels.testing import relative_error

KV_FORMAT = Registry()
SIDES: tuple[Literal["k", "v"], ...] = ("k", "v")
WORST_ROUNDING = 0.3
"""Relative error of vectors that are stored and read again; 4 bits with a scale a vector make 0.1 to 0.2."""
GRANULARITIES = {"none", "tensor", "head"}


@KV_FORMAT.add("contract")
def contract(subject: KVSubject) -> None:
    """A name, the contract version as a literal, scales that fit together with the largest value."""
    plugin = subject.plugin
    need(isinstance(getattr(plugin, "name", None), str) and bool(plugin.name), "`name` is missing")
    stated = getattr(plugin, "contract", None)
    need(accepts_contract(stated), f"`contract` states {written_for(stated)}")
    granularity = set(plugin.scale_granularity)
    need(bool(granularity) and granularity <= GRANULARITIES, f"scale_granularity is {plugin.scale_granularity}")
    takes = bool(granularity - {"none"})
    most = plugin.max_value
    need(takes == (most is not None), f"scale_granularity {plugin.scale_granularity} with max_value {most}")
    need(most is None or 0 < most < float("inf"), f"max_value is {most}; need: a finite positive number")


@KV_FORMAT.add("capability")
def capability(subject: KVSubject) -> None:
    """Answers for every chip, dtype and head shape, without a GPU, the same each time; refusals say why."""
    claimed = 0
    for spec in SPECS:
        for info in devices():
            for dtype in DTYPES:
                for side in SIDES:
                    own = subject.plugin(spec, side, dtype)
                    answer = own.capability(info)
                    name = f"head_dim {spec.head_dim} on {info.name} in {str(dtype).removeprefix('torch.')}"
                    need(own.capability(info) == answer, f"{name}: capability changes between calls")
                    need(answer.kind == "native" or bool(answer.reason), f"{name}: {answer.kind} without a reason")
                    need(not (info.sm == 75 and dtype is torch.bfloat16 and answer), f"{name}: sm_75 has no bfloat16")
                    claimed += bool(answer)
    need(claimed > 0, "refused on every chip, dtype and head shape")


@KV_FORMAT.add("layout")
def layout(subject: KVSubject) -> None:
    """Rows lie apart, inside the bytes that are stated, and are what `encode` makes."""
    for spec in SPECS:
        for block_size in BLOCK_SIZES:
            for dtype in DTYPES:
                for side in SIDES:
                    own = subject.plugin(spec, side, dtype)
                    _rows_fit(own, own.layout(block_size), spec, block_size)
                    need(own.layout(block_size) == own.layout(block_size), "layout changes between calls")


def _rows_fit(own: KVDtype, at: SideLayout, spec: AttentionSpec, block_size: int) -> None:
    name = f"head_dim {spec.head_dim}, blocks of {block_size}, {own.side}"
    last = at.last_byte(spec, block_size)
    need(last <= at.nbytes, f"{name}: layout states {at.nbytes} bytes, its rows reach to byte {last}")
    used = block_size * spec.num_kv_heads * at.row * at.dtype.itemsize
    need(at.nbytes <= 2 * used, f"{name}: layout states {at.nbytes} bytes, its rows take {used}")
    tokens, heads = torch.arange(block_size)[:, None, None], torch.arange(spec.num_kv_heads)[:, None]
    elements = tokens * at.token_stride + heads * at.head_stride + torch.arange(at.row)
    need(len(elements.unique()) == elements.numel(), f"{name}: rows overlap")
    rows = own.encode(torch.zeros(3, spec.num_kv_heads, spec.head_dim))
    rows = rows.to(at.dtype) if at.dtype.is_floating_point else rows
    need(tuple(rows.shape) == (3, spec.num_kv_heads, at.row), f"{name}: encode makes rows of {rows.shape[-1]}, "
         f"layout states {at.row}")  # fmt: skip
    need(rows.dtype is at.dtype, f"{name}: encode makes {rows.dtype}, layout states {at.dtype}")


@KV_FORMAT.add("round trip")
def round_trip(subject: KVSubject) -> None:
    """decode(encode(x)) is near x, zeros stay zeros, twice is the same, and the input is left alone."""
    for spec, _, dtype, _ in subject.runs(*SPECS):
        for side in SIDES:
            own = subject.plugin(spec, side, dtype)
            x = vectors(spec, 33, 1)[1 if side == "k" else 2]
            x[5] = 0
            before = x.clone()
            rows = stored(own, x)
            back = own.decode(rows, torch.float32)
            name = f"head_dim {spec.head_dim}, {side}"
            need(back.dtype is torch.float32 and back.shape == x.shape, f"{name}: decode gives {back.dtype} "
                 f"{tuple(back.shape)}")  # fmt: skip
            need(torch.equal(x, before), f"{name}: encode changes its input")
            error = relative_error(back, x)
            need(error <= WORST_ROUNDING, f"{name}: decode(encode(x)) is off by {error:.2g} of x")
            need(not back[5].any(), f"{name}: a vector of zeros comes back as {float(back[5].abs().max()):.3g}")
            need(torch.equal(bits(stored(own, x)), bits(rows)), f"{name}: encode gives other bits the second time")


def stored(own: KVDtype, x: torch.Tensor) -> torch.Tensor:
    """Rows as a store makes them: `encode`, cast to the layout's dtype."""
    return own.encode(x).to(own.layout(16).dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@KV_FORMAT.add("extremes")
def extremes(subject: KVSubject) -> None:
    """Huge values saturate or are no number; a vector that is not finite leaves all others as they are."""
    own = subject.plugin(SMALL, "k", torch.float32)
    x = vectors(SMALL, 8, 2)[1]
    want = bits(stored(own, x))
    for value in (float("nan"), float("inf"), float("-inf"), 1e30):
        bad = x.clone()
        bad[3, 1, 7] = value
        rows = stored(own, bad)
        others = torch.ones(8, SMALL.num_kv_heads, dtype=torch.bool)
        others[3, 1] = False
        need(torch.equal(bits(rows)[others], want[others]), f"a {value} in one vector changes what others store")
        got = float(own.decode(rows, torch.float32)[3, 1, 7])
        saturated = got != got or (got * value > 0 and abs(got) <= abs(value) * 1.001)
        need(value != value or saturated, f"{value} comes back as {got:.3g}")


@KV_FORMAT.add("calibration")
def calibration(subject: KVSubject) -> None:
    """Scales: amax / max_value keeps every value in range, and multiplies to dequantise."""
    if subject.plugin.max_value is None:
        raise NotApplicable("the format takes no scales from outside")
    own = subject.plugin(SMALL, "k", torch.float32)
    for size in (1e-3, 1.0, 3e4):
        x = vectors(SMALL, 33, 3)[1] * size
        scale = x.abs().max() / subject.plugin.max_value
        back = own.decode(stored(own, x / scale), torch.float32) * scale
        error = relative_error(back, x)
        need(error <= WORST_ROUNDING, f"values up to {float(x.abs().max()):.3g} with scale amax / max_value: off by "
             f"{error:.2g}")  # fmt: skip
        top = relative_error(back.abs().max(), x.abs().max())
        need(top <= 0.1, f"the largest value is off by {top:.2g} with scale amax / max_value")
