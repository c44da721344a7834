"""The two conventions of stored zeros (case C01), the cross-check on symmetric weights, and zeros of 0."""

from __future__ import annotations

import pytest
import torch

from gptq_files import Style, pack_outputs, quantize, store_zeros
from qengine.plugin import LinearShard, LinearSpec
from qengine_gptq.backend import GptqScheme
from qengine_gptq.shards import decode
from qengine_gptq.zeros import ZeroRule, contradiction, read_zeros

SPEC = LinearSpec("m", 64, 32)
V1_WORDS = {2: 0x55555555, 3: 0xDB6DB6DB, 4: 0x77777777, 8: 0x7F7F7F7F}
V2_WORDS = {2: 0xAAAAAAAA, 3: 0x24924924, 4: 0x88888888, 8: 0x80808080}


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def twins() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """C01: the same weights with zeros as v1 and as v2 stores them."""
    tensors, meaning = quantize(torch.randn(32, 64), Style(4, 32))
    a = tensors | {"qzeros": torch.full((2, 4), signed(0x77777777), dtype=torch.int32)}
    b = tensors | {"qzeros": torch.full((2, 4), signed(0x88888888), dtype=torch.int32)}
    return a, b, meaning


def test_twins_mean_the_same() -> None:
    a, b, meaning = twins()
    one = GptqScheme(4, 32, ZeroRule("gptq")).dequantize(SPEC, a)
    two = GptqScheme(4, 32, ZeroRule("gptq_v2")).dequantize(SPEC, b)
    assert torch.equal(one, meaning) and torch.equal(two, meaning)


def test_the_wrong_convention_is_one_scale_off() -> None:
    """The control of C01: code 8 with scale 0.5 becomes -0.5. So few asymmetric zeros can't be cross-checked, so that
    file shows it; in a symmetric one the reading is corrected and the contradiction reported."""
    zeros = torch.full((2, 32), 8)
    zeros[0, 0] = 3
    tensors = {
        "qweight": torch.full((8, 32), signed(0x88888888), dtype=torch.int32),
        "qzeros": pack_outputs(zeros, 4),
        "scales": torch.full((2, 32), 0.5, dtype=torch.float16),
    }
    right = GptqScheme(4, 32, ZeroRule("gptq_v2", False)).dequantize(SPEC, tensors)
    wrong = GptqScheme(4, 32, ZeroRule("gptq", False)).dequantize(SPEC, tensors)
    assert right[1].eq(0).all() and wrong[1].eq(-0.5).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, None, False])
def test_symmetric_zeros_tell_their_convention(bits: int, symmetric: bool | None) -> None:
    for stored, word in (("gptq", V1_WORDS[bits]), ("gptq_v2", V2_WORDS[bits])):
        count = 32 // bits
        words = torch.full((2, 1), signed(word), dtype=torch.int32)
        assert read_zeros(words, bits, count, ZeroRule(stored, symmetric)) == (None, None)  # type: ignore[arg-type]
        other = "gptq_v2" if stored == "gptq" else "gptq"
        zeros, note = read_zeros(words, bits, count, ZeroRule(other, symmetric))  # type: ignore[arg-type]
        assert zeros is None
        assert note is not None and f"checkpoint_format is {other}" in note and f"read as {stored}" in note


def test_one_odd_zero_is_no_symmetric_file() -> None:
    zeros = torch.full((2, 32), 7)
    zeros[1, 5] = 6
    read, note = read_zeros(pack_outputs(zeros, 4), 4, 32, ZeroRule("gptq_v2", False))
    assert note is None and read is not None and torch.equal(read.long(), zeros)
    read, note = read_zeros(pack_outputs(zeros, 4), 4, 32, ZeroRule("gptq_v2", True))
    assert note is not None and "sym is true" in note and read is not None and torch.equal(read.long(), zeros)


def test_padding_of_the_last_word_is_no_zero() -> None:
    """12 outputs take one and a half words; what fills the rest says nothing."""
    assert read_zeros(pack_outputs(torch.full((2, 12), 7), 4), 4, 12, ZeroRule("gptq")) == (None, None)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodel_borrows_across_a_word(bits: int) -> None:
    """FORMATS: zeros 3, 0, 5, ... are stored by whole words, so that a 0 borrows from its neighbour."""
    generator = torch.Generator().manual_seed(bits)
    zeros = torch.randint(0, 1 << bits, (3, 64), generator=generator)
    zeros[0, :3] = torch.tensor([3, 0, 5]) % (1 << bits)
    style = Style(bits, by_word=True)
    words = store_zeros(zeros, style)
    read, note = read_zeros(words, bits, 64, ZeroRule("gptq", False, by_word=True))
    assert note is None and read is not None and torch.equal(read.long(), zeros)
    by_field, _ = read_zeros(words, bits, 64, ZeroRule("gptq", False))
    assert by_field is not None and not torch.equal(by_field.long(), zeros), "control: field by field is wrong"


