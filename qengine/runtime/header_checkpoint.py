"""A checkpoint of which nothing but headers is read: data that a check asks for is stood in for and noted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.safetensors_file import DTYPES


@dataclass
class HeaderCheckpoint(Checkpoint):
    """`wanted` are the tensors whose data somebody asked for, in order. They got values that raise no objection: ones,
    and zeros for biases and zero points. So what depends on them is assumed, and has to be said."""

    wanted: list[str] = field(default_factory=list)

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the right shape and dtype that takes no memory."""
        if name not in self.wanted:
            self.wanted.append(name)
        info = self.tensors[name]
        value = 0 if name.endswith(("zero_point", "bias")) else 1
        return torch.tensor(value).to(DTYPES[info.dtype]).expand(info.shape)
