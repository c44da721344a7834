"""The meaning of activation quantisation in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch


def quantize_rows_reference(
    x: torch.Tensor,
    encode: Callable[[torch.Tensor], torch.Tensor],
    largest: float,
    *,
    block: int | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `qengine_kernels.quantize_rows.quantize_rows`, with a torch function for `encode`."""
    m, k = x.shape
    x = x.float()
    if scale is not None:
        return encode(x / scale), scale.float().reshape(1, 1).expand(m, 1)
    width = k if block is None else block
    padded = torch.nn.functional.pad(x, (0, -k % width)).view(m, -1, width)
    scales = padded.abs().amax(-1) / largest
    scales = torch.where(scales > 0, scales, 1.0)
    codes = encode(padded / scales[..., None]).view(m, -1)[:, :k]
    return codes.contiguous(), scales
