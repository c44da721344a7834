"""Grouped experts in compressed-tensors' formats: the meaning of their tensors, and linears that are views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    headers,
    int_tensors,
    quant_config,
    weights,
)
from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearScheme, LinearShard, LinearSpec
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_compressed_tensors.experts import Fp8CudaExperts, Int8CudaExperts, PackedCudaExperts
from qengine_compressed_tensors.fp8 import Fp8Op, Fp8Scheme
from qengine_compressed_tensors.int8 import Int8Scheme
from qengine_compressed_tensors.integers import joined, same_order
from qengine_compressed_tensors.kernels import Int8CudaLinear, IntCudaLinear
from qengine_compressed_tensors.weight_only import WeightOnlyInt
from qengine_kernels.fp8_linear import stack_shards
from qengine_kernels.fp8_linear.cuda import Fp8CudaLinear
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.reference import grouped_reference
from qengine_kernels.testing import relative_error
from slotted_experts import same_in_slots

CPU = torch.device("cpu")
HOPPER = DeviceInfo("cuda", "", (9, 0))
EXPERTS, K, OUTS = 4, 128, (48, 48)

Make = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
PACKED: tuple[dict[str, Any], Make] = (
    quant_config(group_of(weights(4, "group", 32, symmetric=False))),
    lambda w: int_tensors(w, 4, 32, symmetric=False),
)
W8: tuple[dict[str, Any], Make] = (quant_config(group_of(weights(8, "channel"))), lambda w: int_tensors(w, 8, -1))
W3: tuple[dict[str, Any], Make] = (quant_config(group_of(weights(3, "group", 64))), lambda w: int_tensors(w, 3, 64))
INT8: tuple[dict[str, Any], Make] = (
    quant_config(group_of(weights(8, "channel"), inputs=INT8_DYNAMIC), form="int-quantized"),
    lambda w: int_tensors(w, 8, -1, layout="bytes"),
)
FP8: tuple[dict[str, Any], Make] = (
    quant_config(group_of(fp8_weights("channel"), inputs=FP8_DYNAMIC), form="float-quantized"),
    lambda w: fp8_tensors(w, "channel"),
)
BLOCK: tuple[dict[str, Any], Make] = (
    quant_config(group_of(fp8_weights("block", [32, 64])), form="float-quantized"),
    lambda w: fp8_tensors(w, "block", (32, 64)),
)
ORDERED = quant_config(group_of(weights(4, "group", 32, actorder="group")))
CASES = {"w4": PACKED, "w8": W8, "w3": W3, "int8": INT8, "fp8": FP8, "fp8-block": BLOCK}


def expert(config: dict[str, Any], make: Make) -> tuple[LinearScheme, list[LinearShard], torch.Tensor]:
    """(scheme, shards, float32 meaning) of one expert with random weights."""
    quant, shards, meaning = CompressedTensorsQuant.parse(config), [], []
    for i, n in enumerate(OUTS):
        tensors, dense = make(torch.randn(n, K) / K**0.5)
        shards.append(LinearShard(LinearSpec(f"m{i}", K, n), dict(tensors)))
        meaning.append(dense)
    scheme = quant.scheme_for(shards[0].spec, headers("m0", shards[0].tensors))
    assert scheme is not None
    return scheme, shards, torch.cat(meaning)


def pairs_of(tokens: int, device: torch.device) -> ExpertPairs:
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(tokens)]).flatten()  # the last one is idle
    ids, order = chosen.sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(EXPERTS + 1), out_int32=True)
    return ExpertPairs(order.to(device), offsets.to(device), torch.rand(2 * tokens).to(device), 2)


def fill(op: ExpertsOp, made: list[tuple[LinearScheme, list[LinearShard], torch.Tensor]]) -> list[LinearOp]:
    linears = [op.bind(e, shards) for e, (_, shards, _) in enumerate(made)]
    stored = {name: t.untyped_storage().data_ptr() for name, t in linears[0].buffers().items()}
    assert stored == {name: t.untyped_storage().data_ptr() for name, t in linears[3].buffers().items()}
    return linears


def check(op: ExpertsOp, dense: torch.Tensor, dtype: torch.dtype, device: torch.device, limit: float) -> None:
    for tokens in (1, 6, 20):
        pairs = pairs_of(tokens, device)
        places = (pairs.order.cpu(), pairs.offsets.cpu(), 2)
        x = torch.randn(tokens, K).to(dtype)
        got = op(x.to(device), pairs, False)
        assert got.dtype is dtype
        assert relative_error(got, grouped_reference(x, dense, *places)) < limit
        assert relative_error(got, grouped_reference(x, dense.roll(1, 0), *places)) > 0.3
        rows = torch.randn(2 * tokens, K).to(dtype)
        got = op(rows.to(device), pairs, True)
        assert relative_error(got, grouped_reference(rows, dense, *places, pairs.weights.cpu())) < limit
        if tokens == 6:
            assert same_in_slots(op, x.to(device), pairs, False, [2, 0, 1])


def on_the_host(scheme: LinearScheme, spec: LinearSpec) -> ExpertsOp:
    """As `bind_experts`, with tensors where the interpreter reads them."""
    chip = Chip.of(CPU)
    if isinstance(scheme, WeightOnlyInt):
        s = scheme.stored

        def packed(shards: Sequence[LinearShard]) -> LinearOp:
            parts = [s.decode(shard.spec, shard.tensors, CPU) for shard in shards]
            assert same_order(parts)
            return IntCudaLinear(joined(parts), s.bits, s.middle, s.group_size, None, torch.float32, HOPPER)

        return PackedCudaExperts(spec, EXPERTS, s.reordered, chip, packed)
    if isinstance(scheme, Int8Scheme):
        stored = scheme.stored

        def int8(shards: Sequence[LinearShard]) -> LinearOp:
            w = joined([stored.decode(shard.spec, shard.tensors, CPU) for shard in shards])
            codes = (w.codes - 128).view(torch.int8)
            return Int8CudaLinear(codes, w.scales[:, 0].float(), None, None, torch.float32, HOPPER)

        return Int8CudaExperts(spec, EXPERTS, chip, int8)
    assert isinstance(scheme, Fp8Scheme)
    fp8_scheme = scheme

    def fp8(shards: Sequence[LinearShard], place: Any) -> LinearOp:
        parts = [fp8_scheme._shard(shard) for shard in shards]
        weight = place(stack_shards(parts, fp8_scheme.stored.block, CPU))
        return Fp8Op(Fp8CudaLinear(weight, None, torch.float32, chip, native=False))

    return Fp8CudaExperts(spec, EXPERTS, chip, fp8)


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the same is tested there")
    made = [expert(*CASES[name]) for _ in range(EXPERTS)]
    spec = LinearSpec("m", K, sum(OUTS))
    op = on_the_host(made[0][0], spec)
    linears = fill(op, made)
    dense = torch.stack([meaning for _, _, meaning in made])
    check(op, dense, torch.float32, CPU, 1e-5)
    planned = made[0][0].resident_bytes(spec, HOPPER, torch.float32)
    x = torch.randn(5, K)
    for e, linear in enumerate(linears):
        assert abs(linear.nbytes - planned) <= 0.05 * planned and "all experts at once" in linear.kernel
        assert relative_error(linear(x), x @ dense[e].t()) < (2e-2 if name == "int8" else 1e-5)


def ordered(same: bool) -> list[tuple[LinearScheme, list[LinearShard], torch.Tensor]]:
    """Experts that sort their inputs each in its own way; `same`: gate and up alike."""
    made = []
    for _ in range(EXPERTS):
        maps = [(torch.arange(K) // 32)[torch.randperm(K)] for _ in OUTS]
        left = iter([maps[0]] * 2 if same else maps)
        made.append(expert(ORDERED, lambda w, left=left: int_tensors(w, 4, 32, g_idx=next(left))))  # type: ignore[misc]
    return made


def test_each_expert_sorts_its_inputs_in_its_own_way() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the same is tested there")
    made = ordered(True)
    op = on_the_host(made[0][0], LinearSpec("m", K, sum(OUTS)))
    fill(op, made)
    check(op, torch.stack([meaning for _, _, meaning in made]), torch.float32, CPU, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CASES, "ordered"])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = torch.cuda.get_device_properties(0)
    info = DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)
    device, spec = torch.device("cuda"), LinearSpec("m", K, sum(OUTS))
    made = ordered(True) if name == "ordered" else [expert(*CASES[name]) for _ in range(EXPERTS)]
    op = made[0][0].bind_experts(spec, EXPERTS, device, info, dtype)
    assert op is not None
    fill(op, made)
    check(op, torch.stack([meaning for _, _, meaning in made]), dtype, device, 1e-2)


@pytest.mark.gpu
def test_shards_that_sort_differently_run_one_by_one() -> None:
    p = torch.cuda.get_device_properties(0)
    info = DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)
    made = ordered(False)
    op = made[0][0].bind_experts(LinearSpec("m", K, sum(OUTS)), EXPERTS, torch.device("cuda"), info, torch.float16)
    assert op is not None
    linears = [op.bind(e, shards) for e, (_, shards, _) in enumerate(made)]
    assert op.most_pairs == 0 and "one after the other" in linears[0].notes[-1][1]


@pytest.mark.parametrize("name", CASES)
def test_no_grouped_op_on_a_cpu_or_with_biases(name: str) -> None:
    scheme, _, _ = expert(*CASES[name])
    assert scheme.bind_experts(LinearSpec("m", 64, 64), 4, CPU, DeviceInfo("cpu"), torch.bfloat16) is None
    assert scheme.bind_experts(LinearSpec("m", 64, 64, bias=True), 4, torch.device("cuda"), HOPPER, torch.half) is None
