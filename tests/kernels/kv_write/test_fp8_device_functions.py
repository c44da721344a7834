"""e4m3 and e5m2 device functions against tables computed here in float64 from the formats' definitions (CASES C13)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from qengine_kernels.fp8.device import (
    e4m3_decode,
    e4m3_encode,
    e4m3_pairs,
    e5m2_decode,
    e5m2_encode,
    e5m2_pairs,
)
from qengine_kernels.testing import readable_id

INF, NAN = math.inf, math.nan
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
NATIVE = pytest.mark.parametrize(
    "native", [pytest.param(False, id="integer"), pytest.param(True, marks=pytest.mark.gpu, id="native")]
)
FORMATS = pytest.mark.parametrize("name", ["e4m3", "e5m2"])
FUNCTIONS = {"e4m3": (e4m3_encode, e4m3_decode), "e5m2": (e5m2_encode, e5m2_decode)}
PAIRS = {"e4m3": e4m3_pairs, "e5m2": e5m2_pairs}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


@triton.jit
def _apply(p_x, p_out, N: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, NATIVE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < N, other=0)
    if b_x.dtype.is_floating():
        b_x = b_x.to(tl.float32)
    tl.store(p_out + o, FUNCTION(b_x, NATIVE).to(p_out.dtype.element_ty), mask=o < N)


def run(function: Any, x: torch.Tensor, dtype: torch.dtype, native: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _apply[(triton.cdiv(x.numel(), 1024),)](x, out, N=x.numel(), BLOCK=1024, FUNCTION=function, NATIVE=native)
    return out.cpu()


def table(name: str) -> torch.Tensor:
    """float64 [256]: the value of every code, from sign, exponent and fraction."""
    fraction_bits, bias = (3, 7) if name == "e4m3" else (2, 15)
    values = []
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> fraction_bits, (code & 0x7F) % (1 << fraction_bits)
        part = fraction / (1 << fraction_bits)
        value = part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias)
        if name == "e4m3" and (code & 0x7F) == 0x7F:
            value = NAN
        if name == "e5m2" and exponent == 31:
            value = INF if fraction == 0 else NAN
        values.append(-value if code & 0x80 else value)
    return torch.tensor(values, dtype=torch.float64)


def nearest(name: str, x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest finite value, ties to the even code, saturating; float64 search over the table."""
    values = table(name)
    positive = values[:128][torch.isfinite(values[:128])]
    size = x.double().abs().clamp_max(LARGEST[name])
    upper = torch.searchsorted(positive, size).clamp_max(len(positive) - 1)
    lower = (upper - 1).clamp_min(0)
    below, above = size - positive[lower], positive[upper] - size
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    code = torch.where(take_upper, upper, lower) | (torch.signbit(x).long() << 7)
    return torch.where(torch.isnan(x), 0x7F, code).to(torch.uint8)


def hard_inputs(name: str) -> torch.Tensor:
    """Every code's value, every midpoint between neighbours with both float32 neighbours of it, and random values."""
    values = table(name)[:128]
    values = values[torch.isfinite(values)].float()
    middle = (values[1:] + values[:-1]) / 2
    around = [torch.nextafter(middle, torch.tensor(side)) for side in (INF, -INF)]
    spread = torch.exp2(torch.rand(20000) * 48 - 28) * torch.randn(20000).sign()
    special = torch.tensor([0.0, 1e-45, 1e-38, 3e38, INF, NAN, 464.0, 465.0, 1000.0, 61440.0, 65504.0])
    positive = torch.cat([values, middle, *around, special])
    return torch.cat([positive, -positive, spread])


