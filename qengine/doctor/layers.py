"""Layers that all formats share, on the device at hand, against formulas written out in float32 here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qengine.conformance.kit import need
from qengine.layers.activation import GatedActivation
from qengine.layers.module import ModelContext
from qengine.layers.norm import RMSNorm
from qengine.layers.rotary import RopeSpec, Rotary
from qengine.plugin import DeviceInfo
from qengine.runtime.device import residual_dtype
from qengine_kernels.testing import relative_error

LayerTest = Callable[[torch.device, DeviceInfo, torch.dtype, float], str]
ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 37, 320, 6, 2, 64
EPS, THETA = 1e-5, 10000.0


def _context(device: torch.device, info: DeviceInfo, dtype: torch.dtype) -> ModelContext:
    return ModelContext(None, device, info, dtype, residual_dtype(dtype, info), 4096)


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _near(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    error = relative_error(got, want)
    need(error <= limit, f"{name} is off by {error:.2g}, need <= {limit:.2g}")


def norm(device: torch.device, info: DeviceInfo, dtype: torch.dtype, limit: float) -> str:
    """The sum with the residual, and its norm."""
    ctx = _context(device, info, dtype)
    layer = RMSNorm(ctx, "norm", HIDDEN, EPS)
    weight, x, residual = 1 + 0.1 * _random(1, HIDDEN), _random(2, ROWS, HIDDEN).to(dtype), 3 * _random(3, ROWS, HIDDEN)
    residual = residual.to(ctx.residual_dtype)
    layer.load({"norm.weight": weight.clone()})
    kept = residual.clone().to(device)
    y = layer.add(x.to(device), kept)
    total = residual.float() + x.float()
    rounded = total.to(ctx.residual_dtype).float()
    _near("the residual", kept, rounded, limit)
    _near("the norm", y, rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + EPS) * weight, limit)
    return "Triton" if device.type == "cuda" else "torch"


def rotation(device: torch.device, info: DeviceInfo, dtype: torch.dtype, limit: float) -> str:
    rotary = Rotary(_context(device, info, dtype), RopeSpec("default", THETA, HEAD_DIM, 4096, 4096))
    positions = torch.arange(ROWS) * 29
    qk = _random(4, ROWS, HEADS + KV_HEADS, HEAD_DIM).to(dtype)
    x = qk.float()
    q, k = rotary(qk.clone().to(device), HEADS, rotary.angles(positions.to(device)))
    angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    want = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    _near("queries", q, want[:, :HEADS], limit)
    _near("keys", k, want[:, HEADS:], limit)
    return "Triton" if device.type == "cuda" else "torch"


def activation(device: torch.device, info: DeviceInfo, dtype: torch.dtype, limit: float) -> str:
    x = 2 * _random(5, ROWS, 2 * HIDDEN).to(dtype)
    gate, up = x.float().chunk(2, -1)
    formulas = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)),
        "gelu_pytorch_tanh": 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }
    for kind, want in formulas.items():
        _near(kind, GatedActivation(kind)(x.clone().to(device)), want * up, limit)
        if dtype is torch.float16:
            large = torch.cat((x[:, :HIDDEN], x[:, HIDDEN:] * 4096), dim=-1)
            y, scale = GatedActivation(kind).scaled(large.to(device))
            _near(f"{kind} beyond float16", y.float() * scale, want * large[:, HIDDEN:].float(), limit)
    return f"{', '.join(formulas)} by {'Triton' if device.type == 'cuda' else 'torch'}"


LAYER_TESTS: tuple[tuple[str, LayerTest], ...] = (
    ("norm with residual", norm),
    ("rotary embedding", rotation),
    ("gated activation", activation),
)
