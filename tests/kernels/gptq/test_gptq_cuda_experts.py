"""GPTQ experts as one grouped op: every width, maps of their own, and experts that don't fit the stack."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gptq_files import Style, quantize
from qengine.plugin import DeviceInfo, ExpertPairs, LinearOp, LinearShard, LinearSpec
from qengine_gptq.backend import GptqScheme
from qengine_gptq.kernels import UNLIKE, GptqCudaExperts, GptqCudaLinear
from qengine_gptq.shards import decode, stack
from qengine_gptq.zeros import ZeroRule
from qengine_kernels.launch import Chip
from qengine_kernels.moe_gemm.reference import grouped_reference
from qengine_kernels.testing import KernelMismatch, assert_close

K, N, TOKENS, TOP_K = 96, 64, 7, 2


def pairs_for(experts: int, device: torch.device) -> ExpertPairs:
    chosen = torch.stack([torch.randperm(experts)[:TOP_K] for _ in range(TOKENS)])
    ids, order = chosen.flatten().sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(experts + 1)).int()
    return ExpertPairs(order.to(device), offsets.to(device), torch.rand(TOKENS * TOP_K, device=device), TOP_K)


def build(
    styles: list[Style], device: torch.device, ordered: bool
) -> tuple[GptqCudaExperts, list[LinearOp], torch.Tensor]:
    """The grouped op, each expert's own, and the dense meaning [E, N, K]."""
    style = styles[0]
    rule = ZeroRule(style.stored, style.symmetric)  # type: ignore[arg-type]

    def bind_one(shards: Sequence[LinearShard]) -> LinearOp:
        parts = [decode(s, style.bits, style.group, rule, ordered, device)[0] for s in shards]
        return GptqCudaLinear(stack(parts)[0], None, style.symmetric, torch.float32, DeviceInfo("cuda"))

    op = GptqCudaExperts(LinearSpec("e", K, N), len(styles), ordered, Chip.of(device), bind_one)
    alone, meanings = [], []
    for e, own in enumerate(styles):
        tensors, meaning = quantize(torch.randn(N, K), own)
        alone.append(op.bind(e, [LinearShard(LinearSpec(f"e.{e}", K, N), tensors)]))
        meanings.append(meaning)
    return op, alone, torch.stack(meanings).to(device)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_grouped_equals_each_expert(bits: int, shuffled: bool, device: torch.device) -> None:
    # one expert's map is the plain one: it gets an identity, so that all experts are alike
    styles = [Style(bits, 32, False, "gptq_v2", shuffle=e if shuffled and e else None) for e in range(4)]
    op, alone, dense = build(styles, device, ordered=shuffled)
    pairs = pairs_for(4, device)
    x, y = torch.randn(TOKENS, K, device=device), torch.randn(TOKENS * TOP_K, K, device=device)
    assert len(pairs.order) <= op.most_pairs
    want = grouped_reference(x, dense, pairs.order, pairs.offsets, TOP_K)
    assert_close("up", op(x, pairs, False), want, 1e-5)
    want_down = grouped_reference(y, dense, pairs.order, pairs.offsets, TOP_K, pairs.weights)
    assert_close("down", op(y, pairs, True), want_down, 1e-5)
    wrong = grouped_reference(x, dense.roll(1, 0), pairs.order, pairs.offsets, TOP_K)
    with pytest.raises(KernelMismatch):
        assert_close("the next expert's weights", op(x, pairs, False), wrong, 0.1)
    for e, one in enumerate(alone):
        assert_close(f"expert {e}", one(x), x @ dense[e].t(), 1e-5)
        assert "all experts at once" in one.kernel and not one.notes


def test_experts_hold_views_and_planned_bytes(device: torch.device) -> None:
    styles = [Style(4, 32, shuffle=e) for e in range(3)]
    op, alone, _ = build(styles, device, ordered=True)
    planned = GptqScheme(4, 32, ZeroRule("gptq", True), True)
    size = planned.resident_bytes(LinearSpec("e", K, N), DeviceInfo("cuda", capability=(9, 0)), torch.float32)
    for e, one in enumerate(alone):
        assert one.nbytes == size
        for name, held in one.buffers().items():
            stacked = op.experts.stack.tensors["columns" if name == "order" else name]
            assert held.data_ptr() == stacked[e].data_ptr()


def test_an_expert_unlike_the_others_runs_alone(device: torch.device) -> None:
    """Shuffled inputs under a config that says there are none: right one after the other, and said."""
    styles = [Style(4, 32), Style(4, 32, shuffle=1), Style(4, 32)]
    op, alone, dense = build(styles, device, ordered=False)
    assert op.most_pairs == 0
    assert [(name, text) for one in alone for name, text in one.notes] == [("e.1", UNLIKE)]
    x = torch.randn(3, K, device=device)
    for e, one in enumerate(alone):
        assert_close(f"expert {e}", one(x), x @ dense[e].t(), 1e-5)


def test_no_grouped_op_on_a_cpu_or_with_biases() -> None:
    scheme, info = GptqScheme(4, 32, ZeroRule()), DeviceInfo("cpu")
    spec = LinearSpec("e", K, N)
    assert scheme.bind_experts(spec, 4, torch.device("cpu"), info, torch.float32) is None
    biased = LinearSpec("e", K, N, True)
    assert scheme.bind_experts(biased, 4, torch.device("cuda"), DeviceInfo("cuda"), torch.float16) is None
