"""A format's grouped GEMM over experts against each expert's weight in float32."""

from __future__ import annotations

import torch

from qengine.conformance.kit import need
from qengine.conformance.places import Place
from qengine.conformance.weight_numbers import ROUNDED
from qengine.conformance.weight_subject import Stored
from qengine.plugin import ExpertPairs, LinearShard
from qengine_kernels.testing import relative_error

EXPERTS, TOKENS, TOP_K = 4, 9, 2


def experts_agree(own: Stored, place: Place, dtype: torch.dtype, limit: float) -> str:
    """Returns the kernel. Raises CheckFailed for a wrong product and LookupError where nothing is grouped."""
    if not own.scheme.capability(place.info, dtype):
        raise LookupError("refused here")
    grouped = own.scheme.bind_experts(own.spec, EXPERTS, place.device, place.info, dtype)
    if grouped is None:
        raise LookupError("experts run one by one")
    ops = [grouped.bind(e, [LinearShard(own.spec, own.copied())]) for e in range(EXPERTS)]
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(TOKENS, own.spec.in_features, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).flatten()
    ids, order = chosen.sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(EXPERTS + 1), out_int32=True)
    weights = torch.rand(TOKENS * TOP_K, generator=generator)
    pairs = ExpertPairs(order.to(place.device), offsets.to(place.device), weights.to(place.device), TOP_K)
    want = x.float()[order // TOP_K] @ own.weight.T
    limit = limit + ROUNDED if any(op.rounds_activations for op in ops) else limit
    error = relative_error(grouped(x.to(place.device), pairs, False), want)
    need(error <= limit, f"experts of {own} are off by {error:.2g}, need <= {limit:.2g}")
    return ops[0].kernel
