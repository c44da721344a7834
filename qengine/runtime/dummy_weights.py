"""`--load-format dummy`: random weights of the right shapes and formats, with no file behind them.

Every format makes its own dummy tensors through its quantizer, so packed words and scales are ones it could have
written. Equal shapes share one set of tensors: speed and memory are what dummy weights are for, not text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from qengine.errors import ConfigError
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import LinearSpec, Quantizer, TensorInfo, WeightQuant
from qengine.runtime.quant_config import SPELLINGS, QuantConfig
from qengine.runtime.safetensors_file import CODES

STD = 0.02
"""Standard deviation of dummy matrices, the usual one of freshly initialised models."""


class DummySource:
    """A tensor source without files. The same seed gives the same weights."""

    def __init__(self, leaves: Sequence[Leaf], quantizer: Quantizer | None, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.seed = seed
        self.tensors: dict[str, TensorInfo] = {}
        self._ready: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[int, int, bool], dict[str, torch.Tensor]] = {}
        for leaf in leaves:
            if not isinstance(leaf, Linear):
                for name, need in leaf.needs():
                    self._add(name, tuple(n or 1 for n in need.shape), dtype)
        tables = {name.rpartition(".")[0] for name in self.tensors}
        for leaf in leaves:
            if not isinstance(leaf, Linear):
                continue
            for spec in leaf.specs:
                # The head, tied or not, embeddings and routers stay 16-bit, as quantisers leave them.
                dense = spec.name in tables or leaf.name.endswith("lm_head") or not leaf.quantizable
                if quantizer is not None and not dense and quantizer.accepts(spec) is None:
                    self._add_quantised(spec, quantizer)
                else:
                    self._add(f"{spec.name}.weight", (spec.out_features, spec.in_features), dtype)
                    if spec.bias:
                        self._add(f"{spec.name}.bias", (spec.out_features,), dtype)
        self._position = {name: i for i, name in enumerate(self.tensors)}

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.tensors[name] = TensorInfo(name, CODES[dtype], tuple(shape))

    def _add_quantised(self, spec: LinearSpec, quantizer: Quantizer) -> None:
        shape = (spec.out_features, spec.in_features, spec.bias)
        if shape not in self._made:
            tensors = dict(quantizer.quantize(spec, self._random(spec.name, shape[:2])))
            if spec.bias:
                tensors["bias"] = torch.zeros(spec.out_features, dtype=torch.float16)
            self._made[shape] = tensors
        for leaf, tensor in self._made[shape].items():
            self._ready[f"{spec.name}.{leaf}"] = tensor
            self._add(f"{spec.name}.{leaf}", tensor.shape, tensor.dtype)

    def _random(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """float32, drawn from the seed and the name alone, so that the order of reading does not matter."""
        gen = torch.Generator().manual_seed((self.seed * 1_000_003 + _checksum(name)) % (1 << 63))
        return torch.randn(tuple(shape), generator=gen) * STD

    def read(self, name: str) -> torch.Tensor:
        if name in self._ready:
            return self._ready[name].clone()
        shape = self.tensors[name].shape
        if len(shape) > 1:
            return self._random(name, shape).to(self.dtype)
        # Vectors are norm weights and biases: ones and zeros keep activations in range.
        return torch.zeros(shape, dtype=self.dtype) if name.endswith("bias") else torch.ones(shape, dtype=self.dtype)

    def file_position(self, name: str) -> tuple[str, int]:
        return "", self._position[name]


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def dummy_source(
    leaves: Sequence[Leaf], quant: WeightQuant | None, stored: QuantConfig | None, dtype: torch.dtype, seed: int
) -> DummySource:
    """Random weights for `leaves` in the format that `quant` reads (None: 16-bit).

    Raises ConfigError when that format cannot be made here.
    """
    if quant is None:
        return DummySource(leaves, None, dtype, seed)
    config = stored.config if stored is not None else {}
    group = next((config[s] for s in SPELLINGS["group_size"] if s in config), None)
    quantizer = quant.quantizer() if group is None else quant.quantizer(group_size=group)
    if quantizer is None:
        raise ConfigError(f"--load-format dummy cannot make {quant.name} weights", hint="a 16-bit config.json")
    return DummySource(leaves, quantizer, dtype, seed)
