"""A tensor source without tensors: the headers that a checkpoint would have by its config alone.

For plans of models that aren't here, and of the quantised copies that serving would make. Which tensors a quantised
linear holds, its format says (`WeightQuant.expected`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qengine.errors import ConfigError
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import LinearSpec, TensorInfo, WeightQuant
from qengine.runtime.safetensors_file import CODES

Accepts = Callable[[LinearSpec], str | None]


def stays_dense(leaf: Linear, spec: LinearSpec, tables: set[str]) -> bool:
    """The head, tied or not, embeddings (`tables`) and routers: quantisers leave them in 16 bits."""
    return spec.name in tables or leaf.name.endswith("lm_head") or not leaf.quantizable


class DescribedSource:
    """What a checkpoint of `quant` (None: 16-bit) with these leaves holds; dense tensors in `dtype`."""

    def __init__(self, leaves: Sequence[Leaf], quant: WeightQuant | None, dtype: torch.dtype) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        code = CODES[dtype]
        for leaf in leaves:
            if not isinstance(leaf, Linear):
                for name, need in leaf.needs():
                    self._add(name, code, [n or 1 for n in need.shape])
        tables = {name.rpartition(".")[0] for name in self.tensors}
        for leaf in leaves:
            for spec in leaf.specs if isinstance(leaf, Linear) else ():
                assert isinstance(leaf, Linear)
                held = None if quant is None or stays_dense(leaf, spec, tables) else expected(quant, spec)
                if held is not None:
                    self.tensors |= {info.name: info for info in held.values()}
                    continue
                self._add(f"{spec.name}.weight", code, [spec.out_features, spec.in_features])
                if spec.bias:
                    self._add(f"{spec.name}.bias", code, [spec.out_features])
        self._position = {name: i for i, name in enumerate(self.tensors)}

    def _add(self, name: str, code: str, shape: Sequence[int]) -> None:
        self.tensors[name] = TensorInfo(name, code, tuple(shape))

    def read(self, name: str) -> torch.Tensor:
        raise LookupError(f"{name}: there are only headers")

    def file_position(self, name: str) -> tuple[str, int]:
        return "", self._position[name]


def expected(quant: WeightQuant, spec: LinearSpec) -> dict[str, TensorInfo] | None:
    """What the format's config says that this linear holds. Raises ConfigError for a format that does not tell."""
    try:
        held = quant.expected(spec)
    except NotImplementedError as e:
        raise ConfigError(
            f"{quant.name} weights cannot be planned from a config.json alone", hint="a folder with the weights"
        ) from e
    return None if held is None else dict(held)
