"""How much memory a calibration run will take, from shapes alone, and how many tokens fit into a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qengine.errors import CapacityError
from qengine.layers.linear import Linear
from qengine.models.blocks import DecoderLayer
from qengine.plugin import LinearSpec
from qengine.runtime import device as devices
from qengine_calibration.attention_error import QUERIES
from qengine_calibration.layer import LayerQuantizer
from qengine_calibration.observe import EXAMPLE_TOKENS
from qengine_calibration.stream import LayerStream


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. `base`: what the process has already where layers run on the CPU, else 0; `layer`: the most that one
    layer's weights, statistics and quantising take; `token`: what each token of a micro-batch adds; `tokens`: how many
    those are; `host`: what the CPU holds of a layer beside a GPU, 0 where there is none."""

    base: int
    layer: int
    token: int
    tokens: int
    host: int

    @property
    def peak(self) -> int:
        """On the device where layers run."""
        return self.base + self.layer + self.token * self.tokens

    def lines(self, device: torch.device) -> list[str]:
        """For the start of a run."""
        own = f", {_mib(self.base)} of it this process before" if self.base else ""
        lines = [
            f"memory on {device.type}, whatever the amount of text: about {_mib(self.peak)}{own}; "
            f"micro-batches of {self.tokens:,} tokens take {_mib(self.token * self.tokens)}"
        ]
        if self.host:
            lines.append(f"memory of the host beside it: about {_mib(self.host)}")
        return lines


def plan_memory(
    stream: LayerStream, quantizer: LayerQuantizer | None, again: bool, most: int | None, kv: bool = False
) -> MemoryPlan:
    """`again`: layers run a second time, as quantised; `most`: bytes that --max-memory allows on the device; `kv`: KV
    scales are chosen.

    Takes as many tokens a micro-batch as `stream.tokens_at_once` says, or fewer so that they fit. Raises CapacityError
    where a single sequence does not.
    """
    cpu = stream.device.type == "cpu"
    base = devices.allocated(stream.device) if cpu else 0
    layer = max(
        _layer_bytes(stream, layer, quantizer, again) + (_example_bytes(stream, layer) if kv else 0)
        for layer in stream.layers
    )
    token = max(_token_bytes(stream, layer) for layer in stream.layers)
    longest = max(map(len, stream.sequences))
    tokens = min(stream.tokens_at_once, sum(map(len, stream.sequences)))
    if most is not None:
        fit = (most - base - layer) // token
        if fit < longest:
            need = base + layer + token * longest
            raise CapacityError(
                f"--max-memory: one layer and one sequence of {longest} tokens do not fit", have=_mib(most),
                need=_mib(need), hint="more, or a smaller --seq-len",
            )  # fmt: skip
        tokens = min(tokens, fit // longest * longest)
    host = 0 if cpu else max(_stored_bytes(stream, layer) for layer in stream.layers)
    return MemoryPlan(base, layer, token, tokens, host)


def _layer_bytes(stream: LayerStream, layer: DecoderLayer, quantizer: LayerQuantizer | None, again: bool) -> int:
    """While text runs through a layer, its weights and statistics are there; while it is quantised, float32 weights
    (each gives way to what it has become) and what one linear's quantising takes; while it runs again, the weights
    beside what they were loaded from."""
    loaded = sum(sum(leaf.resident_bytes(stream.info).values()) for leaf in layer.leaves)
    if quantizer is None:
        return loaded
    statistics = 0
    if quantizer.wants_moment:
        statistics = sum(4 * leaf.in_features**2 for leaf in quantizer.observed(layer))
    names = {name for leaf in layer.leaves for name, _ in leaf.needs()}
    weights = 4 * _elements(stream, names)
    chosen: Iterable[LinearSpec] = quantizer.chosen(layer.leaves).values()
    work = max((quantizer.quantizer.work_bytes(spec) for spec in chosen), default=0)
    return max(loaded + statistics, weights + statistics + work, loaded + weights if again else 0)


def _token_bytes(stream: LayerStream, layer: DecoderLayer) -> int:
    """Hidden states before and after the layer, and the wider of its two halves, observers' copies included."""
    item, hidden = stream.dtype.itemsize, stream.model.hidden_size
    spec = layer.attention.attention.spec
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = item * (hidden + 2 * (q + 2 * kv) + 4 * q)
    width = max([layer.mlp.width, *(leaf.in_features for leaf in layer.leaves if isinstance(leaf, Linear))])
    mlp = item * (hidden + 3 * width) + 4 * width * (1 if item == 4 else 2)
    return 8 * hidden + max(attention, mlp)


def _example_bytes(stream: LayerStream, layer: DecoderLayer) -> int:
    """Queries, keys and values that are kept; attention weights and outputs of one sequence, twice."""
    spec = layer.attention.attention.spec
    longest = max(map(len, stream.sequences))
    kept = max(1, EXAMPLE_TOKENS // longest)
    queries = min(QUERIES, longest) * spec.num_heads
    kv = 2 * longest * spec.num_kv_heads * spec.head_dim
    return 4 * (kept * (kv + queries * spec.head_dim) + 2 * queries * (longest + spec.head_dim) + kv)


def _stored_bytes(stream: LayerStream, layer: DecoderLayer) -> int:
    names = {name for leaf in layer.leaves for name, _ in leaf.needs()}
    return 4 * _elements(stream, names)


def _elements(stream: LayerStream, names: Iterable[str]) -> int:
    tensors = stream.checkpoint.tensors
    return sum(math.prod(tensors[name].shape) for name in names if name in tensors)


def _mib(n: int) -> str:
    return f"{n / 2**20:,.0f} MiB"
