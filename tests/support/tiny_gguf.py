"""A tiny Llama as a GGUF file with the smollm tokenizer, written by the gguf package, and a wheel around it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 2, 64, 96, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *"0123456789ab", "Ġ", "12", "ab", "Ġa"]
MERGES = ["1 2", "a b", "Ġ a"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name; tied, no biases."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(len(TOKENS), HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for i in range(LAYERS):
        for name in NAMES:
            value = normal(*shapes[name]) if name in shapes else 1 + 0.1 * normal(HIDDEN)
            weights[f"model.layers.{i}.{name}.weight"] = value
    weights["model.norm.weight"] = 1 + 0.1 * normal(HIDDEN)
    return weights


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: the two halves of each head interleaved."""
    out = np.empty_like(rows)
    half = len(rows) // heads // 2
    for h in range(heads):
        for i in range(half):
            out[(h * half + i) * 2] = rows[h * 2 * half + i]
            out[(h * half + i) * 2 + 1] = rows[h * 2 * half + half + i]
    return out


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(
    path: Path, architecture: str = "llama", pre: str = "smollm", extra: str | None = None, scale: float = 1.0
) -> Path:
    """Matrices in Q8_0, vectors in float32, q and k rows in llama.cpp's order. `scale` blows the final norm up."""
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(INNER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_freq_base(100000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(TOKENS)
    w.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_unk_token_id(0)
    w.add_chat_template(TEMPLATE)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for name, value in tiny_weights().items():
        kind = name.split(".")[-2]
        if kind == "norm":
            value = value * np.float32(scale)
        if value.ndim == 1:
            w.add_tensor(gguf_name(name), value)
        else:
            rows = permute(value, heads[kind]) if kind in heads else value
            q8 = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(gguf_name(name), gguf.quantize(rows, q8), raw_dtype=q8)
    if extra is not None:
        w.add_tensor(extra, np.ones(HIDDEN, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_wheel(path: Path, model: Path) -> Path:
    """A zip that looks like the demo model's wheel."""
    with zipfile.ZipFile(path, "w") as z:
        z.write(model, "tiny/tiny.gguf")
        z.writestr("tiny-1.dist-info/LICENSE", "Apache License")
        z.writestr("tiny/__init__.py", "raise SystemExit('never run')")
    return path
