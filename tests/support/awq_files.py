"""AWQ tensors and checkpoints in every layout, written from the formats' descriptions: no code of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toy_models import awq_config, llama_config, llama_tensors, make_bytetok, pack_awq, write_model

Edit = Callable[[dict[str, torch.Tensor]], None]

ODD_LAST = (0, 2, 4, 6, 1, 3, 5, 7)
WIDTH_MULTIPLE = {32: 4, 64: 2}


def words(codes: np.ndarray) -> torch.Tensor:
    """[R, 8 C] of 0..15 -> int32 [R, C], the first of eight in the low bits."""
    parts = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    out = np.zeros(parts.shape[:2], dtype=np.uint32)
    for i in range(8):
        out |= parts[:, :, i] << np.uint32(4 * i)
    return torch.from_numpy(out.view(np.int32))


def padded_groups(groups: int, group: int) -> int:
    """Groups that gemv and gemv_fast store: whole words of eight, an even (a fourfold) number of them for 64 (32)."""
    width = -(-groups // 8)
    while width % WIDTH_MULTIPLE.get(group, 1):
        width += 1
    return 8 * width


def gemm(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int) -> dict[str, torch.Tensor]:
    out = {"qweight": pack_awq(torch.from_numpy(codes)), "scales": torch.from_numpy(scales)}
    return out if zeros is None else out | {"qzeros": pack_awq(torch.from_numpy(zeros))}


def gemv(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int) -> dict[str, torch.Tensor]:
    pad = padded_groups(len(scales), group) - len(scales)
    wide = np.pad(scales.T, ((0, 0), (0, pad)))
    out = {"qweight": words(codes.T.copy()), "scales": torch.from_numpy(wide.copy())}
    return out if zeros is None else out | {"qzeros": words(np.pad(zeros.T, ((0, 0), (0, pad))))}


def run_of_32() -> list[int]:
    """Which input of a run of 32 lies at each stored position."""
    threads = [base + 2 * g for g in range(4) for base in (0, 1, 8, 9, 16, 17, 24, 25)]
    return [threads[8 * (i // 8) + ODD_LAST[i % 8]] for i in range(32)]


def gemv_fast(
    codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int, zeros_name: str = "qzeros"
) -> dict[str, torch.Tensor]:
    k, n = codes.shape
    order = run_of_32()
    out = np.zeros((n // 4, k), dtype=np.uint16)
    for strip in range(n // 4):
        for block in range(k // 64):
            flat = []
            for row in range(4):
                column = codes[64 * block : 64 * block + 64, 4 * strip + row]
                flat += [column[o] for o in order] + [column[32 + o] for o in order]
            for j in range(64):
                value = sum(int(flat[4 * j + i]) << (4 * i) for i in range(4))
                out[strip, 64 * block + j] = value
    pad = ((0, padded_groups(len(scales), group) - len(scales)), (0, 0))
    tensors = {
        "qweight": torch.from_numpy(out.view(np.int16)),
        "scales": torch.from_numpy(np.pad(scales, pad)),
    }
    if zeros is not None:
        scaled = -(scales.astype(np.float32) * zeros).astype(np.float16)
        tensors[zeros_name] = torch.from_numpy(np.pad(scaled, pad))
    return tensors


def llm_awq(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int) -> dict[str, torch.Tensor]:
    return gemv_fast(codes, zeros, scales, group, "scaled_zeros")


def marlin(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray, group: int) -> dict[str, torch.Tensor]:
    """Thread t of a warp holds rows 2 (t % 4) + {0, 1, 8, 9} of columns t // 4 and t // 4 + 8 of four 16 x 16 tiles."""
    assert zeros is None
    k, n = codes.shape
    slots = []
    for t in range(32):
        for tile in range(4):
            own = [(2 * (t % 4) + r, 16 * tile + t // 4 + c) for c in (0, 8) for r in (0, 1, 8, 9)]
            slots += [own[o] for o in ODD_LAST]
    rows, columns = np.array(slots).T
    stored = np.concatenate(
        [
            np.concatenate([codes[i : i + 16, j : j + 64][rows, columns] for j in range(0, n, 64)])[None]
            for i in range(0, k, 16)
        ]
    )
    moved = np.empty_like(scales)
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    groups = [i + 8 * j for i in range(8) for j in range(8)]
    order = single if len(scales) == 1 else groups
    for start in range(0, n, len(order)):
        for i, o in enumerate(order):
            moved[:, start + i] = scales[:, start + o]
    return {"qweight": words(stored), "scales": torch.from_numpy(moved)}


WRITERS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "gemm": gemm,
    "gemv": gemv,
    "gemv_fast": gemv_fast,
    "llm-awq": llm_awq,
    "marlin": marlin,
}


def rounded(
    weight: torch.Tensor, group: int, zero_point: bool
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, torch.Tensor]:
    """weight [N, K] -> codes [K, N], zeros [G, N] or None, float16 scales [G, N], and the float32 [N, K] they mean."""
    n, k = weight.shape
    size = k if group == -1 else group
    w = weight.float().t().reshape(k // size, size, n)
    if zero_point:
        low, high = w.amin(1), w.amax(1)
        scale = ((high - low).clamp_min(1e-5) / 15).half()
        zero = (-(low / scale.float()).round()).clamp(0, 15)
    else:
        scale = (w.abs().amax(1).clamp_min(1e-5) / 7).half()
        zero = torch.full_like(scale, 8, dtype=torch.float32)
    s = scale.float()[:, None]
    codes = ((w / s).round() + zero[:, None]).clamp(0, 15)
    meaning = ((codes - zero[:, None]) * s).reshape(k, n).t().contiguous()
    numbers = codes.reshape(k, n).to(torch.uint8).numpy()
    return numbers, zero.to(torch.uint8).numpy() if zero_point else None, scale.numpy(), meaning


def write_linear(
    weight: torch.Tensor, version: str, group: int, zero_point: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight [N, K] -> (tensors by leaf name, float32 [N, K] that they mean)."""
    codes, zeros, scales, meaning = rounded(weight, group, zero_point and version != "marlin")
    return WRITERS[version](codes, zeros, scales, group), meaning


def config_of(version: str, group: int, zero_point: bool = True, **extra: Any) -> dict[str, Any]:
    """The quantization_config beside it."""
    said = {"version": "gemm", "backend": "llm-awq"} if version == "llm-awq" else {"version": version}
    return awq_config(group) | {"zero_point": zero_point and version != "marlin"} | said | extra


def make_awq(
    folder: Path,
    version: str,
    group: int = 128,
    zero_point: bool = True,
    *,
    quant: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    tokenizer: bool = False,
    shards: int = 1,
    **config_overrides: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """TINY with its projections as AWQ, and the dense float32 weights that it means by Hugging Face name.

    `quant` are further keys of quantization_config; `edit` changes the stored tensors before they are written.
    """
    fixed = {"dtype": "float16", "quantization_config": config_of(version, group, zero_point) | dict(quant or {})}
    config = llama_config(**fixed | config_overrides)
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, t in llama_tensors(config).items():
        if name.endswith("_proj.weight"):
            parts, meaning[name] = write_linear(t, version, group, zero_point)
            stored |= {f"{name.removesuffix('.weight')}.{leaf}": value for leaf, value in parts.items()}
        else:
            stored[name] = t.half()
            meaning[name] = stored[name].float()
    if edit is not None:
        edit(stored)
    write_model(folder, config, stored, shards)
    return (make_bytetok(folder) if tokenizer else folder), meaning
