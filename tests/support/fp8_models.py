"""TINY as FP8 checkpoints of every kind, and the logits that they mean, by transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_files import Packed, make_tiny_fp8, pack_block, pack_channel, pack_tensor

IDS = [72, 101, 108, 108, 111, 256, 3, 200]
PLAIN = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
STATIC = {**PLAIN, "activation_scheme": "static"}
BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
GPTQMODEL = {
    "quant_method": "fp8", "method": "fp8", "bits": 8, "group_size": -1, "format": "float8_e4m3fn",
    "checkpoint_format": "float8_e4m3fn", "weight_scale_semantics": "inverse", "lm_head": False, "desc_act": False,
}  # fmt: skip
EDGES = {"hidden_size": 192, "intermediate_size": 320, "num_key_value_heads": 1}
"""Blocks of 128 end short: 192 = 128 + 64 rows and columns, 64 rows of k and v, 320 = 2 * 128 + 64."""


def inverse(pack: Callable[[torch.Tensor], Packed]) -> Callable[[torch.Tensor], Packed]:
    """GPTQModel's: what is stored as weight_scale_inv is what weights are divided by."""

    def packed(weight: torch.Tensor) -> Packed:
        tensors, meaning = pack(weight)
        leaf = next(leaf for leaf in tensors if leaf != "weight")
        return {"weight": tensors["weight"], "weight_scale_inv": 1 / tensors[leaf]}, meaning

    return packed


Kind = tuple[Callable[[torch.Tensor], Packed], dict[str, Any], dict[str, Any]]
KINDS: dict[str, Kind] = {
    "tensor": (pack_tensor, PLAIN, {}),
    "tensor-1": (partial(pack_tensor, shape=(1,)), PLAIN, {}),
    "static": (pack_tensor, STATIC, {"input_scale": torch.tensor(0.02)}),
    "transformers-static": (
        partial(pack_tensor, leaf="weight_scale_inv"), {**STATIC, "weight_block_size": None},
        {"activation_scale": torch.tensor(0.02)},
    ),
    "channel": (pack_channel, PLAIN, {}),
    "channel-flat": (partial(pack_channel, flat=True), PLAIN, {}),
    "block": (pack_block, BLOCKS, {}),
    "block-64x32": (partial(pack_block, block=(64, 32)), {**BLOCKS, "weight_block_size": [64, 32]}, {}),
    "block-ue8m0": (partial(pack_block, ue8m0=True), {**BLOCKS, "scale_fmt": "ue8m0"}, {}),
    "gptqmodel-row": (inverse(partial(pack_channel, flat=True)), {**GPTQMODEL, "weight_scale_method": "row"}, {}),
    "gptqmodel-tensor": (inverse(pack_tensor), {**GPTQMODEL, "weight_scale_method": "tensor"}, {}),
    "gptqmodel-block": (
        inverse(pack_block),
        {**GPTQMODEL, "weight_scale_method": "block", "weight_block_size": [128, 128]}, {},
    ),
    "modelopt": (pack_tensor, MODELOPT, {"input_scale": torch.tensor(0.02)}),
}  # fmt: skip


Rounding = Callable[[torch.Tensor], torch.Tensor]


def make(folder: Path, kind: str, rounding: Rounding | None = None, **overrides: Any) -> tuple[Path, torch.Tensor]:
    """The checkpoint, and the logits [T, vocab] that its weights mean; `rounding` is applied to what enters an FP8
    linear, float32 [T, K] -> the same."""
    pack, config, extra = KINDS[kind]
    folder, meaning = make_tiny_fp8(folder, pack, config, extra=extra, **{**EDGES, **overrides})
    fields = json.loads((folder / "config.json").read_text())
    for key in ("quantization_config", "architectures", "dtype"):
        fields.pop(key)
    reference = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    missing, unknown = reference.load_state_dict(meaning, strict=False)
    assert not missing and not unknown
    for name, module in reference.named_modules():
        if rounding is not None and name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (rounding(args[0][0])[None], *args[1:]))
    with torch.inference_mode():
        return folder, reference(torch.tensor([IDS])).logits[0]
