"""GPTQ tensors and checkpoints written from the format's description alone: a bit stream, no code of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toy_models import llama_config, llama_tensors, write_model


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [count, N] -> int32 [ceil(count * bits / 32), N]: code i takes bits bits*i on, the lowest first."""
    count, n = codes.shape
    single = (codes[:, None, :].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)[None, :, None]) & 1
    flat = single.reshape(count * bits, n)
    flat = np.concatenate([flat, np.zeros((-len(flat) % 32, n), dtype=np.uint64)])
    words = (flat.reshape(-1, 32, n) << np.arange(32, dtype=np.uint64)[None, :, None]).sum(1)
    return words.astype(np.uint32).view(np.int32)


def pack_inputs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[K, N] -> qweight."""
    return torch.from_numpy(stream(codes.numpy(), bits))


def pack_outputs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[G, N] -> qzeros (what is given is stored, no convention applied)."""
    return torch.from_numpy(np.ascontiguousarray(stream(codes.t().numpy(), bits).T))


@dataclass(frozen=True)
class Style:
    """How a module is written. `group` -1 is one group. `stored` "gptq" stores zero - 1, modulo 2**bits by field, or
    by whole words where `by_word`. `shuffle`: groups are scattered over the inputs (act-order)."""

    bits: int = 4
    group: int = 32
    symmetric: bool = True
    stored: str = "gptq"
    by_word: bool = False
    shuffle: int | None = None
    scale_dtype: torch.dtype = torch.float16


def quantize(weight: torch.Tensor, style: Style) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight [N, K] -> (tensors by leaf name, float32 [N, K] that they mean): nearest rounding."""
    n, k = weight.shape
    size = k if style.group == -1 else style.group
    g_idx = torch.arange(k) // size
    if style.shuffle is not None:
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(style.shuffle))]
    top, middle = (1 << style.bits) - 1, 1 << (style.bits - 1)
    groups = -(-k // size)
    scales, zeros = torch.empty(groups, n), torch.full((groups, n), middle)
    for g in range(groups):
        part = weight[:, g_idx == g].float()
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if style.symmetric:
            scales[g] = 2 * torch.maximum(high, -low).clamp_min(1e-4) / top
        else:
            scales[g] = (high - low).clamp_min(1e-4) / top
            zeros[g] = (-low / scales[g]).round().clamp(0, top).long()
    scales = scales.to(style.scale_dtype)
    s, z = scales.float()[g_idx], zeros[g_idx]
    codes = ((weight.float().t() / s).round() + z).clamp(0, top).long()
    meaning = ((codes - z) * s).t().contiguous()
    tensors = {
        "qweight": pack_inputs(codes, style.bits),
        "qzeros": store_zeros(zeros, style),
        "scales": scales,
        "g_idx": g_idx.int(),
    }
    return tensors, meaning


def store_zeros(zeros: torch.Tensor, style: Style) -> torch.Tensor:
    if style.stored == "gptq_v2":
        return pack_outputs(zeros, style.bits)
    if not style.by_word:
        return pack_outputs((zeros - 1) % (1 << style.bits), style.bits)
    ones = sum(1 << shift for shift in range(0, 32, style.bits))
    words = (pack_outputs(zeros, style.bits).long() % 2**32 - ones) % 2**32
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))


def config_of(style: Style, **extra: Any) -> dict[str, Any]:
    """The quantization_config that GPTQModel would write for `style`."""
    return {
        "quant_method": "gptq",
        "bits": style.bits,
        "group_size": style.group,
        "sym": style.symmetric,
        "desc_act": style.shuffle is not None,
        "checkpoint_format": style.stored,
        **({"meta": {"quantizer": ["gptqmodel:7.6.0"]}} if style.by_word else {}),
        **extra,
    }


def make_tiny_gptq(
    folder: Path,
    style: Style,
    *,
    quant: Mapping[str, Any] | None = None,
    style_of: Callable[[str], Style | None] | None = None,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **config_overrides: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """TINY with its projections as GPTQ, and the dense float32 weights that it means by Hugging Face name.

    `quant` are further keys of quantization_config; `style_of(module)` overrides `style` (None: 16-bit) and may name
    lm_head too; `edit` changes the stored tensors before they are written.
    """
    fixed = {"dtype": "float16", "quantization_config": config_of(style) | dict(quant or {})}
    config = llama_config(**fixed | config_overrides)
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, t in llama_tensors(config).items():
        module = name.removesuffix(".weight")
        own = style if name.endswith("_proj.weight") else None
        if style_of is not None and name.endswith(".weight") and (own is not None or module == "lm_head"):
            own = style_of(module)
        if own is None:
            stored[name] = t.half()
            meaning[name] = stored[name].float()
        else:
            parts, meaning[name] = quantize(t, own)
            stored |= {f"{module}.{leaf}": value for leaf, value in parts.items()}
    if edit is not None:
        edit(stored)
    return write_model(folder, config, stored), meaning
