"""TINY with its projections made by one of qengine's own quantizers, as a folder for others to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qengine.plugin import LinearSpec, Quantizer
from qengine.plugin.discovery import load_plugin
from toy_models import llama_config, llama_tensors, write_model


def make_written(folder: Path, plugin: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """`options` are the quantizer's; everything but the projections is written in `dtype`."""
    quantizer = load_plugin("weight", plugin).quantizer(**options)
    assert isinstance(quantizer, Quantizer)
    name_of = str(dtype).removeprefix("torch.")
    config = llama_config(dtype=name_of, quantization_config=quantizer.config(["lm_head"]))
    held: dict[str, torch.Tensor] = {}
    for name, tensor in llama_tensors(config).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            held[name] = tensor.to(dtype)
            continue
        spec = LinearSpec(module, tensor.shape[1], tensor.shape[0])
        held |= {f"{module}.{leaf}": value for leaf, value in quantizer.quantize(spec, tensor).items()}
    return write_model(folder, config, held)
