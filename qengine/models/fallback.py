"""Any other decoder of transformers: its modules, with qengine's linears, attention and cache.

The model's own code runs on one row of packed tokens, [1, T], with explicit positions and no transformers cache. So
everything between the attention layers must work token by token; what does not (recurrent layers, convolutions,
experts, sinks, own masks) is refused by name at build time.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from qengine.errors import CheckpointError
from qengine.layers.attention import Attention
from qengine.layers.batch import Batch
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.models.fallback_attention import PAGED, PROBE, Probe, StepBatch, probe
from qengine.models.fallback_modules import (
    FallbackEmbedding,
    FallbackLinear,
    ModuleTensors,
    Passthrough,
    freeze_rope,
    parameters_on_meta,
    replace_module,
)
from qengine.models.model import Model, is_tied, output_layer
from qengine.models.settings import max_position, positive

EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)
PROBE_TOKENS = 3


def build(ctx: ModelContext) -> Model:
    """Build the transformers model of `ctx.config`. Raises CheckpointError, naming the architecture, for what the
    installed transformers does not know and for what the fallback cannot run."""
    config = ctx.config
    name = (getattr(config, "architectures", None) or [getattr(config, "model_type", type(config).__name__)])[0]
    check_config(config, name)
    causal = instantiate(config, name)
    check_built(causal, name)
    return FallbackModel(ctx, causal, name)


def check_config(config: Any, name: str) -> None:
    for kind in ("vision_config", "audio_config", "text_config"):
        if getattr(config, kind, None) is not None:
            raise CheckpointError(f"{name} is a multimodal model ({kind}); only text models run here")
    for field in EXPERT_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 1:
            raise CheckpointError(f"{name} is a mixture of experts ({field} = {value}); not supported yet")


def instantiate(config: Any, name: str) -> Any:
    """The ...ForCausalLM module with parameters on the meta device and real buffers."""
    from transformers import AutoModelForCausalLM

    # a config class from the checkpoint's own code exists only where the user has trusted that code
    trusted = type(config).__module__.startswith("transformers_modules")
    known: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if known is not None and known._is_stateful:
        raise CheckpointError(f"{name} has recurrent layers, which a paged KV cache cannot hold")
    if known is not None and not known._supports_attention_backend:
        raise CheckpointError(f"{name} does not let its attention be replaced (ALiBi, own caches or older code)")
    try:
        with parameters_on_meta():
            causal = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=PROBE, dtype=torch.float32, trust_remote_code=trusted
            )
    except Exception as e:  # foreign model code: anything may come
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise CheckpointError(f"{name} cannot be built by the installed transformers: {first}") from e
    return causal.eval()


def check_built(causal: Any, name: str) -> None:
    """Refuse what the modules themselves tell; the probe finds the rest."""
    decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    if decoder is causal or not isinstance(head, nn.Linear):
        raise CheckpointError(f"{name} is not a decoder with a linear output layer")
    if is_tied(causal.config) and head.bias is not None:
        raise CheckpointError(f"{name} has a bias on an output layer that is tied to the embedding; not supported")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise CheckpointError(f"{name} takes no positions, so packed sequences cannot run through it")
    mixing = next((n for n, m in causal.named_modules() if isinstance(m, nn.Conv1d | nn.RNNBase)), None)
    if mixing is not None:
        raise CheckpointError(f"{name} mixes neighbouring tokens outside attention ({mixing})")


class FallbackModel(Model):
    """A transformers decoder whose linears, embedding and attention are qengine's."""

    def __init__(self, ctx: ModelContext, causal: Any, name: str) -> None:
        super().__init__(ctx)
        config = ctx.config
        self.name = name
        self.vocab_size = positive(config, "vocab_size")
        self.hidden_size = positive(config, "hidden_size")
        self.num_layers = positive(config, "num_hidden_layers")
        self.max_position = max_position(config)
        self.tied = is_tied(config)
        self.step = StepBatch()
        self.causal = causal
        self.decoder = causal.get_decoder()
        self.decoder_name = next(n for n, m in causal.named_modules() if m is self.decoder)
        self.placed = False
        length = min(ctx.max_model_len, self.max_position)
        freeze_rope(causal, length)
        self._replace_modules()
        self.head_input = Passthrough()
        replace_module(causal, self.decoder_name, self.head_input)
        self._bind_attention(probe(self._probe_run, length, name))
        causal.set_attn_implementation(PAGED)
        self.decoder.set_attn_implementation(PAGED)

    def _replace_modules(self) -> None:
        """Turn every module with tensors into leaves, in the order of the model's own code."""
        ctx, causal = self.ctx, self.causal
        head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
        widest = 0
        names = {m: n for n, m in causal.named_modules()}
        for module, name in names.items():
            if module is head:
                continue
            if type(module) is nn.Linear:
                bias = module.bias is not None
                linear = Linear(ctx, name, module.in_features, module.out_features, bias)
                replace_module(causal, name, FallbackLinear(linear))
                widest = max(widest, module.out_features)
            elif module is embedding and type(module) is nn.Embedding:
                self.embedding = Embedding(ctx, name, *module.weight.shape)
                replace_module(causal, name, FallbackEmbedding(self.embedding))
            else:
                ModuleTensors(ctx, name, module)
        self.intermediate_size = widest
        self.lm_head = output_layer(
            ctx, names[head], names[embedding], head.in_features, head.out_features, head.bias is not None
        )
        replace_module(causal, names[head], FallbackLinear(self.lm_head))
        if self.tied and type(embedding) is nn.Embedding:
            self.embedding.share(self.lm_head)

    def _probe_run(self) -> None:
        ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
        positions = torch.arange(PROBE_TOKENS, device="meta")[None]
        # a given mask keeps transformers from looking for packed sequences, which needs real numbers
        seen = torch.ones(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            out = self.decoder(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False)
            self.head_input.output = type(out)
            self.head_input.hidden = out.last_hidden_state
            logits = self.causal(input_ids=ids, use_cache=False).logits
        if tuple(logits.shape) != (1, PROBE_TOKENS, self.vocab_size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {PROBE_TOKENS} tokens")

    def _bind_attention(self, seen: Probe) -> None:
        modules = [module for module, _ in seen.calls]
        if len(modules) != self.num_layers or len(set(modules)) != len(modules):
            raise CheckpointError(
                f"{self.name}: {len(modules)} attention calls in {self.num_layers} layers; recurrent layers, shared "
                "layers and layers with own attention are not supported"
            )
        names = {m: n for n, m in self.decoder.named_modules()}
        for module, spec in seen.calls:
            module.qengine_attention = Attention(  # type: ignore[assignment]
                self.ctx, f"{self.decoder_name}.{names[module]}", spec
            )
            module.qengine_step = self.step  # type: ignore[assignment]
            module.qengine_dtype = self.ctx.dtype  # type: ignore[assignment]

    def _place_buffers(self) -> None:
        """Move the small computed buffers (rotary frequencies, scales) to the device, at the first step."""
        for module in [*self.decoder.modules(), *self.causal.modules()]:
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.ctx.device)
        self.placed = True

    def forward(self, input_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.placed:
            self._place_buffers()
        self.step.batch = batch
        out = self.decoder(input_ids=input_ids[None], position_ids=batch.positions[None], use_cache=False)
        return out.last_hidden_state[0].to(self.ctx.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_input.hidden = hidden[None].to(self.ctx.residual_dtype)
        ids = hidden.new_zeros(1, hidden.shape[0], dtype=torch.int64)
        return self.causal(input_ids=ids, use_cache=False).logits[0].float()
