"""All 256 codes of both 8-bit floats, both ways, against the format's definition worked out in float64 (case C13)."""

import math

import numpy as np
import pytest
import torch

from qengine.plugin import AttentionSpec
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV, Fp8KV

E4M3, E5M2 = (plugin(AttentionSpec(1, 1, 16, 1.0), "k", torch.float32) for plugin in (Fp8E4M3KV, Fp8E5M2KV))
FORMATS = {"e4m3": (E4M3, 3, 7, 448.0), "e5m2": (E5M2, 2, 15, 57344.0)}


def values_of(name: str) -> np.ndarray:
    """float64 [256] from the definition: sign, exponent with bias, fraction, subnormals, NaN and infinity."""
    _, fraction_bits, bias, _ = FORMATS[name]
    out = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> fraction_bits
        fraction = code & ((1 << fraction_bits) - 1)
        if exponent == 0:
            size = math.ldexp(fraction, 1 - bias - fraction_bits)
        else:
            size = math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)
        if name == "e4m3" and code & 0x7F == 0x7F:
            size = math.nan
        if name == "e5m2" and exponent == 31:
            size = math.inf if fraction == 0 else math.nan
        out[code] = sign * size
    return out


def nearest_codes(name: str, x: np.ndarray) -> np.ndarray:
    """Saturating, to nearest, ties to the even code: found by search among the finite values."""
    table = values_of(name)
    largest = FORMATS[name][3]
    sizes = table[:128][np.isfinite(table[:128])]
    size = np.minimum(np.abs(x), largest)
    above = np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1)
    below = above - 1
    down, up = size - sizes[below], sizes[above] - size
    code = np.where(down < up, below, np.where(up < down, above, np.where(below % 2 == 0, below, above)))
    return np.where(np.isnan(x), 0x7F, code + np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def hard_inputs(name: str) -> torch.Tensor:
    """Every value, every midpoint, their float32 neighbours, and a wide random spread, both signs."""
    table = values_of(name)
    sizes = table[:128][np.isfinite(table[:128])]
    points = np.concatenate([sizes, (sizes[1:] + sizes[:-1]) / 2, [1e30, 1e-30, np.inf, 0.0]]).astype(np.float32)
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))
    rng = np.random.default_rng(0)
    spread = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-20, 18, 50_000)).astype(np.float32)
    positive = np.concatenate([points, up, down, np.abs(spread)])
    return torch.from_numpy(np.concatenate([positive, -positive]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decode_of_every_code(name: str, dtype: torch.dtype) -> None:
    plugin: Fp8KV = FORMATS[name][0]
    codes = torch.arange(256, dtype=torch.uint8)
    want = values_of(name)
    for b in (codes.view(2, 128), codes.flip(0).view(4, 64), codes[:255]):  # pairs, other pairs, odd length
        got = plugin.decode(b, dtype)
        assert got.dtype is dtype and got.shape == b.shape
        np.testing.assert_array_equal(got.double().numpy(), want[b.numpy()])
    signs = torch.signbit(plugin.decode(codes.view(2, 128), dtype)).flatten()
    assert signs[0x80] and not signs[0]


@pytest.mark.parametrize("name", FORMATS)
def test_encode_of_every_code(name: str) -> None:
    table = values_of(name)
    finite = np.isfinite(table)
    got = FORMATS[name][0].encode(torch.from_numpy(table[finite].astype(np.float32)))
    np.testing.assert_array_equal(got.numpy(), np.arange(256, dtype=np.uint8)[finite])


@pytest.mark.parametrize("name", FORMATS)
def test_encode_float32(name: str) -> None:
    x = hard_inputs(name)
    np.testing.assert_array_equal(FORMATS[name][0].encode(x).numpy(), nearest_codes(name, x.double().numpy()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_encode_every_16_bit_value(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    np.testing.assert_array_equal(FORMATS[name][0].encode(x).numpy(), nearest_codes(name, x.double().numpy()))


E4M3_CASES = [
    (448.0, 448.0), (464.0, 448.0), (465.0, 448.0), (1000.0, 448.0), (math.inf, 448.0), (18.0, 18.0), (17.0, 16.0),
    (19.0, 20.0), (2.0**-10, 0.0), (1.5 * 2.0**-10, 2.0**-9),
]  # fmt: skip
E5M2_CASES = [
    (57344.0, 57344.0), (61440.0, 57344.0), (65504.0, 57344.0), (math.inf, 57344.0), (18.0, 16.0), (19.0, 20.0),
    (2.0**-17, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_named_values(name: str, dtype: torch.dtype) -> None:
    plugin = FORMATS[name][0]
    for x, want in E4M3_CASES if name == "e4m3" else E5M2_CASES:
        given = torch.tensor([x, -x], dtype=torch.float32).to(dtype)
        if math.isfinite(x) and not torch.equal(given.double(), torch.tensor([x, -x], dtype=torch.float64)):
            continue  # this dtype does not hold x; its own values are all tested above
        assert plugin.decode(plugin.encode(given), torch.float32).tolist() == [want, -want]
    assert plugin.encode(torch.tensor([-0.0, 0.0], dtype=dtype)).tolist() == [0x80, 0]
    assert plugin.encode(torch.tensor([math.nan, -math.nan], dtype=dtype)).tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("control", ["not saturating", "truncating", "ties away"])
def test_controls_fail_on_these_inputs(name: str, control: str) -> None:
    """Three wrong encoders, among them what some versions of torch's own cast do, must differ from the table."""
    plugin = FORMATS[name][0]
    x = hard_inputs(name)
    want = nearest_codes(name, x.double().numpy())
    if control == "not saturating":
        codes = plugin.encode(x)
        codes[x.abs() > plugin.max_value * (1 + 2.0**-4)] = 0x7F
    elif control == "truncating":
        codes = plugin.encode(x)
        codes = codes - (plugin.decode(codes, torch.float32).abs() > x.abs()).to(torch.uint8)
    else:
        codes = plugin.encode(x * (1 + 2.0**-20))
    assert (codes.numpy() != want).any()
    np.testing.assert_array_equal(plugin.encode(x).numpy(), want)


@pytest.mark.parametrize("name", FORMATS)
def test_largest_value_is_the_formats(name: str) -> None:
    plugin, *_, largest = FORMATS[name]
    assert plugin.max_value == largest == np.nanmax(np.where(np.isfinite(values_of(name)), values_of(name), 0))
