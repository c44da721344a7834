"""Turns a Llama-architecture GGUF file into a Hugging Face folder: the demo model's way into qengine.

Not a general GGUF reader: a gpt2-style BPE tokenizer with the `smollm` pre-tokenizer and Llama tensors are what it
knows; anything else is refused by name.

Weights are written as float16. The file's values are fp16 scale * 4-bit code + fp16 minimum, which float16 rounds to
11 significant bits and bfloat16 to 8: float16 adds an error of 1/4096 at most where bfloat16 adds 1/512, and nothing
in a language model's weights comes near float16's limits (checked while writing).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from qengine.errors import CheckpointError
from qengine.runtime.checkpoint_writer import CheckpointWriter, write_json

FLOAT16_MAX = 65504.0

CONTROL = 3
"""tokenizer.ggml.token_type of special tokens."""

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Tick = Callable[[int, int], None]
"""Called after each tensor with (tensors done, tensors in all)."""


def convert(source: Path, folder: Path, tick: Tick | None = None) -> None:
    """Write config.json, generation_config.json, the tokenizer and model.safetensors of `source` into `folder`."""
    reader = gguf.GGUFReader(str(source))
    keys = {name: field.contents() for name, field in reader.fields.items()}
    _expect(keys, "general.architecture", "llama")
    _expect(keys, "tokenizer.ggml.model", "gpt2")
    _expect(keys, "tokenizer.ggml.pre", "smollm")
    tied = all(t.name != "output.weight" for t in reader.tensors)
    config = llama_config(keys, tied)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(keys))
    write_tokenizer(folder, keys)
    writer = CheckpointWriter(folder)
    for done, tensor in enumerate(reader.tensors, 1):
        name = hf_name(tensor.name)
        if name is not None:
            heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
            count = next((n for part, n in heads.items() if part in tensor.name), None)
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            values = values.reshape([int(n) for n in reversed(tensor.shape)])
            writer.put(name, _half(name, values if count is None else unpermute(values, count)))
        if tick is not None:
            tick(done, len(reader.tensors))
    writer.finish()


def _expect(keys: dict[str, Any], key: str, value: str) -> None:
    if keys.get(key) != value:
        raise CheckpointError(f"this GGUF cannot be converted: {key}", have=keys.get(key), need=value)


def hf_name(name: str) -> str | None:
    """Hugging Face name of a GGUF tensor; None for one that is computed from the config instead."""
    if name in TOP:
        return TOP[name]
    if name == "rope_freqs.weight":
        return None
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    raise CheckpointError("this GGUF cannot be converted", have=f"tensor {name}", need="a plain Llama model")


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k, [heads * dim, ...] -> same shape.

    llama.cpp interleaves the two halves of each head (rows 0, dim/2, 1, dim/2 + 1, ...) because its rotary embedding
    turns neighbours; Hugging Face's turns row i with row i + dim/2.
    """
    shape = values.shape
    paired = values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(shape)


def _half(name: str, values: np.ndarray) -> torch.Tensor:
    largest = float(np.abs(values).max())
    if not largest <= FLOAT16_MAX:
        raise CheckpointError(f"{name} has values beyond float16's range", have=largest, need=f"<= {FLOAT16_MAX}")
    return torch.from_numpy(values.astype(np.float16))


def llama_config(keys: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of a Llama model from GGUF metadata."""
    heads = keys["llama.attention.head_count"]
    hidden = keys["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": keys["llama.feed_forward_length"],
        "num_hidden_layers": keys["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("llama.attention.head_count_kv", heads),
        "head_dim": keys.get("llama.attention.key_length", hidden // heads),
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "max_position_embeddings": keys["llama.context_length"],
        "rms_norm_eps": _short(keys["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(keys.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float16",
    }


def _short(value: float) -> float:
    """The decimal number that was meant, where GGUF stores its nearest float32 (1e-05, not 9.999999747e-06)."""
    return float(f"{value:.7g}")


def generation_config(keys: dict[str, Any]) -> dict[str, Any]:
    """Stop at the end of a turn and at the end of a text; sample as the model's card recommends for chat."""
    eos = [keys["tokenizer.ggml.eos_token_id"]]
    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    if "<|endoftext|>" in tokens and tokens.index("<|endoftext|>") not in eos:
        eos.append(tokens.index("<|endoftext|>"))
    return {
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id"),
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def write_tokenizer(folder: Path, keys: dict[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json of a gpt2-style BPE with the `smollm` pre-tokenizer.

    `smollm` splits every digit off on its own before the usual byte-level rule: without that, numbers get other ids
    than the model was trained on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    kinds = zip(tokens, keys["tokenizer.ggml.token_type"], strict=True)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == CONTROL])
    tok.save(str(folder / "tokenizer.json"))

    def named(kind: str) -> str | None:
        index = keys.get(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else tokens[index]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": keys["llama.context_length"],
        "chat_template": keys.get("tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None})
