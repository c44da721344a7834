"""Which linears read which vector, and what makes it: a model's own account of itself, for calibration.

A factor on a channel of the vector can be moved from the readers' columns into the producer: x W^T = (x / f) (W f)^T.
The blocks that a decoder layer is made of state their own feeds, so nothing is guessed from names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine.layers.linear import Linear
from qengine.layers.norm import RMSNorm


@dataclass(frozen=True)
class Feed:
    """One vector of a layer. `readers` are all linears that read it; the first of them sees every token.

    producer  the norm, or the linear, whose outputs are multiplied by nothing but whole-channel factors before they
              are read; None where no factor can be taken out
    channels  of a linear: int64 [K], the row of its (stacked) outputs that each channel of the vector comes from
    """

    readers: Sequence[Linear]
    producer: RMSNorm | Linear | None = None
    channels: torch.Tensor | None = None
