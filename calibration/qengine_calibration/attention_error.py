"""What rounding keys and values does to an attention layer's output, on a few sequences of the text.

Element by element, a rounding error says little about that: keys often have channels that are large in every token, and
an error which all keys share moves no softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qengine.plugin import AttentionSpec, KVDtype

QUERIES = 64
"""Tokens of a sequence whose outputs are looked at, evenly spread."""
UNIT = 8
"""Queries whose errors are taken together: those of neighbouring tokens are alike."""


@dataclass(frozen=True)
class Example:
    """A sequence in one attention layer, float32: q [Q, num_heads, head_dim] of the tokens at `positions` [Q], k and v
    [L, num_kv_heads, head_dim] of all tokens."""

    spec: AttentionSpec
    positions: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Example:
        """q of all tokens of the sequence; the last token is always among those looked at."""
        count = min(len(q), QUERIES)
        positions = (torch.arange(1, count + 1, device=q.device) * len(q)) // count - 1
        return cls(spec, positions, q[positions].float(), k.float().clone(), v.float().clone())

    def weights(self, k: torch.Tensor) -> torch.Tensor:
        """Attention weights for other keys, as [num_kv_heads, group, Q, L]."""
        spec = self.spec
        q = self.q.unflatten(1, (spec.num_kv_heads, spec.group)).permute(1, 2, 0, 3)
        scores = (q @ k.permute(1, 2, 0)[:, None]).mul_(spec.scale)
        if spec.soft_cap is not None:
            scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
        distance = self.positions[:, None] - torch.arange(len(k), device=k.device)
        hidden = distance < 0
        if spec.sliding_window is not None:
            hidden |= distance >= spec.sliding_window
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1)

    def output(self, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[num_kv_heads, group, Q, head_dim]."""
        return weights @ v.transpose(0, 1)[:, None]


def scaled_round(plugin: KVDtype, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x float32 [..., heads, head_dim] as it comes back from a cache; scale [heads] or [1]."""
    s = scale.to(x.device)[:, None]
    return plugin.decode(plugin.encode(x / s), torch.float32) * s


def side_errors(examples: Sequence[Example], plugin: KVDtype, tried: torch.Tensor) -> torch.Tensor:
    """Squared output errors of scales for the plugin's side, the other side exact.

    tried float32 [C, heads] or [C, 1] -> float64 [C, num_kv_heads, units]; a unit is the sum over UNIT neighbouring
    queries of one sequence (its last one may have fewer).
    """
    out = []
    for e in examples:
        weights = e.weights(e.k)
        exact = e.output(weights, e.v)
        rows = []
        for scale in tried:
            if plugin.side == "k":
                got = e.output(e.weights(scaled_round(plugin, e.k, scale)), e.v)
            else:
                got = e.output(weights, scaled_round(plugin, e.v, scale))
            error = (got - exact).double().square().sum((1, 3))
            rows.append(torch.stack([part.sum(1) for part in error.split(UNIT, 1)], 1))
        out.append(torch.stack(rows))
    return torch.cat(out, 2).cpu()


def attention_error(
    examples: Sequence[Example], plugins: tuple[KVDtype, KVDtype], k: torch.Tensor, v: torch.Tensor
) -> float:
    """What these scales do to the layer's output: root of the squared error by that of the exact output. `plugins`
    store K and V; k and v float32 [heads] or [1]."""
    error = power = 0.0
    for e in examples:
        exact = e.output(e.weights(e.k), e.v)
        got = e.output(e.weights(scaled_round(plugins[0], e.k, k)), scaled_round(plugins[1], e.v, v))
        error += float((got - exact).double().square().sum())
        power += float(exact.double().square().sum())
    return (error / max(power, 1e-60)) ** 0.5
