"""FP8 tensors made by the format's definition, in numpy and with no product code: codes by search among 256 values.

The packers return what a file holds and what it means, so that a reader is held to something that it did not make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toy_models import llama_config, llama_tensors, make_bytetok, write_model

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors by leaf name, and the float32 weight that they mean."""


def e4m3_values() -> np.ndarray:
    """float64 [256]: sign, 4 bits of exponent (bias 7), 3 of fraction; 0x7f and 0xff are NaN, nothing is infinite."""
    out = np.empty(256)
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> 3, code & 7
        size = math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)
        out[code] = math.copysign(math.nan if code & 0x7F == 0x7F else size, -1.0 if code & 0x80 else 1.0)
    return out


VALUES = e4m3_values()
TABLE = torch.from_numpy(VALUES).float()


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Float values -> uint8 codes: to nearest, ties to the even code, at most 448."""
    sizes = VALUES[:127]
    a = np.abs(x.double().numpy())
    above = np.clip(np.searchsorted(sizes, a), 1, 126)
    below = above - 1
    d = (sizes[above] - a) - (a - sizes[below])
    code = np.where((d < 0) | ((d == 0) & (above % 2 == 0)), above, below)
    return torch.from_numpy((code | (np.signbit(x.numpy()) << 7)).astype(np.uint8))


def stored(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn)


def pack_tensor(weight: torch.Tensor, shape: tuple[int, ...] = (), leaf: str = "weight_scale") -> Packed:
    """One scale for the whole module, of shape () or (1,)."""
    scale = weight.abs().max() / 448
    codes = encode_e4m3(weight / scale)
    return {"weight": stored(codes), leaf: scale.reshape(shape)}, TABLE[codes.long()] * scale


def pack_channel(weight: torch.Tensor, flat: bool = False) -> Packed:
    """A scale for each output, [N, 1] or [N]."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = encode_e4m3(weight / scale)
    return {"weight": stored(codes), "weight_scale": scale.flatten() if flat else scale}, TABLE[codes.long()] * scale


def pack_block(weight: torch.Tensor, block: tuple[int, int] = (128, 128), ue8m0: bool = False) -> Packed:
    """A scale for each block, the last ones of both sides short; ue8m0: rounded up to powers of two, one byte each."""
    n, k = weight.shape
    rows, columns = -(-n // block[0]), -(-k // block[1])
    grid, expanded = torch.empty(rows, columns), torch.empty(n, k)
    for r in range(rows):
        for c in range(columns):
            part = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
            scale = weight[part].abs().max() / 448
            grid[r, c] = torch.exp2(torch.ceil(torch.log2(scale))) if ue8m0 else scale
            expanded[part] = grid[r, c]
    codes = encode_e4m3(weight / expanded)
    scales = (torch.log2(grid) + 127).to(torch.uint8).view(torch.float8_e8m0fnu) if ue8m0 else grid
    return {"weight": stored(codes), "weight_scale_inv": scales}, TABLE[codes.long()] * expanded


def make_tiny_fp8(
    folder: Path,
    pack: Callable[[torch.Tensor], Packed],
    config: Mapping[str, Any],
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
    spread: bool = True,
    **overrides: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """TINY with FP8 linears, other tensors bfloat16, and the float32 weights that it means by Hugging Face name.

    `config` is its quantization_config; `extra` goes to every linear (a static input scale). `spread`: weights of the
    shards that run fused differ by powers of ten.
    """
    settings = llama_config(dtype="bfloat16", quantization_config=dict(config), **overrides)
    held: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, tensor in llama_tensors(settings).items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            held[name] = tensor.bfloat16()
            meaning[name] = held[name].float()
            continue
        factor = {"k_proj": 10.0, "v_proj": 0.1, "up_proj": 0.01}.get(module.rpartition(".")[2], 1.0) if spread else 1.0
        parts, meaning[name] = pack(tensor * factor)
        held |= {f"{module}.{leaf}": value for leaf, value in parts.items()}
        held |= {f"{module}.{leaf}": value.clone() for leaf, value in (extra or {}).items()}
    return make_bytetok(write_model(folder, settings, held)), meaning