def test_the_documented_words() -> None:
    zeros = torch.tensor([[3, 0, 5, 6, 7, 8, 9, 10]])
    words = store_zeros(zeros, Style(4, by_word=True))
    assert words.item() == signed(0x987653F2)
    read, _ = read_zeros(words, 4, 8, ZeroRule("gptq", False, True))
    assert read is not None and read.tolist() == zeros.tolist()
    by_field, _ = read_zeros(words, 4, 8, ZeroRule("gptq", False, False))
    assert by_field is not None and by_field[0, :3].tolist() == [3, 0, 4]
    spoiled = torch.tensor([[signed(0xFFFFFFF2)]], dtype=torch.int32)
    _, note = read_zeros(spoiled, 4, 8, ZeroRule("gptq", False))
    assert note is not None and "AutoGPTQ spoils" in note


def decoded_notes(tensors: dict[str, torch.Tensor], shape: tuple[int, int], bits: int, read_as: str) -> list[str]:
    """What is said of asymmetric tensors of a weight of `shape`, in groups of 32."""
    n, k = shape
    shard = LinearShard(LinearSpec("m", k, n), dict(tensors))
    rule = ZeroRule(read_as, False)  # type: ignore[arg-type]
    return [text for _, text in decode(shard, bits, 32, rule, False, torch.device("cpu"))[1]]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_the_wrong_convention_of_asymmetric_zeros_is_refused(bits: int, stored: str) -> None:
    """Shown by the weights' mean; steps of 8 bits are too small for that."""
    tensors, _ = quantize(torch.randn(128, 112), Style(bits, 32, False, stored, by_word=bits != 3))
    other = "gptq" if stored == "gptq_v2" else "gptq_v2"
    decoded_notes(tensors, (128, 112), bits, stored)
    if bits == 8:
        decoded_notes(tensors, (128, 112), bits, other)
        return
    with pytest.raises(ValueError, match=rf"^m: qzeros read as {other}, .* checkpoint_format {stored} would work$"):
        decoded_notes(tensors, (128, 112), bits, other)


@pytest.mark.parametrize("steps", [-2.0, -0.5, 1.0])
def test_weights_with_a_mean_are_no_wrong_convention(steps: float) -> None:
    """What no mix-up of conventions explains is let through: v1 zeros read as v2 are off to the other side."""
    tensors, _ = quantize(torch.rand(128, 112) - 0.5 + steps / 15, Style(4, 32, False))
    assert decoded_notes(tensors, (128, 112), 4, "gptq") == []


def test_few_codes_and_zeros_that_are_noise_say_nothing() -> None:
    few, _ = quantize(torch.randn(32, 64), Style(4, 32, False, "gptq_v2"))
    assert decoded_notes(few, (32, 64), 4, "gptq") == []
    noise, _ = quantize(torch.rand(64, 96) - 0.5, Style(4, 32, False))
    noise["qzeros"] = pack_outputs((torch.arange(192) % 14).reshape(3, 64), 4)  # on average a step lower than the codes
    assert decoded_notes(noise, (64, 96), 4, "gptq_v2") == []


@pytest.mark.parametrize("group", [32, 1024])
def test_a_part_of_many_outputs_is_as_telling(group: int) -> None:
    codes = torch.randint(0, 15, (1024, 4096), dtype=torch.uint8)  # 7 on average
    zeros = torch.randint(6, 9, (1024 // group, 4096), dtype=torch.uint8)  # 7 on average too
    assert contradiction(codes, zeros, 4, group, "gptq") is None
    assert contradiction(codes, zeros + 1, 4, group, "gptq") is not None
    assert contradiction(codes, zeros + 1, 4, group, "gptq_v2") is None


def test_gptqmodel_stores_three_bits_by_field() -> None:
    zeros = torch.arange(32)[None] % 8
    words = store_zeros(zeros, Style(3))
    read, note = read_zeros(words, 3, 32, ZeroRule("gptq", False, by_word=True))
    assert note is None and read is not None and torch.equal(read.long(), zeros)
