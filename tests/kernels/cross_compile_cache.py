"""Variants of the cache kernels: writes, paged attention, gathering; elementwise formats and packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from cross_compile_variant import ITEM, Variant, split_options

from qengine.plugin import AttentionSpec, KVDtype
from qengine_dense.kernels import identity_decode, identity_encode
from qengine_kernels.fp8.device import (
    e4m3_decode,
    e4m3_encode,
    e4m3_pairs,
    e5m2_decode,
    e5m2_encode,
    e5m2_pairs,
)
from qengine_kernels.kv_write.kernel import write_kv_config, write_kv_kernel
from qengine_kernels.kv_write.rotated import rotate_write_config, rotate_write_kernel
from qengine_kernels.launch import Chip
from qengine_kernels.paged_attention.config import AttentionTile, attention_tile
from qengine_kernels.paged_attention.kernel import combine_kernel, gather_kernel, paged_attention_kernel

FUNCTIONS = {
    "same": (identity_encode, identity_decode),
    "e4m3": (e4m3_encode, e4m3_decode),
    "e5m2": (e5m2_encode, e5m2_decode),
}
PAIRS = {"e4m3": e4m3_pairs, "e5m2": e5m2_pairs}


def cache_writes(dtype: str, format: str, native: bool) -> Iterator[Variant]:
    encode = FUNCTIONS[format][0]
    constants, options = split_options(write_kv_config(8, 128))
    constants |= {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "NATIVE": native}
    constants |= {"K_WRITE": encode, "K_ROWS": False, "V_WRITE": encode, "V_ROWS": False}
    stored = dtype if format == "same" else "u8"
    types = {"p_k": dtype, "p_v": dtype, "p_k_cache": stored, "p_v_cache": stored, "p_slots": "i64"}
    types |= {"p_k_inverse": "fp32", "p_v_inverse": "fp32"}
    yield Variant(f"write_kv {dtype} {format} native={native}", write_kv_kernel, types, constants, options)


def rotated_writes(dtype: str, format: str, native: bool) -> Iterator[Variant]:
    (write,) = cache_writes(dtype, format, native)
    constants, options = split_options(rotate_write_config(64, 8, 128))
    types = write.types | {"p_q": dtype, "p_cos": "fp32", "p_sin": "fp32"}
    name = f"rotate_write {dtype} {format} native={native}"
    yield Variant(name, rotate_write_kernel, types, write.constants | constants | {"HALF": 64}, options)


def attention(
    chip: Chip, dtype: str, format: str, native: bool, shape: tuple[int, int], decode: bool, rules: dict[str, Any]
) -> Iterator[Variant]:
    """shape = (query heads per KV head, head_dim)."""
    group, head_dim = shape
    stored = dtype if format == "same" else "u8"
    tile: AttentionTile = attention_tile(chip, group, head_dim, (ITEM[stored],) * 2, ITEM[dtype], decode)
    constants = {
        "HEADS": 8 * group, "GROUP": group, "TILE_HEADS": tile.heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16,
        "SPLIT": decode, "WINDOW": 0, "SOFT_CAP": False, "NATIVE": native,
        "K_READ": FUNCTIONS[format][1], "K_ROWS": False, "K_ALIGN": 16,
        "V_READ": FUNCTIONS[format][1], "V_ROWS": False, "V_ALIGN": 16,
        "PAIRS": False, "CAUSAL": not decode, "WHOLE": not decode and "WINDOW" not in rules,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": tile.block_d,
    }  # fmt: skip
    if format in PAIRS and chip.tensor_cores and dtype != "fp32":
        constants |= {"K_READ": PAIRS[format], "V_READ": PAIRS[format], "PAIRS": True, "NATIVE": 2 if native else 1}
        stored = "i16"
    types = {"p_q": dtype, "p_k_cache": stored, "p_v_cache": stored, "p_out": dtype}
    types |= {"scale": "fp32", "soft_cap": "fp32", "p_table": "i32", "p_query_start": "i32", "p_seq_lens": "i32"}
    for name in ("p_partial", "p_partial_max", "p_partial_sum", "p_k_scale", "p_v_scale"):
        types[name] = "fp32"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    name = f"{'decode' if decode else 'prefill'} g{group} d{head_dim} {dtype} {format} native={native} {rules}"
    yield Variant(name, paged_attention_kernel, types, constants | rules, options)


def helpers_of_attention(dtype: str, format: str, native: bool, head_dim: int) -> Iterator[Variant]:
    block_d = 1 << (head_dim - 1).bit_length()
    types = {"p_partial": "fp32", "p_partial_max": "fp32", "p_partial_sum": "fp32", "p_out": dtype, "p_v_scale": "fp32"}
    constants = {"GROUP": 4, "HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SPLITS": 8}
    yield Variant(f"combine d{head_dim} {dtype}", combine_kernel, types, constants)
    stored = dtype if format == "same" else "u8"
    types = {"p_k_cache": stored, "p_v_cache": stored, "p_k_out": dtype, "p_v_out": dtype, "p_blocks": "i32"}
    types |= {"p_k_scale": "fp32", "p_v_scale": "fp32"}
    constants = {"HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "NATIVE": native}
    constants |= {"K_READ": FUNCTIONS[format][1], "K_ROWS": False, "V_READ": FUNCTIONS[format][1], "V_ROWS": False}
    constants |= {"K_ALIGN": 16, "V_ALIGN": 16}
    constants |= {"BLOCK_N": 32, "BLOCK_D": block_d}
    yield Variant(f"gather d{head_dim} {dtype} {format} native={native}", gather_kernel, types, constants)


TYPE_CODES = {torch.uint8: "u8", torch.int8: "i8", torch.float16: "fp16", torch.bfloat16: "bf16"}
PACKED_STRIDES = ("k_token_stride", "k_row_stride", "v_token_stride", "v_row_stride")


def packed_rows(
    chip: Chip, dtype: str, kinds: tuple[type[KVDtype], type[KVDtype]], head_dim: int, attend: bool
) -> Iterator[Variant]:
    """The cache kernels with K and V of two formats with rows of their own, whose strides are multiples of 4."""
    spec, native = AttentionSpec(32, 8, head_dim, 1.0), chip.sm >= 89
    compute = {code: t for t, code in TYPE_CODES.items()}[dtype]
    k, v = kinds[0](spec, "k", compute), kinds[1](spec, "v", compute)
    types = {"p_k_cache": TYPE_CODES[k.layout(16).dtype], "p_v_cache": TYPE_CODES[v.layout(16).dtype]}
    store = {"K_WRITE": k.functions().store, "V_WRITE": v.functions().store, "K_ROWS": True, "V_ROWS": True}
    load = {"K_READ": k.functions().load, "V_READ": v.functions().load, "K_ROWS": True, "V_ROWS": True}
    load |= {"K_ALIGN": 4, "V_ALIGN": 4}
    (write,) = cache_writes(dtype, "e4m3", native)
    _, gather = helpers_of_attention(dtype, "e4m3", native, head_dim)
    found = [(write, store | {"HEAD_DIM": head_dim}), (gather, load)]
    if attend:
        load_here = load | {"PAIRS": False, "NATIVE": native}
        for decode in (True, False) if chip.tensor_cores else (True,):
            found += [
                (variant, load_here)
                for variant in attention(chip, dtype, "e4m3", native, (4, head_dim), decode, {})
            ]
    for variant, changes in found:
        variant.types |= types
        variant.constants |= changes
        variant.name += f" {k.name}/{v.name}"
        variant.unaligned = PACKED_STRIDES
        yield variant
