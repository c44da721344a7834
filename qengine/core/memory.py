"""Bytes of what a step needs: KV blocks by group, intermediate tensors. Pure functions; `plan` divides by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qengine.core.step import KVGroupSpec, blocks_for


def format_bytes(num_bytes: float) -> str:
    """Such as "512 B" or "1.00 MiB": powers of 1024."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


# KV groups and blocks


def group_layers(windows: Sequence[int | None]) -> list[KVGroupSpec]:
    """KV groups of a model whose layer i has the sliding window `windows[i]` (None: full attention).

    Layers of one kind may be spread over several groups, so that all groups have the same number of layers: that of
    the rarest kind, or of the commonest where that leaves fewer storage tensors unused. Only the last group of a kind
    can be shorter.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    if not counts:
        return []

    def unused(size: int) -> int:
        return sum(-count % size for count in counts)

    size = min((min(counts), max(counts)), key=unused)
    return [
        KVGroupSpec(window, layers[i : i + size])
        for window, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]


def storage_bytes(groups: Sequence[KVGroupSpec], layer_block_bytes: Sequence[int]) -> list[int]:
    """Bytes of one block in each storage tensor: tensor j holds layer j of every group.

    `layer_block_bytes[i]` are the bytes of one block of layer i, as its KV layout says. The sum of the result is what
    one block id costs.
    """
    width = max((len(group.layers) for group in groups), default=0)
    return [max(layer_block_bytes[group.layers[j]] for group in groups if j < len(group.layers)) for j in range(width)]


def most_tokens(groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, max_chunk: int, limit: int) -> int:
    """Longest sequence, at most `limit` tokens, that `num_blocks` usable blocks can hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, block_size, max_chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


# Activations


@dataclass(frozen=True)
class ActivationShape:
    """Widths of one decoder layer and of the head, in elements; itemsizes in bytes.

    `workspace` are bytes that the largest kernel needs beside its inputs and outputs (a dequantised weight, gathered
    K/V); it is counted once.
    """

    hidden: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    residual_itemsize: int
    workspace: int = 0


def activation_bytes(shape: ActivationShape, num_tokens: int, num_logit_rows: int) -> int:
    """Peak bytes of one step's intermediate tensors for `num_tokens` tokens, of which `num_logit_rows` get logits.

    The residual stream, its branch and the normed input live through every phase; beside them the largest of
    attention (q, k, v, rotated q and k, output), MLP (gate and up, their product, the result, which in float16 is
    float32) and head (logits in the compute dtype and float32, the sampler's probabilities, sorted values and int64
    order).
    """
    s = shape
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    stream = num_tokens * s.hidden * (s.residual_itemsize + 2 * s.itemsize)
    attention = num_tokens * (3 * q + 3 * kv) * s.itemsize
    mlp = num_tokens * (3 * s.intermediate * s.itemsize + s.hidden * s.residual_itemsize)
    head = num_logit_rows * s.vocab * (s.itemsize + 4 + 4 + 4 + 8)
    return stream + max(attention, mlp, head) + s.workspace
