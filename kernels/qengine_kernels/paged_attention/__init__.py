"""Attention over a paged KV cache, for every format that stores one element a value.

`TritonPagedKV` is loaded on first use, so that the reference stays importable without Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qengine_kernels.paged_attention.reference import paged_attention_reference

if TYPE_CHECKING:
    from qengine_kernels.paged_attention.paged_kv import TritonPagedKV

__all__ = ["TritonPagedKV", "paged_attention_reference"]


def __getattr__(name: str) -> Any:
    if name == "TritonPagedKV":
        from qengine_kernels.paged_attention.paged_kv import TritonPagedKV

        return TritonPagedKV
    raise AttributeError(name)
