"""FP8 experts as one grouped op beside each expert's own linear."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fp8_files import pack_block, pack_tensor
from qengine.plugin import DeviceInfo, ExpertPairs, LinearOp, LinearShard, LinearSpec
from qengine_fp8.backend import Fp8Scheme
from qengine_fp8.headers import Stored
from qengine_fp8.kernels import Fp8CudaExperts, bind_cuda
from qengine_kernels.fp8_linear import stack_shards
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.reference import grouped_reference
from qengine_kernels.testing import assert_close, relative_error

EXPERTS, K, N, TOKENS, TOP_K = 4, 160, 192, 7, 2
SCHEMES = {
    "tensor": (pack_tensor, Fp8Scheme(Stored("tensor", "weight_scale", 0))),
    "block": (pack_block, Fp8Scheme(Stored("block", "weight_scale_inv", 2, (128, 128)))),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_grouped_equals_each_expert(kind: str, device: torch.device) -> None:
    """Two fused shards an expert, of very different size; the second begins in the middle of a block."""
    pack, scheme = SCHEMES[kind]

    def bind_one(shards: Sequence[LinearShard]) -> LinearOp:
        weight = stack_shards(scheme.read(shards, device), scheme.stored.block, device)
        return bind_cuda(weight, None, [], DeviceInfo("cuda"), torch.float32, False)

    op = Fp8CudaExperts(LinearSpec("e", K, 2 * N), EXPERTS, Chip.of(device), bind_one)
    alone, meanings = [], []
    for e in range(EXPERTS):
        packed = [pack(torch.randn(N, K) * f * (e + 1)) for f in (1.0, 0.01)]
        shards = [LinearShard(LinearSpec(f"e.{e}.{i}", K, N), tensors) for i, (tensors, _) in enumerate(packed)]
        alone.append(op.bind(e, shards))
        meanings.append(torch.cat([meaning for _, meaning in packed]))
    dense = torch.stack(meanings).to(device)
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    ids, order = chosen.flatten().sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(EXPERTS + 1)).int().to(device)
    pairs = ExpertPairs(order.to(device), offsets, torch.rand(TOKENS * TOP_K, device=device), TOP_K)
    x, rows = torch.randn(TOKENS, K, device=device), torch.randn(TOKENS * TOP_K, K, device=device)
    got, want = op(x, pairs, False), grouped_reference(x, dense, pairs.order, offsets, TOP_K)
    for part in (slice(0, N), slice(N, 2 * N)):
        assert_close("experts", got[:, part], want[:, part], 1e-5)
    want = grouped_reference(rows, dense, pairs.order, offsets, TOP_K, pairs.weights)
    assert_close("combined", op(rows, pairs, True), want, 1e-5)
    wrong = grouped_reference(x, dense.roll(1, 0), pairs.order, offsets, TOP_K)
    assert relative_error(got, wrong) > 0.1
    for e, one in enumerate(alone):
        assert_close(f"expert {e}", one(x), x @ dense[e].t(), 1e-5)
        assert "all experts at once" in one.kernel
        held = one.buffers()
        assert held["codes"].data_ptr() == op.experts.stack.tensors["codes"][e].data_ptr()


def test_no_grouped_op_on_a_cpu_or_with_biases() -> None:
    scheme = SCHEMES["tensor"][1]
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert scheme.bind_experts(LinearSpec("e", K, N), 4, cpu, DeviceInfo("cpu"), torch.float32) is None
    assert scheme.bind_experts(LinearSpec("e", K, N, True), 4, cuda, DeviceInfo("cuda"), torch.half) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCHEMES)
def test_bound_through_the_contract(kind: str) -> None:
    pack, scheme = SCHEMES[kind]
    device = torch.device("cuda")
    op = scheme.bind_experts(LinearSpec("e", K, N), 2, device, DeviceInfo("cuda", capability=(9, 0)), torch.half)
    assert op is not None
    x = torch.randn(3, K, device=device).half()
    for e in range(2):
        tensors, meaning = pack(torch.randn(N, K))
        one = op.bind(e, [LinearShard(LinearSpec(f"e.{e}", K, N), tensors)])
        assert_close(f"expert {e}", one(x), x.float() @ meaning.to(device).t(), 2e-3)
