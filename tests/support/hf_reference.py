"""Toy transformers models with random weights, and their logits as the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qengine.layers.module import ModelContext
from qengine.models.model import Model
from qengine.models.registry import EXPERTS, build_model
from qengine.plugin import DeviceInfo
from torch_kv import PagedRun
from torch_linear import load_leaves

TOLERANCE = 1e-4
VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of a toy Llama-like config, as keywords."""


def reference_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Every parameter is random and large enough to matter: matrices keep the scale of their input, norm weights lie
    around their neutral value, biases around 0."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=gen)
            if p.dim() > 1:
                p.copy_(noise * (1.0 if "embed" in name else 1.5 / p.shape[-1] ** 0.5))
            else:
                p.add_(0.3 * noise)
    return model


def reference_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """float32 [length, vocab] of each sequence, computed alone and in one go."""
    with torch.inference_mode():
        return [model(torch.tensor([list(s)]), use_cache=False).logits[0] for s in sequences]


def context(config: Any, max_model_len: int = 64, dtype: torch.dtype = torch.float32) -> ModelContext:
    return ModelContext(config, torch.device("cpu"), DeviceInfo("cpu"), dtype, torch.float32, max_model_len)


def file_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict under the names of the family's files: transformers holds experts stacked, under other names."""
    names = EXPERTS.get(model.config.model_type)
    out: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        layer, mlp, rest = name.partition(".mlp.")
        if names is None or not mlp or not rest.startswith(("gate.", "experts.")):
            out[name] = value
        elif rest == "gate.weight":
            out[f"{layer}.{names.block}.gate.weight"] = value
        else:
            leaves = [names.down] if rest == "experts.down_proj" else [names.gate, names.up]
            for e, expert in enumerate(value):
                for leaf, part in zip(leaves, expert.chunk(len(leaves)), strict=True):
                    out[f"{layer}.{names.block}.experts.{e}.{leaf}.weight"] = part
    return out


def loaded(reference: PreTrainedModel, config: Any = None, max_model_len: int = 64) -> Model:
    """qengine's model with the reference's weights. Fails if a tensor of the state dict is left over."""
    ctx = context(config or reference.config, max_model_len)
    model = build_model(ctx)
    state = file_state(reference)
    left = set(state) - load_leaves(ctx.leaves, state)
    assert left <= ({"lm_head.weight"} if model.tied else set()), f"not loaded: {sorted(left)}"
    return model


def random_sequences(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=gen).tolist() for n in lengths]


def worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference of any logit; NaN counts as infinite."""
    return max((g - w).abs().nan_to_num(nan=torch.inf).max().item() for g, w in zip(got, want, strict=True))


def assert_equal_to_reference(
    config: PretrainedConfig,
    spoil: Callable[[Model], None],
    lengths: Sequence[int] = (11, 1, 7, 23),
    max_model_len: int = 64,
) -> None:
    """One prefill, chunked prefill and token by token all equal transformers; the model that `spoil` has changed
    does not, by a hundred times the tolerance."""
    reference = reference_model(config)
    sequences = random_sequences(lengths)
    want = reference_logits(reference, sequences)
    model = loaded(reference, max_model_len=max_model_len)
    for chunk in (None, 5, 1):
        assert worst(PagedRun(model, sequences).run(chunk), want) < TOLERANCE, f"chunk {chunk}"
    spoil(model)
    assert worst(PagedRun(model, sequences).run(), want) > 100 * TOLERANCE, "the wrong control passes"
