"""Packed words, bit by bit, against words that compressed-tensors itself made and an independent packer."""

from __future__ import annotations

import pytest
import torch

from compressed_tensors_files import pack_rows
from qengine_compressed_tensors.layout import packing_of, unpack, words_of

DENSE = {
    2: "e4e4e4e4 e4e4e4e4",
    3: "88fac688 c688fac6 fac688fa",
    4: "76543210 fedcba98 76543210 fedcba98",
    5: "87cab8e0 469bf88a faf048b7 e80ea6c2 cc964ed9",
    6: "dc54e1c0 6ff8c6a8 a626d434 cc17edf0 6be885a4 6522c4f7",
    7: "c2a38380 b862a919 dd49b19f bbf0d38a 6898c0bf ad97a842 b34a5c47",
    8: "150e0700 312a231c 4d463f38 69625b54 857e7770 a19a938c bdb6afa8 d9d2cbc4",
}
"""pack_to_int32 of compressed-tensors 0.19.0 for `golden(bits)`."""
PADDED = DENSE | {
    3: "08fac688 1a23eb1a 2c688fac 3e",
    5: "07cab8e0 1a6fe22a 2f048b74 3a9b0be 164ed9e8 332",
    6: "1c54e1c0 3fe31aa3 226d4346 5fb7c29 2885a4cc b13ddaf 652",
    7: "2a38380 62a919c 9b19fb8 d38add4 bfbbf0 426898c 7ad97a8 b34a5c4",
}
"""The same by compressed-tensors 0.12.2."""


def golden(bits: int) -> torch.Tensor:
    return (torch.arange(32) * (1 if bits <= 4 else 7)) % (1 << bits)


def words(text: str) -> torch.Tensor:
    return torch.tensor([[int(w, 16) for w in text.split()]], dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("bits", DENSE)
def test_words_of_the_tool(bits: int) -> None:
    want = golden(bits)
    for packing, table in (("dense", DENSE), ("padded", PADDED)):
        assert unpack(words(table[bits]), bits, 32, packing)[0].tolist() == want.tolist()
        assert torch.equal(pack_rows(want[None] - (1 << (bits - 1)), bits, packing == "padded"), words(table[bits]))
    if 32 % bits:
        assert unpack(words(PADDED[bits]), bits, 20, "dense")[0].tolist() != want[:20].tolist()
        assert unpack(words(DENSE[bits]), bits, 20, "padded")[0].tolist() != want[:20].tolist()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 31, 64, 100])
def test_any_length(bits: int, count: int) -> None:
    torch.manual_seed(bits)
    signed = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, count))
    for packing in ("dense", "padded"):
        packed = pack_rows(signed, bits, packing == "padded")
        assert packed.shape[1] == words_of(count, bits, packing)
        assert torch.equal(unpack(packed, bits, count, packing).long() - (1 << (bits - 1)), signed)


def test_which_packing_a_width_means() -> None:
    assert packing_of(24, 256, 3) == "dense"
    assert packing_of(26, 256, 3) == "padded"
    assert packing_of(25, 256, 3) is None
    assert packing_of(32, 256, 4, "padded") == "padded", "the same thing"
    assert packing_of(2, 12, 3) == "dense" and packing_of(2, 12, 3, "padded") == "padded", "the version decides"
