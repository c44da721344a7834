"""What is looked at while text runs through a layer: the inputs of linears, and keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qengine.layers.batch import Batch
from qengine.layers.linear import Linear
from qengine.plugin import AttentionSpec, InputStats, LinearOp
from qengine_calibration.attention_error import Example

SAMPLE_ROWS = 256
"""Inputs of a linear that are kept, spread over the text, where no moment tells the outputs' error."""


@dataclass(frozen=True)
class Seen:
    """What came by in front of a linear: `stats` for the quantizer, `sample` float32 [rows, K] for the report where
    `stats` hold no moment."""

    stats: InputStats
    sample: torch.Tensor | None = None

    def divided(self, factors: torch.Tensor) -> Seen:
        """The same of x / factors, factors [K]."""
        return Seen(self.stats.divided(factors), None if self.sample is None else self.sample / factors)

    def output_power(self, weight: torch.Tensor) -> float:
        """Mean over tokens of the squared size of x weight^T, weight [N, K]."""
        if self.stats.moment is not None:
            return max(self.stats.output_error(weight), 0.0)
        assert self.sample is not None
        return float((self.sample @ weight.t()).square().sum()) / len(self.sample)


class InputObserver(LinearOp):
    """Runs a linear's ops and sums up what they read, in float32 on the linear's device. Takes the place of the ops."""

    def __init__(self, leaf: Linear, moment: bool, expected: int) -> None:
        """`expected` tokens will come by, or fewer."""
        self.ops = list(leaf.ops)
        self.in_features, self.out_features = leaf.in_features, leaf.out_features
        self.kernel = "observed"
        self.tokens = 0
        self._sum: torch.Tensor | None = None
        self._amax: torch.Tensor | None = None
        self._moment: torch.Tensor | None = None
        self._wants_moment = moment
        self._sample: list[torch.Tensor] = []
        self._step = max(1, expected // SAMPLE_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.see(x.float())
        return torch.cat([op(x) for op in self.ops], dim=-1) if len(self.ops) > 1 else self.ops[0](x)

    def see(self, x: torch.Tensor) -> None:
        """x float32 [T, K]."""
        size = x.abs()
        if self._sum is None or self._amax is None:
            self._sum, self._amax = size.sum(0), size.amax(0)
        else:
            self._sum += size.sum(0)
            self._amax = torch.maximum(self._amax, size.amax(0))
        if self._wants_moment:
            if self._moment is None:
                self._moment = x.new_zeros(x.shape[1], x.shape[1])
            self._moment.addmm_(x.t(), x)
        else:
            self._sample.append(x[-self.tokens % self._step :: self._step].clone())
        self.tokens += len(x)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{k}": t for i, op in enumerate(self.ops) for k, t in op.buffers().items()}

    def seen(self) -> Seen | None:
        """None when no token came by. What was summed up goes into the result: asked once."""
        if self._sum is None or self._amax is None:
            return None
        if self._moment is None:
            return Seen(InputStats(self.tokens, self._sum / self.tokens, self._amax), torch.cat(self._sample))
        return Seen(InputStats(self.tokens, self._sum / self.tokens, self._amax, self._moment.div_(self.tokens)))


def observe(leaves: Sequence[Linear], moment: bool, expected: int) -> dict[str, InputObserver]:
    """Put an observer in front of each loaded linear, by its name."""
    out = {}
    for leaf in leaves:
        observer = InputObserver(leaf, moment, expected)
        leaf.ops = [observer]
        out[leaf.name] = observer
    return out


class PlainKV:
    """Attention over the batch alone, in the way of a KVLayer: every sequence starts at its first token and all are
    equally long. An observer sees queries, keys (after RoPE) and values."""

    kernel = "plain causal attention"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.observer: KVObserver | None = None
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: Batch, group: int) -> None:
        self._kv = k, v

    def attend(self, q: torch.Tensor, batch: Batch, group: int) -> torch.Tensor:
        assert self._kv is not None
        (k, v), self._kv = self._kv, None
        length = batch.host_query_lens[0]
        if self.observer is not None:
            self.observer.see(q, k, v, length)
        return plain_attention(q, k, v, self.spec, length)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, length: int
) -> torch.Tensor:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] of T / length sequences -> as q; causal."""
    q4, k4, v4 = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    window = spec.sliding_window
    if spec.soft_cap is None and (window is None or window >= length):
        out = F.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=spec.scale, enable_gqa=True)
    else:
        out = torch.cat([_one(a[None], b[None], c[None], spec) for a, b, c in zip(q4, k4, v4, strict=True)])
    return out.transpose(1, 2).flatten(0, 1)


def _one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[1, heads, L, head_dim], with windows and soft caps."""
    k, v = (t.float().repeat_interleave(spec.group, dim=1) for t in (k, v))
    scores = (q.float() @ k.transpose(2, 3)).mul_(spec.scale)
    if spec.soft_cap is not None:
        scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    visible = distance >= 0
    if spec.sliding_window is not None:
        visible &= distance < spec.sliding_window
    return (scores.masked_fill_(~visible, -torch.inf).softmax(-1) @ v).to(q.dtype)


BINS_PER_OCTAVE = 64
LOWEST, HIGHEST = -24, 24
"""Powers of two between which magnitudes are told apart."""
BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE
PIECE = 512
"""Tokens that are counted together: counting takes some ten times the memory of the values."""
EXAMPLE_TOKENS = 4096


def bin_centers() -> torch.Tensor:
    """float32 [BINS]; the first stands for everything smaller, zero included."""
    centers = torch.exp2(LOWEST + (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS_PER_OCTAVE)
    centers[0] = 0.0
    return centers.float()


class Magnitudes:
    """How large the values of each head are: a histogram over powers of two, and the largest."""

    def __init__(self, heads: int) -> None:
        self.counts = torch.zeros(heads, BINS, dtype=torch.int64)
        self.amax = torch.zeros(heads)

    def see(self, x: torch.Tensor) -> None:
        """x [T, heads, head_dim]."""
        for part in x.detach().split(PIECE):
            self._see(part)

    def _see(self, x: torch.Tensor) -> None:
        size = x.float().abs().transpose(0, 1).flatten(1)
        place = ((size.log2() - LOWEST) * BINS_PER_OCTAVE).clamp_(0, BINS - 1).to(torch.int64)
        place += torch.arange(len(size), device=size.device)[:, None] * BINS
        self.counts += torch.bincount(place.flatten(), minlength=self.counts.numel()).view_as(self.counts).cpu()
        self.amax = torch.maximum(self.amax, size.amax(1).cpu())


class KVObserver:
    """Keys and values of one attention layer. The first sequences are kept, to see what rounding does to the layer's
    output: as many as EXAMPLE_TOKENS hold, one at least."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.k, self.v = Magnitudes(spec.num_kv_heads), Magnitudes(spec.num_kv_heads)
        self.tokens = 0
        self.examples: list[Example] = []

    def see(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> None:
        """q, k and v of sequences of `length` tokens."""
        kept = sum(len(e.k) for e in self.examples)
        for start in range(0, len(k), length):
            if self.examples and kept + length > EXAMPLE_TOKENS:
                break
            part = slice(start, start + length)
            self.examples.append(Example.of(self.spec, q[part], k[part], v[part]))
            kept += length
        self.k.see(k)
        self.v.see(v)
        self.tokens += len(k)
