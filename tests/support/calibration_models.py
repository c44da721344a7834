"""Toy models that only calibration tells apart: large keys, outliers, experts that no token reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from toy_models import make_tiny
from toy_moe import make_moe


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Edit the tensors of a folder with one weight file in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def biased(folder: Path, size: float = 900.0) -> Path:
    """TINY whose layer 0 has a key bias of about `size` in every channel (C15 b); its other biases are small."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        bias = tensors["model.layers.0.self_attn.k_proj.bias"]
        bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, size, -size))
        for name in ("q_proj.weight", "q_proj.bias"):
            tensors[f"model.layers.0.self_attn.{name}"] *= 0.01

    make_tiny(folder, attention_bias=True)
    return change(folder, edit)


def outlier_tiny(folder: Path, dtype: str = "float32") -> Path:
    """TINY with a few norm channels eight times as large: what rounding to nearest gets wrong."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, t in tensors.items():
            if "layernorm" in name:
                t[::37] *= 8

    make_tiny(folder, dtype=dtype)
    return change(folder, edit)


def lopsided_moe(folder: Path, *, tokenizer: bool = False) -> Path:
    """Eight experts and a router that always picks the same two (C26)."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, t in tensors.items():
            if name.endswith("block_sparse_moe.gate.weight"):
                t.zero_()  # equal scores: topk takes the same ones for every token

    make_moe(folder, "mixtral", tokenizer=tokenizer, num_local_experts=8)
    return change(folder, edit)
