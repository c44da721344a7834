"""The kernel over 4-bit tiles for sm_90 and many rows of x: four groups of four warps that share the rows of x.

A program has 256 outputs, of which each group computes 64, all from the same rows of x in shared memory: rows of x that
a program reads again for other outputs come from the second-level cache, and that is slower than the matrix units. A
thread of its own loads words, scales and x ahead of all groups (TMA), so that nobody waits for memory. Nothing but the
loading binds the groups together: one decodes while others multiply.

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
from triton.language.extra.cuda import gdc_wait

from qengine_kernels.wna16_gemm.tiled_kernel import BF16_PAIRS, BF16_PRODUCT, FP16_PAIRS, FP16_PRODUCT

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6, 3.7
LOADER_REGISTERS, GROUP_REGISTERS = gl.constexpr(32), gl.constexpr(112)


@gluon.jit
def _in_turns(b_a, b_b, WIDTH: gl.constexpr):
    """[R, C] and [R, C] -> [R, 2 * C]: WIDTH columns of the one, then as many of the other, and so on."""
    b_both = gl.reshape(gl.join(b_a, b_b), [b_a.shape[0], b_a.shape[1] // WIDTH, WIDTH, 2])
    return gl.reshape(gl.permute(b_both, [0, 1, 3, 2]), [b_a.shape[0], 2 * b_a.shape[1]])


@gluon.jit
def _rows(b_flat):
    """int16 [1024], a tile as it lies in memory -> [64, 16] (see `tiles.py`)."""
    return gl.reshape(gl.permute(gl.reshape(b_flat, [4, 8, 4, 2, 2, 2]), [0, 4, 1, 3, 2, 5]), [64, 16])


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
def _weights(s_words, s_meta, TILE: gl.constexpr, LEFT: gl.constexpr, SCALE: gl.constexpr, DTYPE: gl.constexpr):
    """A tile of the step whose words int16 [4, 16, 64] and scales with zeros int32 [1, 256] lie in shared memory ->
    [64, 64] in the registers of a left operand. Every thread reads and decodes what it has to have: nothing is
    exchanged."""
    BASE: gl.constexpr = 1024.0 if DTYPE.is_fp16() else 128.0
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    META: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 8]], lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], warp_bases=[[0, 16], [0, 32]],
        block_bases=[], shape=[1, 64],
    )  # fmt: skip
    b_words = _rows(gl.reshape(s_words.slice(TILE, 1, dim=0).load(WORDS), [1024]))
    b_meta = gl.reshape(s_meta.slice(64 * TILE, 64, dim=1).load(META), [64])
    b_meta = gl.convert_layout(b_meta, gl.SliceLayout(1, b_words.type.layout), assert_trivial=True)
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
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage after this one; its barriers turn over where the ring begins anew."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _place(i_tile, rows, tiles_n, SWATH: gl.constexpr):
    """Number of an output tile -> (tile of N, tile of M), SWATH tiles of N at a time, so that programs that run
    together share what they read."""
    first = i_tile // (SWATH * rows) * SWATH
    width = gl.minimum(tiles_n - first, SWATH)
    i_local = i_tile - first * rows
    return first + i_local % width, i_local // width


@gluon.jit
def _result(b_acc, p_bias, o_n, DTYPE: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Sums of outputs [o_n, + 64) and of some rows -> what y gets."""
    if HAS_BIAS:
        o_bias = o_n + gl.arange(0, 64, gl.SliceLayout(1, b_acc.type.layout))
        b_acc += gl.load(p_bias + o_bias).to(gl.float32)[:, None]
    return b_acc.to(DTYPE)


@gluon.jit
def _store(b_y, p_out, o_n, o_m, m, n):
    """Outputs [o_n, + 64) of the rows from o_m on, as far as there are m."""
    o_column = o_n + gl.arange(0, 64, gl.SliceLayout(1, b_y.type.layout))
    o_row = o_m + gl.arange(0, b_y.shape[1], gl.SliceLayout(0, b_y.type.layout))
    gl.store(p_out + o_row.to(gl.int64)[None, :] * n + o_column[:, None], b_y, mask=(o_row < m)[None, :])


@gluon.jit
def _part_of(p_parts, i_program, i_tile, steps, share, PART: gl.constexpr, BLOCK_M: gl.constexpr):
    """Where a program leaves its part of a tile that it shares: the first of its two places unless the tile begins
    with it. float32 [64 * BLOCK_M], in the order of `_flat`."""
    i_place = i_program * 2 + (i_program * share <= i_tile * steps).to(gl.int32)
    return p_parts + (i_place * 4 + PART) * (64 * BLOCK_M)


