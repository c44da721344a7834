"""GPTQ's bits (cases C02 and C06) and what they mean, against a decoder written here from the format's description."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptq_files import Style, pack_inputs, pack_outputs, quantize
from qengine.plugin import LinearSpec
from qengine_gptq.backend import GptqScheme
from qengine_gptq.layout import unpack, unpack_columns, words_for
from qengine_gptq.zeros import ZeroRule

AWQ_WORD, GPTQ_WORD = 0x75316420, 0x76543210


def bits_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[W, N] -> [count, N], one code at a time out of one big number a column."""
    out = np.zeros((count, words.shape[1]), dtype=np.int64)
    for column in range(words.shape[1]):
        number = sum(int(w) << (32 * i) for i, w in enumerate(words[:, column].view(np.uint32)))
        for i in range(count):
            out[i, column] = (number >> (bits * i)) % (1 << bits)
    return out


def test_nibble_order_is_gptqs_and_not_awqs() -> None:
    """C02: codes 0..7 of rows 0..7 are the word 0x76543210; AWQ's word for columns 0..7 is another."""
    words = torch.tensor([[GPTQ_WORD] * 8] + [[0] * 8] * 7, dtype=torch.int32)
    codes = unpack(words, 4, 64)
    assert codes.shape == (64, 8)
    assert codes[:8].t().tolist() == [list(range(8))] * 8 and not codes[8:].any()
    wrong = unpack(torch.tensor([[AWQ_WORD]], dtype=torch.int32), 4, 8)
    assert wrong.flatten().tolist() != list(range(8))


def test_three_bits_straddle_words() -> None:
    """C06: codes i mod 8; 10 and 21 lie in two words each."""
    words = np.array([[0x88FAC688], [0xC688FAC6], [0xFAC688FA]], dtype=np.uint32).view(np.int32)
    codes = unpack(torch.from_numpy(words), 3, 32).flatten()
    assert codes.tolist() == [i % 8 for i in range(32)]
    aligned = [(int(words.view(np.uint32)[i // 10, 0]) >> (3 * (i % 10))) & 7 for i in range(30)]
    assert aligned != codes[:30].tolist(), "control: ten codes a word is another reading"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [32, 64, 72, 96, 200])
def test_unpack_any_words(bits: int, count: int) -> None:
    torch.manual_seed(count)
    words = torch.randint(-(2**31), 2**31, (words_for(count, bits), 3)).int()
    want = bits_of(words.numpy(), bits, count)
    assert unpack(words, bits, count).tolist() == want.tolist()
    assert unpack_columns(words.t().contiguous(), bits, count).tolist() == want.T.tolist()
    codes = torch.from_numpy(want)
    assert torch.equal(unpack(pack_inputs(codes, bits), bits, count).long(), codes)
    assert torch.equal(unpack_columns(pack_outputs(codes.t(), bits), bits, count).long(), codes.t())


SHAPES = [(64, 64, 32), (96, 40, 64), (128, 32, -1), (200, 64, 32)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("k, n, group", SHAPES)
def test_dequantize(bits: int, k: int, n: int, group: int) -> None:
    """Both zero conventions, plain and shuffled groups, against the meaning that the writer states."""
    torch.manual_seed(bits)
    weight, spec = torch.randn(n, k), LinearSpec("m", k, n)
    for symmetric, stored, shuffle in ((True, "gptq", None), (False, "gptq_v2", 3), (False, "gptq", None)):
        style = Style(bits, group, symmetric, stored, shuffle=None if group == -1 else shuffle)
        tensors, meaning = quantize(weight, style)
        scheme = GptqScheme(bits, group, ZeroRule(stored, symmetric), style.shuffle is not None)  # type: ignore[arg-type]
        for need in scheme.tensors(spec):
            assert tuple(tensors[need.leaf].shape) == need.shape
        assert torch.equal(scheme.dequantize(spec, tensors), meaning)
        if not symmetric:
            other = "gptq" if stored == "gptq_v2" else "gptq_v2"
            wrong = GptqScheme(bits, group, ZeroRule(other, False), style.shuffle is not None)  # type: ignore[arg-type]
            assert not torch.allclose(wrong.dequantize(spec, tensors), meaning, atol=0.01)
