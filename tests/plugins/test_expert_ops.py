"""Grouped experts of the built-in formats: the meaning of their tensors, the bytes of the plan, linears as views."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearScheme, LinearShard, LinearSpec
from qengine_awq.backend import AwqScheme
from qengine_awq.kernels import AwqCudaExperts, AwqCudaLinear
from qengine_awq.quantizer import AwqQuantizer
from qengine_dense.backend import DenseScheme
from qengine_dense.experts import DenseCudaExperts
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.reference import grouped_reference
from qengine_kernels.testing import relative_error
from slotted_experts import by_pair, in_slots, over_slots, same_in_slots

CPU, CPU_INFO = torch.device("cpu"), DeviceInfo("cpu")
EXPERTS, HIDDEN, INNER = 4, 128, 48


def shards_of(scheme: LinearScheme, outs: Sequence[int], inputs: int) -> list[LinearShard]:
    shards = []
    for n in outs:
        spec, weight = LinearSpec(f"m{n}", inputs, n), torch.randn(n, inputs) / inputs**0.5
        tensors = {"weight": weight}
        if isinstance(scheme, AwqScheme):
            tensors = AwqQuantizer(scheme.group_size, scheme.zero_point).quantize(spec, weight)
        shards.append(LinearShard(spec, tensors))
    return shards


def pairs_of(tokens: int, device: torch.device) -> ExpertPairs:
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(tokens)]).flatten()  # the last one is idle
    ids, order = chosen.sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(EXPERTS + 1), out_int32=True)
    # At most a half each: the wrong control takes them for ones, and one pair's own could lie close to that.
    return ExpertPairs(order.to(device), offsets.to(device), torch.rand(2 * tokens).div(2).to(device), 2)


def check(scheme: LinearScheme, op: ExpertsOp, outs: Sequence[int], info: DeviceInfo, dtype: torch.dtype) -> None:
    """Fill the op, then compare both directions and every expert's own linear with the dequantised weights."""
    inputs, limit = op.in_features, {torch.float32: 1e-5}.get(dtype, 1e-2)
    meaning, linears = [], []
    for e in range(EXPERTS):
        shards = shards_of(scheme, outs, inputs)
        meaning.append(torch.cat([scheme.dequantize(s.spec, s.tensors) for s in shards]))
        linears.append(op.bind(e, shards))
    dense = torch.stack(meaning)
    whole = LinearSpec("m", inputs, sum(outs))
    device = next(iter(linears[0].buffers().values())).device
    for linear in linears:
        assert linear.nbytes == scheme.of_experts().resident_bytes(whole, info, dtype)
        assert "all experts at once up to" in linear.kernel
    stored = {name: t.untyped_storage().data_ptr() for name, t in linears[0].buffers().items()}
    assert stored == {name: t.untyped_storage().data_ptr() for name, t in linears[3].buffers().items()}
    for tokens in (1, 3, 20):
        pairs = pairs_of(tokens, device)
        on_cpu = (dense, pairs.order.cpu(), pairs.offsets.cpu(), 2)
        x = torch.randn(tokens, inputs).to(dtype)
        got = op(x.to(device), pairs, False)
        assert got.dtype == dtype
        assert relative_error(got, grouped_reference(x, *on_cpu)) < limit
        assert relative_error(got, grouped_reference(x, dense.roll(1, 0), *on_cpu[1:])) > 0.1
        rows = torch.randn(2 * tokens, inputs).to(dtype)
        got = op(rows.to(device), pairs, True)
        assert relative_error(got, grouped_reference(rows, *on_cpu, pairs.weights.cpu())) < limit
        assert relative_error(got, grouped_reference(rows, *on_cpu, torch.ones(2 * tokens))) > 0.1
        if tokens != 3:
            held = [2, 0, 1]  # the idle one has no slot
            assert same_in_slots(op, x.to(device), pairs, False, held)
            assert same_in_slots(op, rows.to(device), pairs, True, held)
            wrong = in_slots(over_slots(op, [0, 2, 1]), x.to(device), pairs, False, held)
            assert not torch.equal(wrong, by_pair(op, x.to(device), pairs, False))
    x = torch.randn(5, inputs).to(dtype)
    for e, linear in enumerate(linears):
        assert relative_error(linear(x.to(device)), x.float() @ dense[e].t()) < limit


@pytest.mark.parametrize("scheme", [AwqScheme(64, True), AwqScheme(-1, False)], ids=lambda s: s.format)
def test_awq_in_the_interpreter(scheme: AwqScheme) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the same is tested there")

    def bind_one(shards: Sequence[LinearShard]) -> AwqCudaLinear:
        leaves = {leaf: torch.cat([s.tensors[leaf] for s in shards], 1) for leaf in shards[0].tensors}
        words, zeros, scales = leaves["qweight"], leaves.get("qzeros"), leaves["scales"]
        return AwqCudaLinear(words, zeros, scales, None, scheme.group_size, torch.float32, CPU_INFO)

    spec = LinearSpec("m", HIDDEN, 2 * INNER)
    op = AwqCudaExperts(spec, EXPERTS, Chip.of(CPU), bind_one)
    check(scheme, op, (INNER, INNER), DeviceInfo("cuda", "", (9, 0)), torch.float32)


def test_dense_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the same is tested there")
    op = DenseCudaExperts(LinearSpec("m", INNER, HIDDEN), EXPERTS, CPU, torch.float32)
    check(DenseScheme(), op, (HIDDEN,), DeviceInfo("cuda", "", (9, 0)), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [AwqScheme(64, True), AwqScheme(-1, False), DenseScheme()], ids=lambda s: s.format)
def test_on_a_gpu(scheme: LinearScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = torch.cuda.get_device_properties(0)
    info = DeviceInfo("cuda", p.name, (p.major, p.minor), p.shared_memory_per_block_optin, p.total_memory)
    for outs, inputs in (((INNER, INNER), HIDDEN), ((HIDDEN,), 64)):
        op = scheme.bind_experts(LinearSpec("m", inputs, sum(outs)), EXPERTS, torch.device("cuda"), info, dtype)
        assert op is not None
        check(scheme, op, outs, info, dtype)


@pytest.mark.parametrize("scheme", [AwqScheme(64, True), DenseScheme()], ids=lambda s: s.format)
def test_no_grouped_op_on_a_cpu_or_with_biases(scheme: LinearScheme) -> None:
    assert scheme.bind_experts(LinearSpec("m", 64, 64), 4, CPU, CPU_INFO, torch.bfloat16) is None
    hopper = DeviceInfo("cuda", "", (9, 0))
    assert scheme.bind_experts(LinearSpec("m", 64, 64, bias=True), 4, torch.device("cuda"), hopper, torch.half) is None
