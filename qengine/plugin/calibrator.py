"""The optional part of the weight-format contract that takes part in calibration.

`qengine calibrate --quant NAME` runs text through the 16-bit model layer by layer. What the linears read is summed up
in `InputStats`; a format whose quantizer is a `CalibratedQuantizer` gets these statistics, twice: first to choose
factors on channels, which are taken out of whatever produces the vector (a norm's weight, the rows of a linear), then
with each weight that it is to quantise. A plain `Quantizer` works with the same command and sees weights only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from qengine.plugin.weights import LinearSpec, Quantizer


@dataclass(frozen=True)
class InputStats:
    """What calibration saw of the vectors x that one linear reads; float32, K inputs.

    tokens    how many vectors
    mean_abs  [K]: mean of |x|
    amax      [K]: largest |x|
    moment    [K, K]: mean of x x^T over all tokens, where the quantizer asked for it. With D = W' - W, the mean square
              of the output's error is exactly the trace of D moment D^T.
    """

    tokens: int
    mean_abs: torch.Tensor
    amax: torch.Tensor
    moment: torch.Tensor | None = None

    def divided(self, factors: torch.Tensor) -> InputStats:
        """The statistics of x / factors, factors [K]."""
        moment = None if self.moment is None else self.moment / factors / factors[:, None]
        return replace(self, mean_abs=self.mean_abs / factors, amax=self.amax / factors, moment=moment)

    def output_error(self, difference: torch.Tensor) -> float:
        """difference [N, K] of two weights -> mean over tokens of the squared error of the N outputs together."""
        assert self.moment is not None, "this quantizer did not ask for moments"
        return float(((difference @ self.moment) * difference).sum())


class CalibratedQuantizer(Quantizer):
    """A Quantizer that looks at activations."""

    wants_moment: ClassVar[bool] = True
    """Whether InputStats need `moment`: K * K floats for each vector of a layer, and as many operations a token."""

    cold_rule: ClassVar[str] = "they are rounded by their weights alone"
    """What reports say of linears that saw too few tokens: what `quantize_cold` does."""

    def input_factors(
        self, readers: Sequence[tuple[LinearSpec, torch.Tensor]], stats: InputStats, channels: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Choose factors f [K], finite and positive, for a vector that `readers` (spec, weight float32 [N, K]) read.

        The caller then divides the vector by f where it is made, and multiplies the readers' columns by f: without
        rounding nothing changes. `channels` int64 [K] is given where several channels have one source (a value head
        that is read by several query heads): channels of equal number must get equal factors (see `tie`). None, the
        default: leave it as it is.
        """
        return None

    @abstractmethod
    def quantize_calibrated(
        self, spec: LinearSpec, weight: torch.Tensor, stats: InputStats
    ) -> dict[str, torch.Tensor]:
        """As `quantize`, for inputs like those in `stats`."""

    def quantize_cold(
        self, spec: LinearSpec, weight: torch.Tensor, relatives: InputStats | None
    ) -> dict[str, torch.Tensor]:
        """As `quantize`, for a linear that saw too few tokens: an expert that is rarely chosen. `relatives` are the
        statistics of the same linear of that expert which saw the largest values, None where no expert saw enough. By
        default the weights alone decide; what does otherwise says so in `cold_rule`."""
        return self.quantize(spec, weight)


def tie(values: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
    """values float32 [K] > 0 -> their geometric mean over channels of equal number, [K]."""
    if channels is None:
        return values
    _, index = torch.unique(channels, return_inverse=True)
    count = torch.bincount(index)
    total = torch.zeros(len(count), dtype=torch.float32, device=values.device)
    return (total.index_add_(0, index, values.log()) / count).exp()[index]
