"""Makes FP8 tensors from dense weights: per output channel, scale = largest magnitude / 448."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qengine.plugin import LinearSpec, Quantizer
from qengine_kernels.fp8_linear import quantize_weight

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
    """Weights as vLLM's and AutoFP8's readers take them, with dynamic activations."""

    def accepts(self, spec: LinearSpec) -> str | None:
        return stays_dense(spec)

    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [out, in] -> weight F8_E4M3 [out, in], weight_scale F32 [out, 1]. Raises ValueError for a weight that
        is not finite."""
        try:
            shard = quantize_weight(weight.detach(), torch.device("cpu"))
        except ValueError as e:
            raise ValueError(f"{spec.name}: {e}") from e
        return {"weight": shard.codes.view(torch.float8_e4m3fn), "weight_scale": shard.scale}

    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": list(skipped)}