@gluon.jit
def _flat(b_acc):
    """[64, C] -> [64 * C], 8 columns after each other: what the threads of a warp hold comes together."""
    b_eights = gl.reshape(b_acc, [64, b_acc.shape[1] // 8, 8])
    return gl.reshape(gl.permute(b_eights, [1, 0, 2]), [64 * b_acc.shape[1]])


@gluon.jit
def _join(
    p_parts, p_tickets, p_bias, p_out, i_tile, o_n, o_m, m, n, steps, share, total, PART: gl.constexpr,
    BLOCK_M: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Adds up the parts of a tile, each of the programs that share it some of its rows, when all of them are there.
    They all run at the same time, or this would wait for ever: the launch has to be a cooperative one."""
    ROWS: gl.constexpr = 16
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    i_program = gl.program_id(0)
    i_first = i_tile * steps // share
    programs = (gl.minimum((i_tile + 1) * steps, total) - 1) // share - i_first + 1
    p_ticket = p_tickets + i_first * 4 + PART
    arrived = gl.atomic_add(p_ticket, 0, sem="acquire", scope="gpu")
    while arrived < programs:
        arrived = gl.atomic_add(p_ticket, 0, sem="acquire", scope="gpu")
    o_part = gl.arange(0, 64 * ROWS, _flat(gl.zeros([64, ROWS], gl.float32, SUMS)).type.layout)
    for i in range(i_program - i_first, BLOCK_M // ROWS, programs):
        p_rows = _part_of(p_parts, i_first, i_tile, steps, share, PART, BLOCK_M) + i * (64 * ROWS)
        b_sum = gl.load(p_rows + o_part, cache_modifier=".cg")
        for j in range(1, programs, 4):
            for ahead in gl.static_range(4):
                p_rows = _part_of(p_parts, i_first + j + ahead, i_tile, steps, share, PART, BLOCK_M) + i * (64 * ROWS)
                there = j + ahead + o_part * 0 < programs
                b_sum += gl.load(p_rows + o_part, mask=there, other=0.0, cache_modifier=".cg")
        b_eights = gl.permute(gl.reshape(b_sum, [ROWS // 8, 64, 8]), [1, 0, 2])
        b_y = _result(gl.reshape(b_eights, [64, ROWS]), p_bias, o_n, p_out.dtype.element_ty, HAS_BIAS)
        _store(gl.convert_layout(b_y, OUT), p_out, o_n, o_m + i * ROWS, m, n)
    if gl.atomic_add(p_ticket, 1, sem="relaxed", scope="gpu") == 2 * programs - 1:
        gl.store(p_ticket, 0)


@gluon.jit
def _multiply(
    s_x, s_words, s_meta, s_full, s_empty, p_bias, p_out, p_parts, p_tickets, m, n, steps, share, total,
    PART: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SWATH: gl.constexpr,
    SHARED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The PART-th 64 of the 256 outputs of each of this program's tiles, by four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    rows = gl.cdiv(m, BLOCK_M)
    tiles_n = n // 256
    first = gl.program_id(0) * share
    last = gl.minimum(first + share, total)
    stage = 0
    phase = 0
    for i_tile in range(first // steps, gl.cdiv(last, steps)):
        begin = gl.maximum(first - i_tile * steps, 0)
        end = gl.minimum(last - i_tile * steps, steps)
        b_acc = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
        for _ in range(begin, end):
            mbarrier.wait(s_full.index(stage), phase)
            b_w = _weights(s_words.index(stage), s_meta.index(stage), PART, LEFT, SCALE, p_out.dtype.element_ty)
            running = warpgroup_mma(b_w, s_x.index(stage).permute((1, 0)), b_acc, is_async=True)
            b_acc, b_w = warpgroup_mma_wait(0, deps=[running, b_w])  # the registers of b_w are not free before
            mbarrier.arrive(s_empty.index(stage), count=1)
            stage, phase = _next(stage, phase, STAGES)
        whole = True
        if SHARED:
            whole = end - begin == steps
            if not whole:
                p_part = _part_of(p_parts, gl.program_id(0), i_tile, steps, share, PART, BLOCK_M)
                b_flat = _flat(b_acc)
                gl.store(p_part + gl.arange(0, 64 * BLOCK_M, b_flat.type.layout), b_flat)
                thread_barrier()
                i_first = i_tile * steps // share
                gl.atomic_add(p_tickets + i_first * 4 + PART, 1, sem="acq_rel", scope="gpu")
        if whole:
            i_n, i_m = _place(i_tile, rows, tiles_n, SWATH)
            o_n = i_n * 256 + 64 * PART
            b_y = _result(b_acc, p_bias, o_n, p_out.dtype.element_ty, HAS_BIAS)
            _store(gl.convert_layout(b_y, OUT), p_out, o_n, i_m * BLOCK_M, m, n)
    if SHARED:
        for i in range(2):
            i_tile = first // steps if i == 0 else (last - 1) // steps
            begin = gl.maximum(first - i_tile * steps, 0)
            end = gl.minimum(last - i_tile * steps, steps)
            # The first tile is this program's first place unless it begins here, the last one is its second place.
            mine = (begin > 0) if i == 0 else (begin == 0)
            if mine and end - begin < steps:
                i_n, i_m = _place(i_tile, rows, tiles_n, SWATH)
                _join(
                    p_parts, p_tickets, p_bias, p_out, i_tile, i_n * 256 + 64 * PART, i_m * BLOCK_M, m, n, steps,
                    share, total, PART, BLOCK_M, HAS_BIAS,
                )  # fmt: skip


@gluon.jit
def _load(
    s_x, s_words, s_meta, s_full, s_empty, x, words, meta, m, n, steps, share, total, GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SWATH: gl.constexpr,
):  # fmt: skip
    """What every step needs, as soon as all groups have done with what lay there before; those of the next tile too,
    while the last one is written out."""
    rows = gl.cdiv(m, BLOCK_M)
    first = gl.program_id(0) * share
    stage = 0
    phase = 1
    last = gl.minimum(first + share, total)
    for i_tile in range(first // steps, gl.cdiv(last, steps)):
        i_n, i_m = _place(i_tile, rows, n // 256, SWATH)
        for i in range(gl.maximum(first - i_tile * steps, 0), gl.minimum(last - i_tile * steps, steps)):
            s_now = s_full.index(stage)
            i_group = 0 if GROUP == 0 else i * 64 // GROUP
            mbarrier.wait(s_empty.index(stage), phase)
            mbarrier.expect(s_now, x.block_type.nbytes + words.block_type.nbytes + meta.block_type.nbytes)
            tma.async_copy_global_to_shared(words, [i_n * 4, i * 16, 0], s_now, s_words.index(stage))
            tma.async_copy_global_to_shared(meta, [i_group, i_n * 256], s_now, s_meta.index(stage))
            tma.async_copy_global_to_shared(x, [i_m * BLOCK_M, i * 64], s_now, s_x.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["m", "share"])
def wide_kernel(
    x, words, meta, p_bias, p_out, p_parts, p_tickets, m, n, k, share,
    GROUP: gl.constexpr, SCALE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SWATH: gl.constexpr,
    SHARED: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program i takes steps [i * share, (i + 1) * share) of those that all tiles have, one tile's after another's
    ("stream-K", Osama et al., PPoPP 2023): 64 inputs of 256 outputs and BLOCK_M rows of x each. With SHARED, tiles need
    not end where programs do. x, words and meta are descriptors (see `wide_launcher`); p_parts float32 [programs, 2, 4,
    64 * BLOCK_M]; p_tickets int32 [programs, 4], 0 before and after."""
    s_x = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 64], x.layout)
    s_words = gl.allocate_shared_memory(gl.int16, [STAGES, 4, 16, 64], words.layout)
    s_meta = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 256], meta.layout)
    s_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(s_empty.index(i), count=4)
    fence_async_shared()
    if PDL:
        gdc_wait()  # see `overlap.wait_for_earlier`
    steps = k // 64
    total = n // 256 * gl.cdiv(m, BLOCK_M) * steps
    gl.warp_specialize(
        [
            (_multiply, (s_x, s_words, s_meta, s_full, s_empty, p_bias, p_out, p_parts, p_tickets, m, n, steps, share,
                         total, gl.constexpr(0), SCALE, BLOCK_M, STAGES, SWATH, SHARED, HAS_BIAS)),
            (_multiply, (s_x, s_words, s_meta, s_full, s_empty, p_bias, p_out, p_parts, p_tickets, m, n, steps, share,
                         total, gl.constexpr(1), SCALE, BLOCK_M, STAGES, SWATH, SHARED, HAS_BIAS)),
            (_multiply, (s_x, s_words, s_meta, s_full, s_empty, p_bias, p_out, p_parts, p_tickets, m, n, steps, share,
                         total, gl.constexpr(2), SCALE, BLOCK_M, STAGES, SWATH, SHARED, HAS_BIAS)),
            (_multiply, (s_x, s_words, s_meta, s_full, s_empty, p_bias, p_out, p_parts, p_tickets, m, n, steps, share,
                         total, gl.constexpr(3), SCALE, BLOCK_M, STAGES, SWATH, SHARED, HAS_BIAS)),
            (_load, (s_x, s_words, s_meta, s_full, s_empty, x, words, meta, m, n, steps, share, total, GROUP, BLOCK_M,
                     STAGES, SWATH)),
        ],
        [4, 4, 4, 1],
        [GROUP_REGISTERS, GROUP_REGISTERS, GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
