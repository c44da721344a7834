"""GPTQ's rounding, in float32 torch: grids of codes, and the column-by-column procedure with error compensation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_SCALE = 2.0**-20
"""Keeps an all-zero group's scale a positive float16."""
BLOCK = 128
"""Columns whose errors are spread to the rest together."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that are tried; the least squared error wins."""
DAMPING_FACTOR, MOST_DAMPING = 3.0, 1.0
"""Damping grows by the factor until the Hessian is positive definite, up to the whole mean of its diagonal."""


@dataclass(frozen=True)
class Grid:
    """`scale` float32 (float16 values) and `zero` float32 (1 .. 2**bits - 1), [groups, N]."""

    scale: torch.Tensor
    zero: torch.Tensor


def grid_of(w: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """w [N, size], one group -> (scale, zero) [N] with the least squared error among SHRINKS."""
    top = (1 << bits) - 1
    best: torch.Tensor | None = None
    low, high = w.amin(1).clamp_max(0), w.amax(1).clamp_min(0)
    for shrink in SHRINKS:
        if symmetric:
            middle = (top + 1) // 2
            wide = torch.maximum(high / (top - middle), -low / middle) * shrink
            scale = as_float16(wide.clamp_min(LEAST_SCALE))
            zero = torch.full_like(scale, middle)
        else:
            scale = as_float16(((high - low) * shrink / top).clamp_min(LEAST_SCALE))
            # A stored zero is one less; 0 would not survive every reader.
            zero = (-low * shrink / scale).round_().clamp_(1, top)
        error = (dequantized(rounded(w, scale, zero, top), scale, zero) - w).square().sum(1)
        if best is None:
            best, best_scale, best_zero = error, scale, zero
            continue
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def grids(w: torch.Tensor, size: int, bits: int, symmetric: bool) -> Grid:
    """The grid of every group of `size` columns."""
    found = [grid_of(part, bits, symmetric) for part in w.split(size, dim=1)]
    return Grid(torch.stack([s for s, _ in found]), torch.stack([z for _, z in found]))


def nearest_codes(w: torch.Tensor, grid: Grid, groups: torch.Tensor, bits: int) -> torch.Tensor:
    """w [N, K], groups int64 [K] -> uint8 [N, K]."""
    scale, zero = grid.scale[groups].t(), grid.zero[groups].t()
    return (w / scale + zero).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)


def as_float16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(torch.float32)


def rounded(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, top: int) -> torch.Tensor:
    """w [N, size] -> codes as float32."""
    return (w / scale[:, None] + zero[:, None]).round_().clamp_(0, top)


def dequantized(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (codes - zero[:, None]) * scale[:, None]


def gptq_codes(
    w: torch.Tensor, moment: torch.Tensor, size: int, bits: int, symmetric: bool, damping: float
) -> tuple[torch.Tensor, Grid]:
    """w float32 [N, K] and the mean of x x^T [K, K], both in the order of rounding -> (codes uint8 [N, K], the grid).

    A group's grid is chosen when its first column is reached, from weights that already make up for earlier errors.
    Inputs that were always zero (dead) round to the nearest and bear no error of others.
    """
    top = (1 << bits) - 1
    w = w.clone()
    inverse = inverse_factor(moment, damping)
    dead = moment.diagonal() == 0
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    for first in range(0, w.shape[1], BLOCK):
        last = min(first + BLOCK, w.shape[1])
        errors = torch.zeros(len(w), last - first, device=w.device)
        for column in range(first, last):
            if column % size == 0:
                # Errors of this block have not reached the columns behind it yet: bring them up to date.
                ahead = w[:, column : column + size].clone()
                if column + size > last:
                    tail = slice(last, column + size)
                    ahead[:, last - column :] -= errors @ inverse[first:last, tail]
                scale, zero = grid_of(ahead, bits, symmetric)
                scales.append(scale)
                zeros.append(zero)
            code = rounded(w[:, column : column + 1], scale, zero, top)
            codes[:, column] = code[:, 0].to(torch.uint8)
            error = w[:, column] - dequantized(code, scale, zero)[:, 0]
            if bool(dead[column]):
                continue
            error = error / inverse[column, column]
            errors[:, column - first] = error
            w[:, column + 1 : last] -= error[:, None] * inverse[column, column + 1 : last]
        w[:, last:] -= errors @ inverse[first:last, last:]
    return codes, Grid(torch.stack(scales), torch.stack(zeros))


def shrunk(moment: torch.Tensor, tokens: int) -> torch.Tensor:
    """The moment [K, K] with what few tokens cannot tell taken back: the fewer tokens for each input, the less the
    correlations between inputs count. Errors moved along chance correlations hurt on any other text."""
    share = len(moment) / (len(moment) + tokens)
    return moment * (1 - share) + torch.diag(moment.diagonal() * share)


def inverse_factor(moment: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the damped moment's inverse. Raises ValueError when no damping helps."""
    diagonal = moment.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0 or not bool(torch.isfinite(diagonal).all()):
        raise ValueError("inputs are all zero or not finite")
    dead = torch.diag((diagonal == 0).to(moment.dtype) * mean)
    eye = torch.eye(len(moment), device=moment.device)
    while damping <= MOST_DAMPING:
        damped = (moment + dead + eye * (damping * mean)).double()
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper.float()
        damping *= DAMPING_FACTOR
    raise ValueError(f"the inputs' moments are not positive definite, even with damping {MOST_DAMPING}")
