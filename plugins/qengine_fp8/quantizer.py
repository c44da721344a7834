"""Makes FP8 tensors from dense weights: per output channel or per block, scale = largest magnitude / 448."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from qengine.plugin import LinearSpec, Quantizer
from qengine_kernels.fp8_linear import quantize_weight

BLOCK = 128
LARGEST = 448.0
LEAST_SCALE = 2.0**-20
"""Of a block that is all zero."""
HEADS = ("lm_head", "embed_out", "output", "score")
ROUTERS = ("gate", "router", "shared_expert_gate")


def stays_dense(spec: LinearSpec) -> str | None:
    """Why a module is left in 16 bits, or None. Told by its name: a tied head carries that of its embedding."""
    last = spec.name.rpartition(".")[2]
    if last in HEADS or "emb" in last or last == "wte":
        return "the output head and embeddings stay 16-bit"
    if last in ROUTERS:
        return "routers stay 16-bit"
    return None


class Fp8Quantizer(Quantizer):
    """Weights as vLLM's and AutoFP8's readers take them, with dynamic activations. `granularity` "channel": one scale
    for each output; "block": one for BLOCK x BLOCK weights, as DeepSeek's files have them."""

    def __init__(self, granularity: str = "channel") -> None:
        if granularity not in ("channel", "block"):
            raise ValueError(f"granularity {granularity!r} is not supported by fp8; need: channel or block")
        self.granularity = granularity

    def accepts(self, spec: LinearSpec) -> str | None:
        return stays_dense(spec)

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [out, in] -> weight F8_E4M3 [out, in], weight_scale F32 [out, 1]. Raises ValueError for a weight that
        is not finite. Per block: weight_scale_inv F32 [blocks of outputs, blocks of inputs] in its place."""
        if self.granularity == "block":
            return blockwise(spec, weight.detach().to("cpu", torch.float32))
        try:
            shard = quantize_weight(weight.detach(), torch.device("cpu"))
        except ValueError as e:
            raise ValueError(f"{spec.name}: {e}") from e
        return {"weight": shard.codes.view(torch.float8_e4m3fn), "weight_scale": shard.scale}

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": list(skipped)}
        return config | ({"weight_block_size": [BLOCK, BLOCK]} if self.granularity == "block" else {})


def blockwise(spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight float32 [out, in] -> weight and weight_scale_inv, which multiplies, whatever its name says."""
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{spec.name}: weights are not finite")
    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = F.pad(weight, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    amax = padded.abs().unflatten(0, (rows, BLOCK)).unflatten(2, (columns, BLOCK)).amax((1, 3))
    scale = (amax / LARGEST).clamp_min(LEAST_SCALE)
    spread = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    codes = (weight / spread).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}
