"""The native families over the real linears and paged attention of a device, beside transformers in float32.

What the plain-torch cache of the other tests cannot show: strided q, k and v, windows and soft caps in the kernels,
narrow outputs of prepacked GEMMs, a tied head that shares the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_reference import SIZES, context, file_state, random_sequences, reference_logits, reference_model, worst
from qengine.layers.attention import KVLayer
from qengine.layers.kv_layer import bind_kv_layer
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.models.registry import build_model
from qengine.plugin import AttentionSpec, KVLayout, KVScales, TensorInfo
from qengine.plugin.discovery import load_plugin
from qengine.runtime.device import select_device
from torch_kv import BLOCK_SIZE, PagedRun

FAMILIES: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "phi3": Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "gemma2": Gemma2Config(**SIZES, head_dim=32, sliding_window=6, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(**SIZES | {"num_hidden_layers": 2}, head_dim=256, sliding_window_pattern=2),
    # every token takes all experts: among random ones, rounding to 16 bits would now and then pick others
    "mixtral": MixtralConfig(**SIZES | {"num_hidden_layers": 2}, num_local_experts=3, num_experts_per_tok=3),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64, mlp_only_layers=[1]
    ),
    "fallback": Olmo2Config(**SIZES),
}


def loaded_on(device: str, dtype: torch.dtype, config: PretrainedConfig, state: dict[str, torch.Tensor]) -> Any:
    """The model with the dense plugin's linears on `device`."""
    torch_device, info = select_device(device)
    ctx: ModelContext = replace(context(config, dtype=dtype), device=torch_device, info=info)
    model, dense = build_model(ctx), load_plugin("weight", "dense").parse(None)
    for leaf in ctx.leaves:
        if isinstance(leaf, Linear):
            infos = [{"weight": TensorInfo(s.name, "F32", (s.out_features, s.in_features))} for s in leaf.specs]
            leaf.resolve([dense.scheme_for(s, i) for s, i in zip(leaf.specs, infos, strict=True)])
        leaf.load({name: state[name].clone() for name, _ in leaf.needs()})
    return model


def binder(model: Any, kv_dtype: str) -> Callable[[AttentionSpec, int], KVLayer]:
    plugin, ctx = load_plugin("kv", kv_dtype), model.ctx

    def bind(spec: AttentionSpec, num_blocks: int) -> KVLayer:
        k, v = plugin(spec, "k", ctx.dtype), plugin(spec, "v", ctx.dtype)
        layout = KVLayout.of(BLOCK_SIZE, k.layout(BLOCK_SIZE), v.layout(BLOCK_SIZE))
        storage = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8, device=ctx.device)
        one = torch.ones(spec.num_kv_heads)
        return bind_kv_layer(k, v, layout, storage, KVScales(one, one), ctx.info)

    return bind


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_on_the_cpu(family: str) -> None:
    reference = reference_model(FAMILIES[family])
    sequences = random_sequences((11, 1, 7, 23))
    want = reference_logits(reference, sequences)
    model = loaded_on("cpu", torch.float32, reference.config, file_state(reference))
    for chunk in (None, 5, 1):
        assert worst(PagedRun(model, sequences, binder(model, "auto")).run(chunk), want) < 1e-4, f"chunk {chunk}"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_the_cpu(family: str, kv_dtype: str) -> None:
    check_close("cpu", torch.bfloat16, family, kv_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_on_cuda(family: str, dtype: torch.dtype, kv_dtype: str) -> None:
    check_close("cuda", dtype, family, kv_dtype)


def check_close(device: str, dtype: torch.dtype, family: str, kv_dtype: str) -> None:
    """Cosine of every token's logits with float32 transformers; logits of other tokens are far below."""
    reference = reference_model(FAMILIES[family])
    sequences = random_sequences((11, 1, 7, 23))
    want = torch.cat(reference_logits(reference, sequences))
    model = loaded_on(device, dtype, reference.config, file_state(reference))
    limit = {"auto": 0.995, "fp8": 0.95}[kv_dtype]
    for chunk in (None, 1):
        got = torch.cat(PagedRun(model, sequences, binder(model, kv_dtype)).run(chunk))
        assert got.dtype == torch.float32
        assert torch.cosine_similarity(got, want, dim=-1).min() > limit
        assert torch.cosine_similarity(got, want.roll(1, 0), dim=-1).mean() < limit - 0.2
