"""AWQ's bits (case C02) and what they mean, against a decoder written here from the format's description."""

import numpy as np
import pytest
import torch

from qengine.plugin import LinearSpec
from qengine_awq.backend import AwqScheme
from qengine_awq.layout import pack, unpack

COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ_WORD, GPTQ_WORD = 0x75316420, 0x76543210


def decode(tensors: dict[str, torch.Tensor], group: int, order: list[int] = COLUMN_OF_NIBBLE) -> np.ndarray:
    """float64 [N, K], one word at a time."""

    def codes(words: torch.Tensor) -> np.ndarray:
        w = words.numpy().view(np.uint32)
        out = np.zeros((w.shape[0], w.shape[1] * 8))
        for s, column in enumerate(order):
            out[:, column::8] = (w >> np.uint32(4 * s)) & np.uint32(15)
        return out

    q, scales = codes(tensors["qweight"]), tensors["scales"].double().numpy()
    z = codes(tensors["qzeros"]) if "qzeros" in tensors else np.full(scales.shape, 8.0)
    rows = np.minimum(np.arange(q.shape[0]) // (q.shape[0] if group == -1 else group), len(scales) - 1)
    return ((q - z[rows]) * scales[rows]).T


def random_tensors(k: int, n: int, group: int, zero_point: bool = True) -> dict[str, torch.Tensor]:
    groups = 1 if group == -1 else -(-k // group)
    words = lambda rows: torch.randint(-(2**31), 2**31, (rows, n // 8), dtype=torch.int64).to(torch.int32)  # noqa: E731
    out = {"qweight": words(k), "scales": (torch.rand(groups, n) * 0.02 + 0.005).half()}
    return out | ({"qzeros": words(groups)} if zero_point else {})


def as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def test_nibble_order_is_awqs_and_not_gptqs() -> None:
    words = torch.tensor([[as_int32(AWQ_WORD)]], dtype=torch.int32)
    assert unpack(words).tolist() == [list(range(8))]
    wrong = unpack(torch.tensor([[as_int32(GPTQ_WORD)]], dtype=torch.int32))
    assert wrong.tolist() != [list(range(8))]
    assert torch.equal(pack(torch.arange(8, dtype=torch.uint8)[None]), words)


def test_one_linear_of_the_case() -> None:
    """64 -> 8, group 64, zeros 3 as stored (no plus one)."""
    qweight = torch.zeros(64, 1, dtype=torch.int32)
    qweight[0, 0] = as_int32(AWQ_WORD)
    tensors = {
        "qweight": qweight,
        "qzeros": torch.full((1, 1), as_int32(0x33333333), dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    w = AwqScheme(64, True).dequantize(LinearSpec("m", 64, 8), tensors)
    assert w.shape == (8, 64) and w.dtype is torch.float32
    assert w[:, 0].tolist() == [(c - 3) * 0.5 for c in range(8)]
    assert w[:, 1].tolist() == [-1.5] * 8


def test_pack_and_unpack_are_inverse() -> None:
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    words = torch.randint(-(2**31), 2**31, (3, 4), dtype=torch.int64).to(torch.int32)
    assert torch.equal(pack(unpack(words)), words)


@pytest.mark.parametrize("k, n, group", [(64, 16, 32), (128, 8, 128), (72, 40, -1), (96, 24, 64), (200, 16, 32)])
@pytest.mark.parametrize("zero_point", [True, False])
def test_dequantize(k: int, n: int, group: int, zero_point: bool) -> None:
    torch.manual_seed(1)
    tensors = random_tensors(k, n, group, zero_point)
    got = AwqScheme(group, zero_point).dequantize(LinearSpec("m", k, n), tensors)
    np.testing.assert_allclose(got.numpy(), decode(tensors, group), rtol=1e-6)
    control = decode(tensors, group, list(range(8)))
    assert np.abs(got.numpy() - control).max() > 0.01
