"""The meaning of a grouped GEMM in plain torch."""

from __future__ import annotations

import torch


def grouped_reference(
    x: torch.Tensor,
    dense: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    top_k: int,
    pair_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [P, N] as `grouped_matmul` gives it; dense float32 [E, N, K] are the experts' weights."""
    x = x.float()
    out = torch.empty(len(order), dense.shape[1], device=x.device)
    for expert, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        for i in range(begin, end):
            pair = int(order[i])
            if pair_weights is None:
                out[i] = dense[expert] @ x[pair // top_k]
            else:
                out[pair] = dense[expert] @ x[i] * pair_weights[pair]
    return out
