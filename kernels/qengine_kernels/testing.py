"""Helpers for kernel tests, ours and those of plugin authors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class KernelMismatch(AssertionError):
    """A kernel's output is further from its reference than the stated relative error."""


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; inf when `got` has a NaN or inf."""
    difference = (got.detach().cpu().double() - want.detach().cpu().double()).norm()
    error = (difference / want.detach().cpu().double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Raise `KernelMismatch` naming the value, the error and the limit."""
    if got.shape != want.shape:
        raise KernelMismatch(f"{name}: shape {tuple(got.shape)}, reference {tuple(want.shape)}")
    error = relative_error(got, want)
    if not error <= limit:
        worst = (got.cpu().double() - want.cpu().double()).abs().nan_to_num(float("inf")).argmax().item()
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape))
        pair = f"{got[at].item():.6g} instead of {want[at].item():.6g}"
        raise KernelMismatch(f"{name}: relative error {error:.3g} > {limit:.3g}; worst at {at}: {pair}")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, torch.empty and empty_like return NaN (integers: their maximum), so an unwritten byte shows."""
    plain_empty, plain_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(plain_empty(*args, **kwargs))

    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(plain_like(*args, **kwargs))

    torch.empty, torch.empty_like = empty, empty_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = plain_empty, plain_like


def readable_id(value: Any) -> str:
    """For pytest's `ids=`: dtypes without "torch.", tuples joined by "x", None as "none"."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return "x".join(readable_id(v) for v in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