@triton.jit
def _apply_pairs(p_x, p_low, p_high, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, MODE: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_low, b_high = FUNCTION(tl.load(p_x + o), MODE)
    tl.store(p_low + o, b_low)
    tl.store(p_high + o, b_high)


@pytest.mark.parametrize(
    "mode", [0, pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu)]
)
@FORMATS
def test_decodes_all_pairs(name: str, mode: int, device: torch.device) -> None:
    """All 65536 pairs of codes, NaN and infinity among them: low bytes and high bytes, exact in float16."""
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16).to(device)
    low, high = (torch.full((65536,), 7.0, dtype=torch.float16, device=device) for _ in range(2))
    _apply_pairs[(16,)](words, low, high, BLOCK=4096, FUNCTION=PAIRS[name], MODE=mode)
    values = table(name).half()
    assert torch.equal(low.cpu().view(256, 256).nan_to_num(999), values.nan_to_num(999).expand(256, 256))
    assert torch.equal(high.cpu().view(256, 256).nan_to_num(999), values.nan_to_num(999)[:, None].expand(256, 256))


@NATIVE
@FORMATS
def test_decodes_all_codes(name: str, native: bool, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    got = run(FUNCTIONS[name][1], codes, torch.float32, native).double()
    want = table(name)
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert math.copysign(1, got[0x80].item()) == -1


@NATIVE
@FORMATS
def test_encodes_to_nearest_even_saturating(name: str, native: bool, device: torch.device) -> None:
    x = hard_inputs(name)
    got, want = run(FUNCTIONS[name][0], x.to(device), torch.uint8, native), nearest(name, x)
    wrong = (got != want).nonzero().flatten()[:5].tolist()
    assert not wrong, [(x[i].item(), hex(got[i]), hex(want[i])) for i in wrong]


@NATIVE
@FORMATS
def test_every_code_survives_a_round_trip(name: str, native: bool, device: torch.device) -> None:
    encode, decode = FUNCTIONS[name]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    finite = torch.isfinite(table(name))
    values = run(decode, codes.to(device), torch.float32, native)
    assert torch.equal(run(encode, values.to(device), torch.uint8, native)[finite], codes[finite])


STATED = {
    "e4m3": [(448, 448), (464, 448), (465, 448), (1000, 448), (INF, 448), (-INF, -448), (18, 18), (17, 16)],
    "e5m2": [(57344, 57344), (61440, 57344), (65504, 57344), (INF, 57344), (-INF, -57344), (18, 16), (19, 20)],
}
STATED["e4m3"] += [(19, 20), (2**-10, 0), (1.5 * 2**-10, 2**-9)]
STATED["e5m2"] += [(2**-17, 0)]


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=readable_id)
@FORMATS
def test_stated_values(name: str, dtype: torch.dtype, native: bool, device: torch.device) -> None:
    """The values of C13, where the input dtype holds them."""
    x, want = (torch.tensor(column, dtype=torch.float64) for column in zip(*STATED[name], strict=True))
    held = x.to(dtype).double() == x
    codes = run(FUNCTIONS[name][0], x.to(dtype).to(device), torch.uint8, native)
    got = table(name)[codes.long()]
    assert torch.equal(got[held], want[held])
    ends = torch.tensor([-0.0, NAN, -NAN], dtype=dtype, device=device)
    assert run(FUNCTIONS[name][0], ends, torch.uint8, native).tolist() == [0x80, 0x7F, 0x7F]


@FORMATS
def test_wrong_roundings_are_told_apart(name: str, device: torch.device) -> None:
    """Control: a cast that overflows to NaN (as torch's did before it saturated), one that truncates and one that
    rounds ties away from even all differ from the device function on the inputs above."""
    x = hard_inputs(name)
    got = run(FUNCTIONS[name][0], x.to(device), torch.uint8, False)
    values = table(name)
    overflowing = torch.where(x.abs() > 1.04 * LARGEST[name], 0x7F, nearest(name, x)).to(torch.uint8)
    beyond = values[got.long()].abs() > x.double().abs()
    truncating = torch.where(beyond & torch.isfinite(x), got - 1, got)
    ties_away = nearest(name, torch.nextafter(x, x * 2))
    for wrong in (overflowing, truncating, ties_away):
        assert not torch.equal(got, wrong)
