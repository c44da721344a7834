"""Compiles kernel variants to cubin for chips that are not there. Run as a script, without TRITON_INTERPRET.

    python cross_compile_worker.py 75,80        one JSON line a variant: chip, name, shared bytes, limit, error
    python cross_compile_worker.py control      the same for variants that must not compile
    python cross_compile_worker.py kv K V 75,80 cache kernels with two installed KV dtypes whose rows are packed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from cross_compile_cache import FUNCTIONS, attention, cache_writes, helpers_of_attention, packed_rows, rotated_writes
from cross_compile_variant import ITEM, Variant, compile_variant, split_options

from qengine.plugin.discovery import load_plugin
from qengine_awq.kernels import unpack_nibble
from qengine_compressed_tensors.kernels import int8_dot, int8_encode
from qengine_dense.kernels import identity_decode
from qengine_gptq.kernels import UNPACK as GPTQ_UNPACK
from qengine_kernels.expert_slots.kernel import choose_slots_kernel, fetch_experts_kernel, name_slots_kernel
from qengine_kernels.expert_slots.launcher import BLOCK_NAMES, BLOCK_P, BLOCK_S
from qengine_kernels.expert_slots.tables import NARROW_PIECE, WIDE_PIECE
from qengine_kernels.fp8.device import (
    e4m3_decode_finite,
    e4m3_dot,
    e4m3_encode,
)
from qengine_kernels.gated_activation.kernel import (
    gated_activation_config,
    gated_activation_kernel,
    scaled_activation_kernel,
)
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.config import plan_grouped
from qengine_kernels.moe_gemm.kernel import grouped_gemm_kernel
from qengine_kernels.overlap import wait_for_earlier
from qengine_kernels.quantize_rows.kernel import quantize_rows_config, quantize_rows_kernel
from qengine_kernels.rms_norm.kernel import rms_norm_config, rms_norm_kernel
from qengine_kernels.rotary.kernel import rotary_config, rotary_kernel
from qengine_kernels.row_max.kernel import join_max_kernel, part_max_kernel
from qengine_kernels.top_floor.kernel import TOP_FLOOR, top_floor_kernel
from qengine_kernels.w8a8_gemm.config import plan_pair
from qengine_kernels.w8a8_gemm.few_rows import BLOCK_N, few_rows_kernel, plan_few
from qengine_kernels.w8a8_gemm.kernel import pair_gemm_kernel
from qengine_kernels.w8a16_gemm.config import plan_bytes
from qengine_kernels.w8a16_gemm.kernel import byte_dequantize_kernel, byte_gemm_kernel, byte_gemv_kernel
from qengine_kernels.wna16_gemm.config import grouping, plan_gemm
from qengine_kernels.wna16_gemm.kernel import dequantize_kernel, gemm_kernel, gemv_kernel, sum_splits_kernel
from qengine_kernels.wna16_gemm.tiled_config import plan_tiles
from qengine_kernels.wna16_gemm.tiled_kernel import tiled_dequantize_kernel, tiled_kernel
from qengine_kernels.wna16_gemm.tiled_launcher import SCALES, tile_constants

sys.path.append(str(Path(__file__).parents[1] / "support"))
from row_format import RowKV


def small_kernels(dtype: str) -> Iterator[Variant]:
    floats = {"eps": "fp32", "weight_offset": "fp32"}
    for width, residual in ((4096, "fp32"), (128, None)):
        constants, options = split_options(rms_norm_config(width))
        constants |= {"WIDTH": width, "HAS_RESIDUAL": residual is not None}
        types = {"p_x": dtype, "p_weight": dtype, "p_residual": residual or dtype, "p_out": dtype, **floats}
        yield Variant(f"rms_norm {width} {dtype}", rms_norm_kernel, types, constants, options)
    for kind in ("silu", "gelu", "gelu_tanh"):
        constants, options = split_options(gated_activation_config(14336))
        types = {"p_x": dtype, "p_out": dtype}
        yield Variant(f"{kind} {dtype}", gated_activation_kernel, types, constants | {"KIND": kind}, options)
    yield Variant("part_max", part_max_kernel, {"p_x": "fp32", "p_best": "fp32", "p_place": "i32"}, {"BLOCK": 4096})
    types = {"p_part_best": "fp32", "p_part_place": "i32", "p_best": "fp32", "p_place": "i64", "p_checked": "i64"}
    yield Variant("join_max", join_max_kernel, types, {"PARTS": 32})
    types = {"p_x": "fp32", "p_rows": "i64", "p_top_k": "i64", "p_top_p": "fp32", "p_floor": "fp32", "p_out": "fp32"}
    yield Variant("top_floor", top_floor_kernel, types, *split_options(TOP_FLOOR))
    constants, options = split_options(rotary_config(64))
    types = {"p_q": dtype, "p_k": dtype, "p_cos": "fp32", "p_sin": "fp32"}
    yield Variant(f"rotary {dtype}", rotary_kernel, types, constants | {"HALF": 64}, options)


def float16_range() -> Iterator[Variant]:
    """What keeps a float16 feed-forward in range; any chip may be asked for float16."""
    constants, options = split_options(rms_norm_config(4096))
    constants |= {"WIDTH": 4096, "HAS_RESIDUAL": True}
    types = {"p_x": "fp32", "p_weight": "fp32", "p_residual": "fp32", "p_out": "fp16"}
    types |= {"eps": "fp32", "weight_offset": "fp32"}
    yield Variant("rms_norm 4096 fp32 to fp16", rms_norm_kernel, types, constants, options)
    constants, options = split_options(gated_activation_config(14336))
    types = {"p_x": "fp16", "p_out": "fp16", "p_scale": "fp32", "limit": "fp32"}
    yield Variant("scaled_activation", scaled_activation_kernel, types, constants | {"KIND": "silu"}, options)


def gemms(
    chip: Chip, dtype: str, m: int, k: int, group_size: int, zeros: bool, slice_rows: int, bits: int = 4
) -> Iterator[Variant]:
    slots = 32 // bits
    plan = plan_gemm(chip, m, 4096, k, ITEM[dtype], slots=slots)
    unpack = unpack_nibble if bits == 4 else GPTQ_UNPACK[bits]
    constants = {"UNPACK": unpack, "SLICE": slice_rows, "SLOTS": slots, "HAS_ZEROS": zeros, "ZERO": 1 << (bits - 1)}
    constants["GROUPING"] = grouping(group_size, k, slice_rows, plan.block_w, slots)
    constants |= {"BLOCK_N": plan.block_n, "BLOCK_W": plan.block_w}
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    types = {"p_x": dtype, "p_words": "i32", "p_scales": "fp16", "p_zeros": "u8" if zeros else "i32"}
    name = f"{plan.route} w{bits} m{m} k{k} g{group_size} {dtype} zeros={zeros}"
    if plan.route == "dequantize":
        yield Variant(name, dequantize_kernel, types | {"p_out": dtype}, constants, options)
        return
    split = plan.splits > 1
    constants |= {"HAS_BIAS": True, "SPLIT": split, "BLOCK_M": plan.block_m}
    types |= {"p_bias": dtype, "p_out": "fp32" if split else dtype}
    kernel = gemv_kernel if plan.route == "gemv" else gemm_kernel
    yield Variant(name, kernel, types, constants, options)


def tiles(chip: Chip, dtype: str, m: int, n: int, k: int, group: int, scales: torch.dtype) -> Iterator[Variant]:
    plan = plan_tiles(chip, m, n, k, group)
    if plan.kind == "paired":  # is not Triton's: test_nvrtc.py
        return
    types = {"p_x": dtype, "p_words": "i16", "p_meta": "i32", "p_bias": dtype, "p_out": dtype}
    types |= {"p_parts": "fp32", "p_tickets": "i32"}
    if plan.kind == "dequantize":
        constants = {"COLUMNS": plan.columns, "GROUP": group, "SCALE": SCALES[scales], "ROWS": 1, "ASM": True}
        yield Variant(f"tiled_dequantize k{k} g{group} {dtype}", tiled_dequantize_kernel, types, constants)
        return
    constants, options = split_options(tile_constants(plan, group, scales, chip.sm))
    constants |= {"HAS_BIAS": True, "ASM": True}
    name = f"tiled_{plan.kind} m{m} n{n} k{k} g{group} {dtype}"
    yield Variant(name, tiled_kernel, types, constants, options, ("x_stride",))


BYTE_KERNELS = {"gemv": byte_gemv_kernel, "gemm": byte_gemm_kernel, "dequantize": byte_dequantize_kernel}


def fp8_weight_only(chip: Chip, dtype: str, m: int, k: int, block: int) -> Iterator[Variant]:
    plan = plan_bytes(chip, m, 4096, k, block, ITEM[dtype])
    constants = {"DECODE": e4m3_decode_finite, "NATIVE": chip.sm >= 89, "BLOCKED": block < k, "HAS_ROWS": block < k}
    constants |= {"BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    types = {"p_x": dtype, "p_codes": "u8", "p_scales": "fp32", "p_rows": "i32", "p_bias": dtype, "p_out": dtype}
    if plan.route != "dequantize":
        constants |= {"BLOCK_M": plan.block_m, "HAS_BIAS": True, "SPLIT": plan.splits > 1}
        types["p_out"] = "fp32" if plan.splits > 1 else dtype
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    name = f"fp8_{plan.route} m{m} k{k} block {block} {dtype}"
    yield Variant(name, BYTE_KERNELS[plan.route], types, constants, options)


def fp8_native(chip: Chip, dtype: str, m: int, k: int, block: int) -> Iterator[Variant]:
    plan = plan_pair(chip, m, 4096, k, block, True)
    constants = {"DOT": e4m3_dot, "NATIVE": True, "BLOCKED": block < k, "A_BLOCKED": block < k, "HAS_ROWS": block < k}
    constants |= {"HAS_BIAS": True, "SPLIT": plan.splits > 1}
    constants |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    types = {"p_a": "u8", "p_a_scales": "fp32", "p_codes": "u8", "p_scales": "fp32", "p_rows": "i32", "p_bias": dtype}
    types["p_out"] = "fp32" if plan.splits > 1 else dtype
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    yield Variant(f"fp8_pair m{m} k{k} block {block} {dtype}", pair_gemm_kernel, types, constants, options)
    if block == k:
        few = plan_few(chip, m, 4096, k)
        constants = {"DOT": e4m3_dot, "NATIVE": True, "HAS_BIAS": True, "SPLIT": few.splits > 1, "BLOCK_N": BLOCK_N}
        constants |= {"BLOCK_M": few.block_m, "BLOCK_K": few.block_k, "STAGES": few.num_stages}
        types |= {"p_parts": "fp32", "p_tickets": "i32", "p_out": dtype}
        yield Variant(
            f"fp8_few m{m} k{k} {dtype}", few_rows_kernel, types, constants, {"num_stages": few.num_stages}
        )
    width = min(block, k)
    for static in (False, True):
        rounding, options = split_options(quantize_rows_config(width))
        rounding |= {"ENCODE": e4m3_encode, "NATIVE": True, "STATIC": static}
        types = {"p_x": dtype, "p_scale": "fp32", "p_codes": "u8", "p_scales": "fp32", "largest": "fp32"}
        yield Variant(f"quantize_rows {width} static={static}", quantize_rows_kernel, types, rounding, options)


STORED = {
    "words": (8, 16, unpack_nibble, "i32", {"w_n": 1, "s_n": 1, "HAS_ZEROS": True, "HAS_SCALE_ROWS": False}),
    "bytes": (1, 1, e4m3_decode_finite, "u8", {"w_k": 1, "s_k": 1, "HAS_ZEROS": False, "HAS_SCALE_ROWS": True}),
    "floats": (1, 1, identity_decode, None, {"w_k": 1, "HAS_ZEROS": False, "HAS_SCALE_ROWS": False}),
}
"""What experts are stored in: slots, slice rows, device function, element type (None: that of x), constants."""


def experts(
    chip: Chip, dtype: str, stored: str, tokens: int, combine: bool, columns: bool = False
) -> Iterator[Variant]:
    """8 of 128 experts a token, [4096, 2048] each, scales by 128 inputs."""
    slots, slice_rows, unpack, element, constants = STORED[stored]
    element = element or dtype
    sizes = (slots, ITEM[dtype], {"i32": 4}.get(element) or ITEM[element], 128 if stored == "bytes" else None)
    plan = plan_grouped(chip, 8 * tokens, 8, 128, 4096, *sizes)
    constants = constants | {
        "UNPACK": unpack, "NATIVE": chip.sm >= 89, "SLOTS": slots, "SLICE": slice_rows, "ZERO": 0, "EXPERTS": 128,
        "GROUPING": grouping(128, 2048, slice_rows, plan.block_w, slots), "HAS_SCALES": stored != "floats",
        "HAS_COLUMNS": columns, "COMBINE": combine, "DOT": plan.dot,
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_W": plan.block_w,
    }  # fmt: skip
    types = {"p_x": dtype, "p_out": dtype, "p_weight": element, "p_scales": "fp16" if slots > 1 else "fp32"}
    types |= {"p_zeros": "u8", "p_scale_rows": "i32", "p_columns": "i32"}
    types |= {"p_offsets": "i32", "p_order": "i64", "p_pair_weights": "fp32"}
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    name = f"{'experts_dot' if plan.dot else 'experts_gemv'} {stored} t{tokens} {dtype} combine={combine}"
    aligned = ("word_rows", "w_expert", "w_k", "w_n", "s_expert")
    yield Variant(name, grouped_gemm_kernel, types, constants, options, aligned)


def expert_slots() -> Iterator[Variant]:
    """512 experts, 256 slots, 256 ids: the largest in use. Nothing in them depends on the chip."""
    tables = {"p_slot_of": "i32", "p_expert_of": "i32", "p_used": "i64", "p_counts": "i64", "p_fetch": "i32"}
    ids = {"p_ids": "i64", "p_slots": "i64"}
    sizes = {"EXPERTS": 512, "SLOTS": 256, "MOST": 256, "BLOCK_P": BLOCK_P, "BLOCK_S": BLOCK_S}
    yield Variant("choose_slots", choose_slots_kernel, tables | ids, sizes)
    for element, unit, block in (("i32", 4, WIDE_PIECE // 4), ("u8", 1, NARROW_PIECE)):
        types = tables | {"p_source": element, "p_pool": element, "p_pieces": "i64"}
        constants = {"UNIT": unit, "BLOCK": block, "ENTER": True}
        yield Variant(f"fetch_experts {element}", fetch_experts_kernel, types, constants)
    yield Variant("name_slots", name_slots_kernel, tables | ids, {"BLOCK": BLOCK_NAMES})


def int8_activations(chip: Chip, dtype: str, m: int, k: int) -> Iterator[Variant]:
    native = chip.sm >= 80
    plan = plan_pair(chip, m, 4096, k, k, native)
    constants = {"DOT": int8_dot, "NATIVE": native, "BLOCKED": False, "A_BLOCKED": False, "HAS_ROWS": False}
    constants |= {"HAS_BIAS": True, "SPLIT": plan.splits > 1}
    constants |= {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k}
    types = {"p_a": "u8", "p_a_scales": "fp32", "p_codes": "u8", "p_scales": "fp32", "p_rows": "i32", "p_bias": dtype}
    types["p_out"] = "fp32" if plan.splits > 1 else dtype
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    yield Variant(f"int8_pair m{m} k{k} {dtype}", pair_gemm_kernel, types, constants, options)
    rounding, options = split_options(quantize_rows_config(k))
    rounding |= {"ENCODE": int8_encode, "NATIVE": native, "STATIC": False}
    types = {"p_x": dtype, "p_scale": "fp32", "p_codes": "u8", "p_scales": "fp32", "largest": "fp32"}
    yield Variant(f"int8_rows {k} {dtype}", quantize_rows_kernel, types, rounding, options)


def variants(chip: Chip) -> Iterator[Variant]:
    """What this chip would run: its dtypes, its routes, its tiles; awkward head sizes and groups among them."""
    half = "fp16" if chip.sm < 80 else "bf16"
    native = chip.sm >= 89
    yield from small_kernels(half)
    yield from float16_range()
    for format in FUNCTIONS:
        yield from cache_writes(half, format, native and format != "same")
    yield from rotated_writes(half, "e4m3", native)
    yield from attention(chip, half, "same", False, (4, 128), True, {})
    yield from attention(chip, half, "e4m3", native, (3, 80), True, {"WINDOW": 1024, "SOFT_CAP": True})
    yield from attention(chip, half, "e5m2", native, (2, 256), True, {})
    yield from attention(chip, half, "e4m3", native, (2, 16), True, {})  # a toy's head: half of it is 8 wide
    # float32 takes the most shared memory and the longest to compile: chips of each size of it stand for the others.
    float32 = chip.sm in (75, 86, 90)
    if float32:
        yield from attention(chip, "fp32", "e4m3", False, (48, 128), True, {})
    yield from helpers_of_attention(half, "e4m3", native, 96)
    yield from packed_rows(chip, half, (RowKV, RowKV), 128, attend=chip.sm in (75, 90))
    if chip.tensor_cores:
        yield from attention(chip, half, "e4m3", native, (4, 128), False, {})
        yield from attention(chip, half, "same", False, (2, 256), False, {"WINDOW": 1024, "SOFT_CAP": True})
        if chip.sm == 90:  # eight warps whose products overlap
            yield from attention(chip, half, "same", False, (4, 128), False, {})
            yield from tiles(chip, half, 300, 28800, 4096, 0, torch.float16)
        if float32:
            yield from attention(chip, "fp32", "same", False, (7, 128), False, {})
    yield Variant(
        "sum_splits", sum_splits_kernel, {"p_parts": "fp32", "p_bias": half, "p_out": half},
        {"HAS_BIAS": True, "BLOCK": 1024},
    )  # fmt: skip
    yield from gemms(chip, half, 1, 4096, 128, True, 16)
    yield from gemms(chip, half, 4, 576, 64, False, 8)
    yield from gemms(chip, half, 1000, 4096, 128, True, 16)
    yield from gemms(chip, half, 1, 4096, 32, False, 16, bits=2)
    yield from gemms(chip, half, 4, 576, 24, True, 1, bits=2)
    yield from gemms(chip, half, 1, 4096, 128, True, 16, bits=8)
    yield from gemms(chip, half, 1000, 4096, 32, False, 16, bits=8)
    yield from int8_activations(chip, half, 16, 4096)
    if chip.tensor_cores:  # elsewhere the library multiplies more rows
        yield from int8_activations(chip, half, 64, 600)
    for m, k, block in ((1, 4096, 4096), (4, 576, 128), (1000, 4096, 128)):
        yield from fp8_weight_only(chip, half, m, k, block)
    yield from experts(chip, half, "words", 1, False)
    yield from experts(chip, half, "floats", 1, True)
    yield from experts(chip, half, "bytes", 4, False)
    if chip.sm in (75, 90, 120):
        yield from expert_slots()
    if native:
        for m, k, block in ((1, 4096, 128), (64, 640, 640), (1000, 4096, 128)):
            yield from fp8_native(chip, half, m, k, block)
    if chip.tensor_cores:
        yield from fp8_weight_only(chip, half, 64, 4096, 128)
        yield from fp8_weight_only(chip, half, 200, 576, 576)
        if float32:
            yield from fp8_weight_only(chip, "fp32", 64, 4096, 128)
        yield from experts(chip, half, "words", 32, False, columns=True)
        yield from experts(chip, half, "words", 2000, True)
        yield from experts(chip, half, "bytes", 2000, True)
        yield from experts(chip, half, "floats", 2000, False)
        if float32:
            yield from experts(chip, "fp32", "floats", 2000, True)
        yield from tiles(chip, half, 1, 4096, 4096, 128, torch.float16)
        yield from tiles(chip, "fp16", 16, 28672, 4096, 128, torch.float16)
        yield from tiles(chip, half, 60, 28672, 576, 64, torch.bfloat16)
        yield from tiles(chip, half, 500, 4096, 14336, 32, torch.float16)
        yield from tiles(chip, half, 500, 4096, 14336, 0, torch.bfloat16)
        yield from tiles(chip, half, 3000, 4096, 4096, 32, torch.float16)
        yield from tiles(chip, half, 3000, 4096, 4096, 128, torch.float16)  # sm_90: not Triton's
        yield from gemms(chip, half, 16, 4096, 128, True, 16)
        yield from gemms(chip, half, 200, 576, 64, True, 8)
        yield from gemms(chip, half, 64, 4096, 128, False, 16, bits=2)
        yield from gemms(chip, half, 64, 4096, 32, True, 16, bits=8)
        if float32:
            yield from gemms(chip, "fp32", 64, 200, 40, False, 1)


@triton.jit
def early_kernel(p_x, PDL: tl.constexpr):
    b_x = tl.load(p_x)
    wait_for_earlier(PDL)
    tl.store(p_x, b_x + 1.0)


def control() -> list[tuple[Variant, Chip]]:
    """Variants that must fail: hardware casts on chips that have none, a kernel that loads before it waits, and
    products that are not waited for."""
    casts = [(next(cache_writes("fp16", "e4m3", True)), Chip.known(sm)) for sm in (75, 80, 86)]
    early = Variant("early", early_kernel, {"p_x": "fp32"}, {"PDL": True})
    waiting = [next(tiles(Chip.known(90), "bf16", 30, 28672, 4096, group, torch.float16)) for group in (0, 128)]
    products = [replace(variant, constants=variant.constants | {"FINISH": False}) for variant in waiting]
    return casts + [(variant, Chip.known(90)) for variant in (early, *products)]


def report(variant: Variant, chip: Chip) -> None:
    row: dict[str, Any] = {"sm": chip.sm, "name": variant.name, "limit": chip.shared_memory}
    try:
        row["shared"] = compile_variant(variant, chip)
    except Exception as error:  # every failure is reported by the test, with its variant
        row["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(row), flush=True)


def main() -> None:
    if sys.argv[1] == "control":
        for variant, chip in control():
            report(variant, chip)
        return
    if sys.argv[1] == "kv":
        pair = load_plugin("kv", sys.argv[2]), load_plugin("kv", sys.argv[3])
        for sm in map(int, sys.argv[4].split(",")):
            half = "fp16" if sm < 80 else "bf16"
            for variant in packed_rows(Chip.known(sm), half, pair, 80, attend=sm in (75, 90)):
                report(variant, Chip.known(sm))
        return
    for sm in sys.argv[1].split(","):
        for variant in variants(Chip.known(int(sm))):
            report(variant, Chip.known(int(sm)))


if __name__ == "__main__":
    main()
