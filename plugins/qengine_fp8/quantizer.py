"""Makes FP8 tensors from dense weights: per output channel or per block, scale = largest magnitude / 448.

Each granularity is written in the layout in which other engines read it: blocks as DeepSeek's files and transformers'
`fp8` method have them, channels as compressed-tensors (the `fp8` method's readers know one scale a tensor only).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from qengine.plugin import CalibratedQuantizer, InputStats, LinearSpec, Quantizer
from qengine_kernels.fp8_linear import quantize_weight

BLOCK = 128
LARGEST = 448.0
LEAST_SCALE = 2.0**-20
"""Of a block or of activations that are all zero."""
HEADS = ("lm_head", "embed_out", "output", "score")
ROUTERS = ("gate", "router", "shared_expert_gate")
GRANULARITIES, ACTIVATIONS = ("channel", "block"), ("dynamic", "static")


def stays_dense(spec: LinearSpec) -> str | None:
    """Why a module is left in 16 bits, or None. Told by its name: a tied head carries that of its embedding."""
    last = spec.name.rpartition(".")[2]
    if last in HEADS or "emb" in last or last == "wte":
        return "the output head and embeddings stay 16-bit"
    if last in ROUTERS:
        return "routers stay 16-bit"
    return None


class Fp8Quantizer(Quantizer):
    """Weights with activations that are rounded as they come. `granularity` "channel": one scale for each output;
    "block": one for BLOCK x BLOCK weights."""

    activations: ClassVar[str] = "dynamic"

    def __init__(self, granularity: str = "channel") -> None:
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity {granularity!r} is not supported by fp8; need: {' or '.join(GRANULARITIES)}")
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
        if self.granularity == "block":
            return {
                "quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": list(skipped),
                "weight_block_size": [BLOCK, BLOCK],
            }  # fmt: skip
        static = self.activations == "static"
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "strategy": "channel", "dynamic": False},
            "input_activations": {**number, "strategy": "tensor" if static else "token", "dynamic": not static},
            "output_activations": None,
            "format": "float-quantized",
        }
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(skipped), "kv_cache_scheme": None,
        }  # fmt: skip


class StaticFp8Quantizer(Fp8Quantizer, CalibratedQuantizer):
    """Weights per channel and one scale for each linear's activations, from the largest that calibration saw."""

    activations = "static"
    wants_moment = False
    cold_rule = (
        "their weights are rounded as all are, their inputs get the scale of that expert of the layer which saw the "
        "largest"
    )

    def __init__(self, granularity: str = "channel") -> None:
        super().__init__(granularity)
        if granularity != "channel":
            raise ValueError(f"static activations go with granularity channel, not {granularity}")

    def quantize_calibrated(self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats) -> dict[str, torch.Tensor]:
        """As `quantize`, with input_scale F32 [1]."""
        amax = stats.amax.max().float().cpu()
        if not bool(torch.isfinite(amax)):
            raise ValueError(f"{spec.name}: inputs are not finite")
        scale = (amax / LARGEST).clamp_min(LEAST_SCALE).reshape(1)
        return self.quantize(spec, weight) | {"input_scale": scale}

    def quantize_cold(
        self, spec: LinearSpec, weight: torch.Tensor, relatives: InputStats | None
    ) -> dict[str, torch.Tensor]:
        """The activations' scale is that of the expert which saw the largest. Raises ValueError where none saw enough
        tokens."""
        if relatives is None:
            raise ValueError(
                f"{spec.name}: too few tokens came by, here and at the layer's other experts, for a static scale of "
                "activations; what would work: more text, or activations dynamic"
            )
        return self.quantize_calibrated(spec, weight, relatives)


def quantizer(granularity: str = "channel", activations: str = "dynamic") -> Fp8Quantizer:
    """Raises ValueError for options that are not known or do not go together."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations {activations!r} are not supported by fp8; need: {' or '.join(ACTIVATIONS)}")
    return StaticFp8Quantizer(granularity) if activations == "static" else Fp8Quantizer(granularity)


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
