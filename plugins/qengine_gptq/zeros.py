"""What stored zeros mean.

Two conventions: v1 (`checkpoint_format` "gptq", the default) stores zero - 1, v2 ("gptq_v2") stores the zero.
Symmetric weights have one zero everywhere, 2**(bits - 1), so their words tell which convention a file really has;
optimum 2.3 is known to write v1 zeros under the name gptq_v2.

A v1 zero of 0 is stored differently by each writer. GPTQModel (2, 4 and 8 bits) subtracts 1 from every field of a whole
word, so that a field borrows from the next one; only adding the same word gives the zeros back. Others subtract by
field; AutoGPTQ then spills ones over the rest of the word, which nobody can read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from qengine_gptq.layout import unpack_columns

Stored = Literal["gptq", "gptq_v2"]

LEAST_CODES = 4096
"""A mean over fewer codes says nothing."""
MOST_CODES, MOST_ZEROS = 1 << 20, 1 << 11
"""A mean over about as many is sure enough: of more, a part of the outputs is taken."""
CENTRED = 0.3
"""Scale steps that the mean weight of a linear may be off 0 at most."""
SURE = 0.1
"""Standard error of the zeros' mean, in steps, above which it says nothing (few zeros, or zeros that are noise)."""


@dataclass(frozen=True)
class ZeroRule:
    """How a module's zeros are stored, as its config states it.

    symmetric   None where the config doesn't say
    by_word     v1 zeros were subtracted from whole words (GPTQModel)
    """

    stored: Stored = "gptq"
    symmetric: bool | None = True
    by_word: bool = False


def read_zeros(qzeros: torch.Tensor, bits: int, count: int, rule: ZeroRule) -> tuple[torch.Tensor | None, str | None]:
    """qzeros int32 [G, words] -> (zeros uint8 [G, count], or None where all are 2**(bits - 1); a note where the file
    contradicts `rule` or is ambiguous)."""
    fields = unpack_columns(qzeros, bits, count)
    middle = 1 << (bits - 1)
    first = int(fields[0, 0])
    if first in (middle - 1, middle) and bool((fields == first).all()):
        really: Stored = "gptq_v2" if first == middle else "gptq"
        if really == rule.stored:
            return None, None
        return None, (
            f"checkpoint_format is {rule.stored}, but every stored zero is {first}, as {really} stores the zeros of "
            f"symmetric weights: read as {really}"
        )
    note = None
    if rule.symmetric:
        note = f"sym is true, but the zeros are not all {middle}: they are read as stored ({rule.stored})"
    if rule.stored == "gptq_v2":
        return fields, note
    if rule.by_word and 32 % bits == 0:
        return unpack_columns(add_one_to_fields(qzeros, bits), bits, count), note
    zeros = (fields + 1) & ((1 << bits) - 1)
    if not rule.by_word and bool((zeros == 0).any()):
        note = "zeros of 0 in a v1 file without GPTQModel's mark: AutoGPTQ spoils the zeros that follow one in a word"
    return zeros, note


def contradiction(codes: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, stored: Stored) -> str | None:
    """Asymmetric zeros can't be checked one by one, but a linear's weights average to nearly nothing, and read by the
    other convention every one is a scale step off. codes uint8 [K, N] sorted by group, zeros uint8 [G, N] as read ->
    what is wrong where the average is about that step.

    In up to 4 bits real linears average 0.04 steps at most, far from CENTRED; 8-bit steps are too small to tell.
    """
    if bits > 4 or codes.numel() < LEAST_CODES:
        return None
    step = max(1, min(codes.numel() // MOST_CODES, zeros.numel() // MOST_ZEROS))
    codes, zeros = codes[:, ::step], zeros[:, ::step]
    if float(zeros.float().std()) > SURE * zeros.numel() ** 0.5:
        return None
    sizes = torch.tensor([len(rows) for rows in codes.split(group_size)], device=zeros.device)
    total = int(codes.sum(dtype=torch.int64)) - int((zeros.sum(1, dtype=torch.int64) * sizes).sum())
    mean = total / codes.numel()
    other = "gptq_v2" if stored == "gptq" else "gptq"
    if abs(mean + (1.0 if stored == "gptq" else -1.0)) > CENTRED:
        return None
    return (
        f"qzeros read as {stored}, which checkpoint_format says (its default is gptq), put the mean weight one scale "
        f"step off 0, read as {other} at 0; a quantization_config with checkpoint_format {other} would work"
    )


def add_one_to_fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Every word plus 1 in each field, modulo 2**32: carries undo GPTQModel's borrows."""
    ones = sum(1 << shift for shift in range(0, 32, bits))
    total = ((words.to(torch.int64) & 0xFFFFFFFF) + ones) & 0xFFFFFFFF
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
