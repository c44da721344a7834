"""Rotary position embedding: the frequencies of every scaling type, and their application to queries and keys.

Two types depend on the length of the text: `dynamic` and `longrope` pick other frequencies for long contexts. Keys are
rotated before they enter the cache, so the choice must not change while a request runs, nor between requests that
share cached blocks. It is made once, from the longest context that the engine serves (`max_model_len`): an engine
started with a `max_model_len` within the original context uses the short frequencies, a longer one the long ones, for
texts of every length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.layers.module import ModelContext
from qengine_kernels.rotary import rotary_


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding.

    `rotary_dim` leading elements of each head rotate, paired as (i, i + rotary_dim / 2). `max_position` is the config's
    max_position_embeddings, `original_max_position` the length before scaling. `parameters` are the type's own numbers.
    `longest` is the longest context that the config claims: a larger max_model_len counts as that.
    """

    type: str
    theta: float
    rotary_dim: int
    max_position: int
    original_max_position: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None


REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Known types, and the numbers that each cannot do without."""


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[torch.Tensor, float]:
    """(float32 [rotary_dim / 2] on the CPU, factor on cos and sin) for contexts of up to `length` tokens."""
    if spec.type == "yarn":
        return _yarn(spec)
    if spec.type == "longrope":
        return _longrope(spec, length)
    p = spec.parameters
    theta = spec.theta
    if spec.type == "dynamic":
        stretch = p["factor"] * max(length, spec.max_position) / spec.max_position - (p["factor"] - 1)
        theta *= stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))
    inv_freq = 1.0 / _powers(theta, spec.rotary_dim)
    if spec.type == "linear":
        inv_freq = inv_freq / p["factor"]
    elif spec.type == "llama3":
        inv_freq = _llama3(spec, inv_freq)
    return inv_freq, 1.0


def _powers(theta: float, rotary_dim: int) -> torch.Tensor:
    return theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _llama3(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    p = spec.parameters
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    turns = spec.original_max_position * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / p["factor"] * (1 - keep)


def _yarn(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and 3.4."""
    p = spec.parameters
    dim, original = spec.rotary_dim, spec.original_max_position
    factor = p.get("factor") or spec.max_position / original

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(spec.theta, dim)
    inv_freq = interpolate / (factor * powers) + (1 - interpolate) / powers
    return inv_freq, _yarn_scale(p, factor)


def _yarn_scale(p: Mapping[str, Any], factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return temperature(p["mscale"]) / temperature(p["mscale_all_dim"])
    return temperature(1.0)


def _longrope(spec: RopeSpec, length: int) -> tuple[torch.Tensor, float]:
    """Ding et al. 2024, "LongRoPE": one measured factor for each frequency, another set beyond the original context."""
    p = spec.parameters
    original = spec.original_max_position
    factors = torch.tensor(p["long_factor" if length > original else "short_factor"], dtype=torch.float32)
    factor = p.get("factor") or spec.max_position / original
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (factors * _powers(spec.theta, spec.rotary_dim)), float(scale)


@dataclass(frozen=True)
class RopeAngles:
    """One step's rotations, in the form that the device's kernel takes; float32.

    CPU   [T, 1, rotary_dim] each: cos, and sin with its first half negated
    CUDA  [T, rotary_dim / 2] each
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """One rotary embedding, shared by the layers that use it. The frequencies are a few hundred bytes, moved to the
    device at the first step."""

    def __init__(self, ctx: ModelContext, spec: RopeSpec) -> None:
        self.spec = spec
        length = ctx.max_model_len if spec.longest is None else min(ctx.max_model_len, spec.longest)
        self.inv_freq, self.scale = inverse_frequencies(spec, length)

    def angles(self, positions: torch.Tensor) -> RopeAngles:
        """positions int64 [T] -> this step's rotations, computed once for all layers."""
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        freqs = positions.float()[:, None] * self.inv_freq
        cos, sin = freqs.cos() * self.scale, freqs.sin() * self.scale
        if positions.is_cuda:
            return RopeAngles(cos, sin)
        return RopeAngles(torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])

    def __call__(self, qk: torch.Tensor, num_heads: int, angles: RopeAngles) -> tuple[torch.Tensor, torch.Tensor]:
        """qk [T, heads, head_dim], any float dtype: queries (num_heads of them), then keys -> (q, k) rotated, in qk's
        dtype on CUDA and in float32 on a CPU. Rotates in float32; elements from rotary_dim on pass through. May
        overwrite qk.
        """
        if qk.is_cuda:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            rotary_(q, k, angles.cos, angles.sin)
            return q, k
        r = self.spec.rotary_dim
        x = qk.float()
        turning = x if r == x.shape[-1] else x[..., :r]
        half = r // 2
        swapped = turning.roll(half, -1)
        turning.mul_(angles.cos).addcmul_(swapped, angles.sin)
        return x[:, :num_heads], x[:, num_heads:]
