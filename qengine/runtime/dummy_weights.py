"""`--load-format dummy`: random weights of the right shapes and formats, with no file behind them.

A format that can tell what a file of its config holds (`WeightQuant.expected`) and fill that with random bits
(`WeightQuant.dummy`) does so one module at a time, on the device where the model goes: nothing is kept, and gigabytes
take seconds. Any other makes its tensors through its quantizer, one set for each shape. Speed and memory are what
dummy weights are for, not text.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch

from qengine.errors import ConfigError
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import WEIGHT_STD, LinearSpec, Quantizer, RandomTensors, TensorInfo, WeightQuant
from qengine.runtime.described import stays_dense
from qengine.runtime.quant_config import SPELLINGS, QuantConfig
from qengine.runtime.safetensors_file import CODES

DRAWN_AT_ONCE = 1 << 24
"""Values."""


class DummySource:
    """A tensor source without files. The same seed gives the same weights on the same kind of device.

    `quant` (None: 16-bit) makes linears itself, or else through `quantizer`.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        quant: WeightQuant | None,
        quantizer: Quantizer | None,
        dtype: torch.dtype,
        seed: int,
        device: torch.device,
    ) -> None:
        self.dtype = dtype
        self.seed = seed
        self.device = device
        self.tensors: dict[str, TensorInfo] = {}
        self._ready: dict[str, torch.Tensor] = {}
        self._made: dict[tuple[int, int, bool], dict[str, torch.Tensor]] = {}
        self._quant = quant
        self._expected: dict[str, tuple[LinearSpec, Mapping[str, TensorInfo]]] = {}
        self._module: tuple[str, dict[str, torch.Tensor]] = ("", {})
        for leaf in leaves:
            if not isinstance(leaf, Linear):
                for name, need in leaf.needs():
                    self._add(name, tuple(n or 1 for n in need.shape), dtype)
        tables = {name.rpartition(".")[0] for name in self.tensors}
        for leaf in leaves:
            for spec in leaf.specs if isinstance(leaf, Linear) else ():
                assert isinstance(leaf, Linear)
                dense = quant is None or stays_dense(leaf, spec, tables)
                self._add_linear(spec, None if dense else quantizer, None if dense else quant)
        self._position = {name: i for i, name in enumerate(self.tensors)}

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.tensors[name] = TensorInfo(name, CODES[dtype], tuple(shape))

    def _add_linear(self, spec: LinearSpec, quantizer: Quantizer | None, quant: WeightQuant | None) -> None:
        if quantizer is not None:
            if quantizer.accepts(spec) is None:
                self._add_quantised(spec, quantizer)
                return
        elif quant is not None and (held := quant.expected(spec)) is not None:
            self._expected[spec.name] = (spec, held)
            self.tensors |= {info.name: info for info in held.values()}
            return
        self._add(f"{spec.name}.weight", (spec.out_features, spec.in_features), self.dtype)
        if spec.bias:
            self._add(f"{spec.name}.bias", (spec.out_features,), self.dtype)

    def _add_quantised(self, spec: LinearSpec, quantizer: Quantizer) -> None:
        shape = (spec.out_features, spec.in_features, spec.bias)
        if shape not in self._made:
            weight = self._random(spec.name, shape[:2], torch.float32, torch.device("cpu"))
            tensors = dict(quantizer.quantize(spec, weight))
            if spec.bias:
                tensors["bias"] = torch.zeros(spec.out_features, dtype=torch.float16)
            self._made[shape] = tensors
        for leaf, tensor in self._made[shape].items():
            self._ready[f"{spec.name}.{leaf}"] = tensor
            self._add(f"{spec.name}.{leaf}", tensor.shape, tensor.dtype)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        """Of the seed and the name alone, so that the order of reading does not matter."""
        return torch.Generator(device).manual_seed((self.seed * 1_000_003 + _checksum(name)) % (1 << 63))

    def _random(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A bounded number of rows at a time: float32 of a large vocabulary takes more room than serving leaves."""
        generator, made = self._generator(name, device), torch.empty(tuple(shape), dtype=dtype, device=device)
        rows = max(1, DRAWN_AT_ONCE // max(1, math.prod(shape[1:])))
        for part in made.split(rows):
            part.copy_(torch.randn(part.shape, generator=generator, device=device).mul_(WEIGHT_STD))
        return made

    def read(self, name: str) -> torch.Tensor:
        if name in self._ready:
            return self._ready[name].clone()
        module, _, leaf = name.rpartition(".")
        if module in self._expected:
            return self._values(module)[leaf]
        shape = self.tensors[name].shape
        if len(shape) > 1:
            return self._random(name, shape, self.dtype, self.device)
        # Vectors are norm weights and biases: ones and zeros keep activations in range.
        return torch.zeros(shape, dtype=self.dtype) if name.endswith("bias") else torch.ones(shape, dtype=self.dtype)

    def _values(self, module: str) -> dict[str, torch.Tensor]:
        """The tensors of one module; the last one's are kept, because they are read one after the other."""
        if self._module[0] != module:
            assert self._quant is not None
            random = RandomTensors(self._generator(module, self.device))
            self._module = module, self._quant.dummy(*self._expected[module], random)
        return self._module[1]

    def file_position(self, name: str) -> tuple[str, int]:
        return "", self._position[name]


def _checksum(name: str) -> int:
    return zlib.crc32(name.encode())


def dummy_source(
    leaves: Sequence[Leaf],
    quant: WeightQuant | None,
    stored: QuantConfig | None,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> DummySource:
    """Random weights for `leaves` in the format that `quant` reads (None: 16-bit), made on `device` where that can be.

    Raises ConfigError when that format cannot be made here.
    """
    if quant is None or type(quant).dummy is not WeightQuant.dummy:
        return DummySource(leaves, quant, None, dtype, seed, device)
    config = stored.config if stored is not None else {}
    group = next((config[s] for s in SPELLINGS["group_size"] if s in config), None)
    quantizer = quant.quantizer() if group is None else quant.quantizer(group_size=group)
    if quantizer is None:
        raise ConfigError(f"--load-format dummy cannot make {quant.name} weights", hint="a 16-bit config.json")
    return DummySource(leaves, quant, quantizer, dtype, seed, device)
