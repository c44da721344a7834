"""Random tensors of given headers, on any device: what `--load-format dummy` serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qengine.plugin.weights import TensorInfo

WEIGHT_STD = 0.02
"""Standard deviation of dummy weights, the usual one of freshly initialised models: activations stay finite."""
E4M3_STD, E4M3_MAX = 64.0, 448.0
"""Of codes that use the format's range well."""
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}


@dataclass
class RandomTensors:
    """Draws tensors on the generator's device. Equal states of the generator give equal tensors."""

    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def bits(self, info: TensorInfo) -> torch.Tensor:
        """An integer tensor of which every bit is random."""
        dtype = INTEGERS[info.dtype]
        limits = torch.iinfo(dtype)
        # `high` is exclusive: 64-bit and signed types lose their largest value, which is one among very many.
        high = limits.max if dtype is torch.int64 else limits.max + 1
        return torch.randint(limits.min, high, info.shape, dtype=dtype, device=self.device, generator=self.generator)

    def uniform(self, info: TensorInfo, low: float, high: float) -> torch.Tensor:
        """A float tensor of numbers in [low, high]."""
        drawn = torch.rand(info.shape, device=self.device, generator=self.generator)
        return (drawn * (high - low) + low).to(FLOATS[info.dtype])

    def e4m3(self, info: TensorInfo) -> torch.Tensor:
        """float8_e4m3fn, normal with a standard deviation of E4M3_STD, no NaN."""
        drawn = torch.randn(info.shape, device=self.device, generator=self.generator, dtype=torch.float32)
        return drawn.mul_(E4M3_STD).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    def permutation(self, count: int) -> torch.Tensor:
        """int64 [count]."""
        return torch.randperm(count, device=self.device, generator=self.generator)
