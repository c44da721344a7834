"""Routes the attention of transformers models through qengine's paged cache.

Two attention implementations are registered with transformers. The probe runs once at build time on the meta device:
it sees what every layer asks for (shapes, scale, window, soft cap, mask) and refuses what the paged cache cannot do.
The paged one runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from qengine.errors import CheckpointError
from qengine.layers.attention import Attention
from qengine.layers.batch import Batch
from qengine.plugin import AttentionSpec

PAGED, PROBE = "qengine_paged", "qengine_probe"

HARMLESS = (
    *("dropout", "training", "layer_idx", "position_ids", "position_embeddings", "logits_to_keep", "return_dict"),
    *("cache", "cache_position", "past_key_values", "use_cache", "output_attentions", "output_hidden_states"),
)
"""Arguments that attention layers pass on and that change nothing here."""


KNOWN_UNSUPPORTED = {"s_aux": "sinks (s_aux)", "position_bias": "a position bias (position_bias)"}


@dataclass
class StepBatch:
    """Carries the current batch to the attention layers."""

    batch: Batch | None = None


@dataclass(frozen=True)
class MaskRule:
    """Stands in for an attention mask during the probe: the rule that the model would have built one from."""

    visible: Callable[..., Any]

    def window(self, length: int) -> int | None:
        """The sliding window that the rule amounts to within `length` positions, None for plain causal.

        Raises ValueError when it is neither.
        """
        seen = []
        for q in (length - 1, length // 2):
            keys = torch.arange(length + 1)
            rule = self.visible(torch.tensor(0), torch.tensor(0), torch.tensor(q), keys)
            visible = torch.as_tensor(rule).expand(length + 1)
            count = int(visible.sum())
            if bool(visible[q + 1 :].any()) or not bool(visible[q + 1 - count : q + 1].all()):
                raise ValueError("the attention mask is neither causal nor a sliding window")
            seen.append(count)
        if seen[1] != min(seen[0], length // 2 + 1):
            raise ValueError("the attention mask changes with the position")
        return None if seen[0] == length else seen[0]


@dataclass
class Probe:
    """What the attention layers asked for, in the order of their calls."""

    length: int
    calls: list[tuple[nn.Module, AttentionSpec]] = field(default_factory=list)

    def record(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """q, k, v [1, heads, T, head_dim]. Raises ValueError for what the paged cache cannot do."""
        if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
            raise ValueError(f"query, key and value heads differ in size ({q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]})")
        if k.shape[2] != q.shape[2]:
            raise ValueError(f"{k.shape[2]} keys for {q.shape[2]} queries: not plain self-attention")
        if getattr(module, "is_causal", True) is False or options.pop("is_causal", True) is False:
            raise ValueError("the attention is not causal")
        scale, window, cap = (options.pop(n, None) for n in ("scaling", "sliding_window", "softcap"))
        unknown = [n for n, value in options.items() if n not in HARMLESS and value is not None and value is not False]
        if unknown:
            raise ValueError(f"attention with {KNOWN_UNSUPPORTED.get(unknown[0], unknown[0])} is not supported")
        self.calls.append(
            (
                module,
                AttentionSpec(
                    num_heads=q.shape[1],
                    num_kv_heads=k.shape[1],
                    head_dim=q.shape[3],
                    scale=float(q.shape[3] ** -0.5 if scale is None else scale),
                    sliding_window=self._window(window, mask),
                    soft_cap=None if cap is None else float(cap),
                ),
            )
        )

    def _window(self, asked: int | None, mask: Any) -> int | None:
        """The window that a layer passes on and the one in its mask must agree; the mask alone counts too."""
        if not isinstance(mask, MaskRule):
            raise ValueError("the model builds its attention mask itself")
        found = mask.window(self.length)
        if asked is not None and (asked if asked < self.length else None) != found:
            raise ValueError(f"the layer asks for a sliding window of {asked}, its mask has {found or 'none'}")
        return asked if asked is not None else found


_probes: list[Probe] = []
"""The probe that is running, innermost last."""


def probe_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    _probes[-1].record(module, query, key, value, attention_mask, options)
    return query.transpose(1, 2), None


def probe_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskRule:
    return MaskRule(mask_function)


def paged_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]."""
    attention: Attention = module.qengine_attention  # type: ignore[assignment]
    step: StepBatch = module.qengine_step  # type: ignore[assignment]
    dtype: torch.dtype = module.qengine_dtype  # type: ignore[assignment]
    assert step.batch is not None
    q, k, v = (t[0].transpose(0, 1).to(dtype).contiguous() for t in (query, key, value))
    out = attention(q, k, v, step.batch)
    return out.view(1, *q.shape).to(query.dtype), None


AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, probe_mask)
AttentionInterface.register(PAGED, paged_attention)


def probe(run: Callable[[], Any], length: int, name: str) -> Probe:
    """Run a model built with the PROBE implementation once and return what its layers asked for.

    Whatever the run raises becomes a CheckpointError that names the architecture.
    """
    result = Probe(length)
    _probes.append(result)
    try:
        run()
    except CheckpointError:
        raise
    except Exception as e:  # foreign model code: anything may come
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise CheckpointError(f"{name} does not run through the transformers fallback: {first}") from e
    finally:
        _probes.pop()
    return result
