"""The two functions of autoawq-kernels' extension that are used, in plain torch with the same arguments."""

from __future__ import annotations

import torch

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _codes(words: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1)
    out = torch.empty_like(nibbles)
    out[..., ORDER] = nibbles
    return out.flatten(1).float()


def dequantize_weights_cuda(
    kernel: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, split_k: int, thx: int, thy: int, dbg: bool
) -> torch.Tensor:
    """float16 [K, N]."""
    assert scales.dtype is torch.float16
    group = kernel.shape[0] // scales.shape[0]
    wide = [t.repeat_interleave(group, 0) for t in (_codes(zeros), scales.float())]
    return ((_codes(kernel) - wide[0]) * wide[1]).half()


def gemm_forward_cuda(
    x: torch.Tensor, kernel: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, split_k_iters: int
) -> torch.Tensor:
    """float16 [M, N]."""
    assert x.dtype is torch.float16 and x.is_contiguous() and split_k_iters == 8
    return (x.float() @ dequantize_weights_cuda(kernel, scales, zeros, 0, 0, 0, False).float()).half()
