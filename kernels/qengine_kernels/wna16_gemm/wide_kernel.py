"""The kernel over 4-bit tiles for sm_90 and many rows of x: two groups of four warps that share the rows of x.

`tiled_kernel` at 128 rows of x reads 5 TB/s from the second-level cache of an H200, nine tenths of it x again and again
for 128 outputs at a time, and that bounds it. Here a program has 256 outputs, which its two groups of warps compute 128
each, from the same rows of x in shared memory. A fifth group's thread loads those ahead (TMA). Nothing but the loading
binds the groups together, so that one decodes while the other one multiplies.

Written in Gluon, Triton's lower level: warps with different tasks, barriers between them and the moment at which a
product is waited for cannot be said in Triton. There is no interpreter for it: its tests need the GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from qengine_kernels.wna16_gemm.tiled_kernel import BF16_PAIRS, BF16_PRODUCT, FP16_PAIRS, FP16_PRODUCT

STEP = gl.constexpr(64)
"""Inputs of a step: a tile."""
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6, 3.7
LOADER_REGISTERS, GROUP_REGISTERS = gl.constexpr(24), gl.constexpr(232)


@gluon.jit
def _in_turns(b_a, b_b, WIDTH: gl.constexpr):
    """[R, C] and [R, C] -> [R, 2 * C]: WIDTH columns of the one, then as many of the other, and so on."""
    b_both = gl.reshape(gl.join(b_a, b_b), [b_a.shape[0], b_a.shape[1] // WIDTH, WIDTH, 2])
    return gl.reshape(gl.permute(b_both, [0, 1, 3, 2]), [b_a.shape[0], 2 * b_a.shape[1]])


@gluon.jit
def _rows(b_flat):
    """int16 [2048], two neighbouring tiles as they lie in memory -> [128, 16] (see `tiles.py`)."""
    b_words = gl.permute(gl.reshape(b_flat, [2, 1, 4, 8, 4, 2, 2, 2]), [0, 2, 6, 3, 1, 5, 4, 7])
    return gl.reshape(b_words, [128, 16])


@gluon.jit
def _slot(b_words, b_minus, b_scale, SLOT: gl.constexpr, DTYPE: gl.constexpr):
    """The weights in one slot of the words: codes less zeros, exact, times scales, rounded to DTYPE."""
    if DTYPE.is_bf16():
        b_codes = gl.inline_asm_elementwise(
            BF16_PAIRS[SLOT], "=r,r,r", [b_words, b_minus], dtype=gl.bfloat16, is_pure=True, pack=2
        )
        return gl.inline_asm_elementwise(
            BF16_PRODUCT, "=r,r,r", [b_codes, b_scale], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_codes = gl.inline_asm_elementwise(
            FP16_PAIRS[SLOT], "=r,r,r", [b_words, b_minus], dtype=gl.float16, is_pure=True, pack=2
        )
        return gl.inline_asm_elementwise(
            FP16_PRODUCT, "=r,r,r", [b_codes, b_scale], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _weights(b_flat, b_meta, LEFT: gl.constexpr, SCALE: gl.constexpr, DTYPE: gl.constexpr):
    """Words int16 [2048] and scales with zeros int32 [128] -> [128, 64] in the registers of a left operand, as they
    are: nothing is exchanged between threads."""
    BASE: gl.constexpr = 1024.0 if DTYPE.is_fp16() else 128.0
    b_words = _rows(b_flat)
    if SCALE.is_fp16():
        b_scale = (b_meta & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        b_scale = (b_meta << 16).to(gl.float32, bitcast=True)
    b_minus = (-BASE - (b_meta >> 16).to(gl.float32)).to(DTYPE)
    b_scale, _ = gl.broadcast(gl.expand_dims(b_scale.to(DTYPE), 1), b_words)
    b_minus, _ = gl.broadcast(gl.expand_dims(b_minus, 1), b_words)
    b_0 = _slot(b_words, b_minus, b_scale, 0, DTYPE)
    b_1 = _slot(b_words, b_minus, b_scale, 1, DTYPE)
    b_2 = _slot(b_words, b_minus, b_scale, 2, DTYPE)
    b_3 = _slot(b_words, b_minus, b_scale, 3, DTYPE)
    b_all = _in_turns(_in_turns(b_0, b_1, 16), _in_turns(b_2, b_3, 16), 32)
    return gl.convert_layout(b_all, LEFT, assert_trivial=True)


@gluon.jit
def _group_of(i_step, GROUP: gl.constexpr):
    """The quantisation group of a step; GROUP 0: one for all of K."""
    return 0 if GROUP == 0 else i_step * 64 // GROUP


@gluon.jit
def _multiply(
    s_x, s_full, s_empty, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin, end,
    m, n, k, splits, PART: gl.constexpr, GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Outputs [256 * i_n + 128 * PART, + 128) of BLOCK_M rows, by four warps."""
    DTYPE: gl.constexpr = p_out.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WORDS: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    o_flat = gl.arange(0, 2048, WORDS)
    p_flat = p_words + (i_n * 4 + 2 * PART + o_flat // 1024).to(gl.int64) * k * 16 + o_flat % 1024
    META: gl.constexpr = gl.SliceLayout(1, _rows(o_flat).type.layout)
    p_row = p_meta + i_n * 256 + 128 * PART + gl.arange(0, 128, META)
    last = end - 1
    # Words and scales are two steps ahead, in registers.
    b_flat = gl.load(p_flat + begin * 1024)
    b_meta = gl.load(p_row + _group_of(begin, GROUP) * n)
    i_next = gl.minimum(begin + 1, last)
    b_next = gl.load(p_flat + i_next * 1024)
    b_next_meta = gl.load(p_row + _group_of(i_next, GROUP) * n)
    b_acc = gl.zeros([128, BLOCK_M], gl.float32, SUMS)
    stage = 0
    phase = 0
    for i in range(begin, end):
        b_w = _weights(b_flat, b_meta, LEFT, SCALE, DTYPE)
        b_flat = b_next
        b_meta = b_next_meta
        i_next = gl.minimum(i + 2, last)
        b_next = gl.load(p_flat + i_next * 1024)
        b_next_meta = gl.load(p_row + _group_of(i_next, GROUP) * n)
        mbarrier.wait(s_full.index(stage), phase)
        running = warpgroup_mma(b_w, s_x.index(stage).permute((1, 0)), b_acc, is_async=True)
        b_acc, _ = warpgroup_mma_wait(0, deps=[running, b_w])  # b_w's registers are not free before
        mbarrier.arrive(s_empty.index(stage), count=1)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    done = True
    if SPLIT:
        o_row = gl.arange(0, 128, gl.SliceLayout(1, SUMS))
        o_column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
        p_first = p_parts + (i_tile * 2 + PART) * splits * 128 * BLOCK_M
        p_first = p_first + o_row[:, None] * BLOCK_M + o_column[None, :]
        gl.store(p_first + i_split * (128 * BLOCK_M), b_acc)
        thread_barrier()
        p_ticket = p_tickets + i_tile * 2 + PART
        done = gl.atomic_add(p_ticket, 1, sem="acq_rel", scope="gpu") == splits - 1
        if done:
            b_acc = gl.zeros([128, BLOCK_M], gl.float32, SUMS)
            for i in range(splits):
                b_acc += gl.load(p_first + i * (128 * BLOCK_M), cache_modifier=".cg")
            gl.store(p_ticket, 0)
    if done:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
        o_n = i_n * 256 + 128 * PART + gl.arange(0, 128, gl.SliceLayout(1, OUT))
        o_m = i_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        if HAS_BIAS:
            o_bias = i_n * 256 + 128 * PART + gl.arange(0, 128, gl.SliceLayout(1, SUMS))
            b_acc += gl.load(p_bias + o_bias).to(gl.float32)[:, None]
        p_y = p_out + o_m.to(gl.int64)[None, :] * n + o_n[:, None]
        mask = (o_m < m)[None, :] & (o_n < n)[:, None]
        gl.store(p_y, gl.convert_layout(b_acc.to(DTYPE), OUT), mask=mask)


@gluon.jit
def _first(
    s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin, end,
    m, n, k, splits, GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    _multiply(
        s_x, s_full, s_empty, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin,
        end, m, n, k, splits, 0, GROUP, SCALE, BLOCK_M, STAGES, SPLIT, HAS_BIAS,
    )  # fmt: skip


@gluon.jit
def _second(
    s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin, end,
    m, n, k, splits, GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    _multiply(
        s_x, s_full, s_empty, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin,
        end, m, n, k, splits, 1, GROUP, SCALE, BLOCK_M, STAGES, SPLIT, HAS_BIAS,
    )  # fmt: skip


@gluon.jit
def _load(
    s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split, i_tile, begin, end,
    m, n, k, splits, GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The rows of x for every step, as soon as both groups have done with what lay there before."""
    stage = 0
    phase = 1
    for i in range(begin, end):
        mbarrier.wait(s_empty.index(stage), phase)
        mbarrier.expect(s_full.index(stage), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [i_m * BLOCK_M, i * STEP], s_full.index(stage), s_x.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit(do_not_specialize=["m", "share"])
def wide_kernel(
    x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, m, n, k, share,
    GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of 256 outputs x BLOCK_M rows, splits of K). x is a descriptor of [m, k] in blocks of [BLOCK_M, 64];
    a split takes `share` steps. Rows of x change fastest, so that programs that run together share their weights."""
    rows = gl.cdiv(m, BLOCK_M)
    i_tile = gl.program_id(0)
    i_split = gl.program_id(1)
    splits = gl.num_programs(1)
    i_n = i_tile // rows
    i_m = i_tile % rows
    begin = i_split * share
    end = gl.minimum(begin + share, k // 64)
    s_x = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 64], x.layout)
    s_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(s_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_first, (s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split,
                      i_tile, begin, end, m, n, k, splits, GROUP, SCALE, BLOCK_M, STAGES, SPLIT, HAS_BIAS)),
            (_second, (s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split,
                       i_tile, begin, end, m, n, k, splits, GROUP, SCALE, BLOCK_M, STAGES, SPLIT, HAS_BIAS)),
            (_load, (s_x, s_full, s_empty, x, p_words, p_meta, p_bias, p_out, p_parts, p_tickets, i_n, i_m, i_split,
                     i_tile, begin, end, m, n, k, splits, GROUP, SCALE, BLOCK_M, STAGES, SPLIT, HAS_BIAS)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
