"""compressed-tensors files written from the format's description, independently of the plugin that reads them.

Packing goes through numpy's bit arrays: a row is one string of bits, value after value, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qengine.plugin import LinearSpec, TensorInfo

CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def pack_rows(signed: torch.Tensor, bits: int, padded: bool = False) -> torch.Tensor:
    """signed [R, C] -> int32 words [R, W]; `padded`: whole values in each word, as before version 0.17."""
    stored = (signed.to(torch.int64) + (1 << (bits - 1))).numpy().astype(np.uint8)
    bit_rows = np.unpackbits(stored[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    if padded:
        per = 32 // bits
        fill = np.zeros((stored.shape[0], -stored.shape[1] % per, bits), np.uint8)
        runs = np.concatenate([bit_rows, fill], 1).reshape(stored.shape[0], -1, per * bits)
        strings = np.concatenate([runs, np.zeros((*runs.shape[:2], 32 - per * bits), np.uint8)], 2)
    else:
        strings = bit_rows
    strings = strings.reshape(stored.shape[0], -1)
    strings = np.pad(strings, ((0, 0), (0, -strings.shape[1] % 32)))
    return torch.from_numpy(np.packbits(strings, axis=1, bitorder="little").view("<i4").copy())


def group_columns(k: int, group: int) -> torch.Tensor:
    """int64 [K]: each input's group; -1 is one group."""
    return torch.arange(k) // (k if group == -1 else group)


def int_tensors(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    layout: str = "dense",
    zeros: str = "packed",
    g_idx: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    per_tensor: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight [N, K] -> (tensors by leaf, float32 [N, K] that they mean), rounded to the nearest code.

    `layout`: "dense", "padded" or "bytes" (an int8 `weight`). `zeros`: "packed" as `layout` says, or "plain" int8.
    `g_idx` [K] scatters the groups over the inputs.
    """
    n, k = weight.shape
    index = group_columns(k, group) if g_idx is None else g_idx.long()
    groups = int(index.max()) + 1
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    scale, zero = torch.ones(n, groups), torch.zeros(n, groups)
    for g in range(groups):
        part = weight[:, index == g] if not per_tensor else weight.reshape(1, -1).expand(n, -1)
        if symmetric:
            scale[:, g] = part.abs().amax(1) / ((high - low) / 2)
        else:
            smallest, largest = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale[:, g] = (largest - smallest) / (high - low)
            zero[:, g] = (low - smallest / scale[:, g]).round().clamp(low, high)
    scale = scale.clamp_min(1e-6).to(scale_dtype)
    s, z = scale.float()[:, index], zero[:, index]
    codes = (weight / s + z).round().clamp(low, high)
    tensors = {"weight_scale": scale[:1, 0] if per_tensor else scale}
    if layout == "bytes":
        tensors["weight"] = codes.to(torch.int8)
    else:
        tensors["weight_packed"] = pack_rows(codes, bits, layout == "padded")
        tensors["weight_shape"] = torch.tensor([n, k])
    if not symmetric:
        plain = zero.to(torch.int8)[:1, 0] if per_tensor else zero.to(torch.int8)
        packed = zeros == "packed" and layout != "bytes" and not per_tensor
        tensors["weight_zero_point"] = (
            pack_rows(zero.t(), bits, layout == "padded").t().contiguous() if packed else plain
        )
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.to(torch.int32)
    return tensors, (codes - z) * s


def fp8_tensors(
    weight: torch.Tensor, strategy: str, block: tuple[int, int] = (128, 128), scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight [N, K] -> (tensors by leaf, float32 [N, K] that they mean). `strategy`: tensor, channel or block."""
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "block": block}[strategy]
    scale = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs().max() / 448
    scale = scale.to(scale_dtype)
    wide = scale.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = scale.reshape(1) if strategy == "tensor" else scale
    return {"weight": codes, "weight_scale": stored}, codes.float() * wide


def headers(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """What a checkpoint's header says of one module's tensors."""
    return {leaf: TensorInfo(f"{name}.{leaf}", CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}


def weights(bits: int, strategy: str, group_size: int | None = None, **more: Any) -> dict[str, Any]:
    """A QuantizationArgs of the config for integer weights."""
    return {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    } | more  # fmt: skip


FP8_DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
INT8_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def fp8_weights(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    return weights(8, strategy, None, type="float", block_structure=block)


def group_of(
    args: dict[str, Any] | None,
    targets: list[str] | None = None,
    inputs: dict[str, Any] | None = None,
    form: str | None = None,
) -> dict[str, Any]:
    """One entry of config_groups."""
    return {
        "targets": ["Linear"] if targets is None else targets,
        "weights": args,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def quant_config(*groups: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """A quantization_config."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    } | more


def spec_of(name: str, weight: torch.Tensor, bias: bool = False) -> LinearSpec:
    return LinearSpec(name, weight.shape[1], weight.shape[0], bias)
