"""The contract for other kernels: a package that runs an existing weight format in another way, without touching it.

Entry point of group `qengine.weight_kernels`, under the name of the format:

    [project.entry-points."qengine.weight_kernels"]
    awq = "my_package:MyAwqKernels"

For each linear of that format the engine asks the installed kernels, the greatest `priority` first, and takes the first
that does not refuse the device; else the format's own. Which ones run, and why others do not, the start-up report says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from qengine.plugin.device import DeviceInfo
from qengine.plugin.experts import ExpertsOp
from qengine.plugin.weights import LinearScheme, LinearSpec, TensorNeed


class KernelScheme(LinearScheme):
    """A scheme that stores what `base` stores and means what it means; subclasses say where and how they run it:
    `capability`, `resident_bytes` and `bind`."""

    label: ClassVar[str]
    """Short name of the kernels, for reports."""

    def __init__(self, base: LinearScheme) -> None:
        self.base = base
        self.notes = base.notes
        self.splits_inputs, self.splits_outputs = base.splits_inputs, base.splits_outputs

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"{self.base.format} ({self.label})"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.label, *self.base.key)

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        return self.base.tensors(spec)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.base.dequantize(spec, tensors)

    def inputs_per_scale(self, spec: LinearSpec) -> int | None:
        return self.base.inputs_per_scale(spec)

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        """The format's own grouped kernels, unless a subclass has others."""
        return self.base.bind_experts(spec, count, device, info, dtype)


class WeightKernels(ABC):
    """Other kernels for one weight format."""

    name: ClassVar[str]
    """For reports; the format's name is the entry point's."""
    contract: ClassVar[int | str]
    """The contract version that they were written for, a literal."""
    priority: ClassVar[int] = 0
    """Where several are installed, the greatest is asked first. A format's own kernels come last."""

    @abstractmethod
    def scheme(self, base: LinearScheme, spec: LinearSpec) -> KernelScheme | None:
        """How this linear would run, or None: not a dialect or a shape that these kernels know.

        `base` is the format's own scheme; what lies in the file is told by its `tensors(spec)`. Whether the device will
        do is the answer's `capability`, and there a missing library is said too.
        """
