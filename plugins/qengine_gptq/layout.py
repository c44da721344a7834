"""The bits of GPTQ's layout (FORMAT: AutoGPTQ nn_modules/qlinear, GPTQModel nn_modules/qlinear).

Codes run along the inputs in qweight (int32 [K * bits / 32, N]) and along the outputs in qzeros (int32
[G, N * bits / 32]): a little-endian bit stream in which code i takes bits bits*i .. bits*i + bits - 1. With 2, 4 and 8
bits a word holds whole codes; with 3 bits 32 codes fill three words, and codes 10 and 21 lie in two of them.
"""

from __future__ import annotations

import torch

BITS = (2, 3, 4, 8)


def words_for(count: int, bits: int) -> int:
    """Words that `count` codes take."""
    return -(-count * bits // 32)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [words_for(count, bits), N] -> uint8 [count, N]."""
    if 32 % bits:
        return _unpack_straddling(words, bits)[:count]
    mask, slots = (1 << bits) - 1, 32 // bits
    out = torch.empty(words.shape[0], slots, words.shape[1], dtype=torch.uint8, device=words.device)
    for slot in range(slots):
        out[:, slot] = (words >> (bits * slot)) & mask
    return out.flatten(0, 1)[:count]


def _unpack_straddling(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of which 32 fill `bits` words; a missing rest of the last such run reads as zero words."""
    rest = -words.shape[0] % bits
    if rest:
        words = torch.cat([words, words.new_zeros(rest, words.shape[1])])
    runs = words.unflatten(0, (-1, bits))
    out = torch.empty(runs.shape[0], 32, words.shape[1], dtype=torch.uint8, device=words.device)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        here = min(bits, 32 - shift)  # bits of the code that lie in this word
        code = (runs[:, word] >> shift) & ((1 << here) - 1)
        if here < bits:
            code |= (runs[:, word + 1] & ((1 << (bits - here)) - 1)) << here
        out[:, i] = code
    return out.flatten(0, 1)


def unpack_columns(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [G, words_for(count, bits)] -> uint8 [G, count]."""
    return unpack(words.t(), bits, count).t()


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [count, N] -> int32 [words_for(count, bits), N]; the inverse of `unpack`. count is a multiple of 32."""
    runs = codes.to(torch.int64).unflatten(0, (-1, 32))
    words = torch.zeros(runs.shape[0], bits, runs.shape[2], dtype=torch.int64, device=codes.device)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        words[:, word] |= (runs[:, i] << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, word + 1] |= runs[:, i] >> (32 - shift)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).flatten(0, 1)


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[G, count] -> int32 [G, words_for(count, bits)]."""
    return pack(codes.t(), bits).t().contiguous()
