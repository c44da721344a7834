"""What two models' logits say about each other, position by position, and the figures made from that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ARRAYS = 7
"""float32 [R, V] arrays alive at the peak of `compare`, the logits that it is given among them."""


@dataclass(frozen=True)
class Positions:
    """Figures of R positions, float32 [R] each; `kl` and `agree` (0 or 1) are None where there is one model only.

    `nll_a`, `nll_b`  -log of the probability that A and B give to the token that follows, in nats
    `kl`              KL(A || B) over the whole vocabulary, in nats
    `agree`           whether A's and B's likeliest tokens are the same
    """

    nll_a: torch.Tensor
    nll_b: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    agree: torch.Tensor | None = None


@torch.inference_mode()
def compare(a: torch.Tensor, b: torch.Tensor | None, targets: torch.Tensor) -> Positions:
    """a, b float32 [R, V] logits of the same positions, targets int64 [R]: the tokens that follow.

    All arithmetic is float32. Rounding can put the KL of two near-equal rows a few 1e-7 below zero; it is raised to 0.
    """
    index = targets.to(a.device).unsqueeze(1)
    log_a = a.log_softmax(-1)
    nll_a = -log_a.gather(1, index).squeeze(1)
    if b is None:
        return Positions(nll_a)
    agree = (a.argmax(-1) == b.argmax(-1)).float()
    log_b = b.log_softmax(-1)
    nll_b = -log_b.gather(1, index).squeeze(1)
    # Only logits of -inf give a probability of exactly zero here; looking for one is cheaper than masking always.
    impossible = torch.isneginf(log_a) if bool(torch.isinf(log_a.amin())) else None
    difference = log_b.neg_().add_(log_a)  # in place: log_b isn't needed any more
    weighted = difference.mul_(log_a.exp_())
    if impossible is not None:
        weighted.masked_fill_(impossible, 0.0)  # 0 log 0 = 0
    return Positions(nll_a, nll_b, weighted.sum(-1).clamp_min(0.0), agree)


@dataclass
class Tally:
    """Every position's figures, in the order of the text; four floats a position is all that is kept."""

    parts: list[Positions] = field(default_factory=list)

    def add(self, part: Positions) -> None:
        cpu = (None if t is None else t.cpu() for t in (part.nll_a, part.nll_b, part.kl, part.agree))
        self.parts.append(Positions(*cpu))  # type: ignore[arg-type]

    def array(self, name: str) -> np.ndarray | None:
        """float64 [positions] of one of the figures; None where there is one model only."""
        found = [getattr(part, name) for part in self.parts]
        if not found or found[0] is None:
            return None
        joined: np.ndarray = torch.cat(found).double().numpy()
        return joined


def perplexity(nll: np.ndarray) -> float:
    return math.exp(nll.mean())


def comparison(nll_a: np.ndarray, nll_b: np.ndarray, kl: np.ndarray, agree: np.ndarray) -> dict[str, Any]:
    """The figures of B against A. Percentiles interpolate linearly.

    `nll_change` is the mean of -log p(B) + log p(A), with the standard error of that mean over positions taken as
    independent, so that a change inside the noise can be seen as such; perplexity is multiplied by exp(nll_change).
    """
    change = nll_b - nll_a
    error = float(change.std(ddof=1) / math.sqrt(len(change))) if len(change) > 1 else 0.0
    return {
        "kl_mean": float(kl.mean()),
        "kl_median": float(np.percentile(kl, 50)),
        "kl_p99": float(np.percentile(kl, 99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(agree.mean()),
        "nll_change": float(change.mean()),
        "nll_change_standard_error": error,
        "perplexity_ratio": math.exp(change.mean()),
    }
