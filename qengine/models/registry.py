"""Which code runs which checkpoint: native families first, else the transformers fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qengine.errors import CheckpointError, UserError
from qengine.layers.module import ModelContext
from qengine.layers.moe import ExpertNames
from qengine.models import gemma2, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe
from qengine.models.model import Model

__all__ = ["EXPERTS", "NATIVE", "Model", "build_model", "native_builder"]

NATIVE: dict[str, tuple[str, Callable[[ModelContext], Model]]] = {
    "llama": ("LlamaForCausalLM", llama.build),
    "mistral": ("MistralForCausalLM", mistral.build),
    "qwen2": ("Qwen2ForCausalLM", qwen2.build),
    "qwen3": ("Qwen3ForCausalLM", qwen3.build),
    "mixtral": ("MixtralForCausalLM", mixtral.build),
    "qwen2_moe": ("Qwen2MoeForCausalLM", qwen2_moe.build),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe.build),
    "phi3": ("Phi3ForCausalLM", phi3.build),
    "gemma2": ("Gemma2ForCausalLM", gemma2.build),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3.build),
}
"""model_type -> (architecture, builder)."""

EXPERTS: dict[str, ExpertNames] = {
    "mixtral": mixtral.NAMES,
    "qwen2_moe": qwen2_moe.NAMES,
    "qwen3_moe": qwen3_moe.NAMES,
}
"""model_type -> how these families' checkpoints name experts."""


def native_builder(config: Any) -> Callable[[ModelContext], Model] | None:
    """The builder of a native family, where model_type and architecture agree on it; None otherwise."""
    architecture, builder = NATIVE.get(getattr(config, "model_type", None) or "", ("", None))
    stated = getattr(config, "architectures", None)
    return builder if not stated or architecture in stated else None


def build_model(ctx: ModelContext) -> Model:
    """Build the model that `ctx.config` describes: leaves and attention layers are registered, no data is read.

    Raises CheckpointError for what is no causal language model, what the installed transformers does not know, for
    config fields that qengine does not implement, and for values that no model can be made of.
    """
    try:
        return _built(ctx)
    except UserError:
        raise
    except Exception as e:  # a config.json may hold anything, and everything that is computed from it may fail
        kind = getattr(ctx.config, "model_type", None)
        raise CheckpointError(f"config.json makes no {kind} model: {type(e).__name__}: {e}") from e


def _built(ctx: ModelContext) -> Model:
    config = ctx.config
    check_causal(config)
    builder = native_builder(config)
    if builder is not None:
        return builder(ctx)
    from qengine.models.fallback import build

    return build(ctx)


def check_causal(config: Any) -> None:
    """Refuse encoder-decoders and heads that are not language models (classification, embedding, ...) by name."""
    stated = list(getattr(config, "architectures", None) or [])
    name = ", ".join(stated) or getattr(config, "model_type", None) or type(config).__name__
    supported = ", ".join(a for a, _ in NATIVE.values())
    hint = f"natively {supported}; other decoder-only ...ForCausalLM models of transformers through the fallback"
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder", hint=hint)
    if stated and not any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in stated):
        raise CheckpointError(f"{name} is not a causal language model", hint=hint)
