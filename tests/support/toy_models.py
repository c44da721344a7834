"""Toy checkpoints as real Hugging Face folders: TINY, SUCC and BYTETOK.

TINY is a Llama with random weights. SUCC is a Llama whose greedy output is known: token t is followed by
next(t), whatever attention does. BYTETOK is a byte-level tokenizer whose ids are byte values. All are made in
well under a second on a CPU and hold no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BOS, EOS, PAD, VOCAB = 256, 257, 258, 320

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def llama_config(**overrides: Any) -> dict[str, Any]:
    """TINY's config.json; `overrides` replace or add keys."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
    config.update(overrides)
    return config


def llama_tensors(config: Mapping[str, Any], seed: int = 7, std: float = 0.05) -> dict[str, torch.Tensor]:
    """Random normal weights by Hugging Face name, float32; norm weights lie around 1."""
    gen = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * std

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{p}.self_attn.{name}_proj.weight"] = normal(out, hidden)
            if config["attention_bias"]:
                tensors[f"{p}.self_attn.{name}_proj.bias"] = normal(out)
        tensors[f"{p}.self_attn.o_proj.weight"] = normal(hidden, q)
        if config["attention_bias"]:
            tensors[f"{p}.self_attn.o_proj.bias"] = normal(hidden)
        tensors[f"{p}.mlp.gate_proj.weight"] = normal(inner, hidden)
        tensors[f"{p}.mlp.up_proj.weight"] = normal(inner, hidden)
        tensors[f"{p}.mlp.down_proj.weight"] = normal(hidden, inner)
        tensors[f"{p}.input_layernorm.weight"] = 1 + normal(hidden)
        tensors[f"{p}.post_attention_layernorm.weight"] = 1 + normal(hidden)
    tensors["model.norm.weight"] = 1 + normal(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return tensors


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shards: int = 1
) -> Path:
    """config.json, generation_config.json and the weights: one file, or `shards` files of consecutive tensors
    with an index. Tensors are written as they are."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    eos = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    write_json(folder / "generation_config.json", eos)
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = list(tensors), {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def make_bytetok(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, add_bos: bool = False, eos: bool = True
) -> Path:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE without merges.

    ids 0..255 are byte values, 256 <bos>, 257 <eos>, 258 <pad>. `chat_template` None leaves the template out;
    `add_bos` puts <bos> before every text; `eos` False leaves the eos token out of tokenizer_config.json.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE(vocab={c: b for b, c in _byte_chars().items()}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<pad>")])
    if add_bos:
        tok.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    special = {"bos_token": "<bos>", "pad_token": "<pad>"} | ({"eos_token": "<eos>"} if eos else {})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, clean_up_tokenization_spaces=False, model_max_length=10**9, **special
    )
    fast.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_json(path, settings)
    return Path(folder)


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {b: chr(b) for b in printable}
    rest = [b for b in range(256) if b not in chars]
    return chars | {b: chr(256 + i) for i, b in enumerate(rest)}


def make_tiny(
    folder: Path,
    *,
    dtype: str = "float32",
    seed: int = 7,
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """TINY: hidden 256, intermediate 512, 2 layers, 4 heads, 2 KV heads, head_dim 64, vocab 320, untied.

    `config_overrides` are config.json keys (`num_hidden_layers=1`, `max_position_embeddings=131072`, ...).
    """
    config = llama_config(dtype=dtype, **config_overrides)
    tensors = {n: t.to(DTYPES[dtype]) for n, t in llama_tensors(config, seed).items()}
    folder = write_model(Path(folder), config, tensors, shards)
    return make_bytetok(folder) if tokenizer else folder


def chain_map(chain: Sequence[int], *, eos: int = EOS, vocab: int = VOCAB) -> dict[int, int]:
    """next(t) for a chain of different ids: along the chain, from its last id to `eos`, and from every other id
    to its first, so that any prompt that ends outside the chain spells it once."""
    if len(set(chain)) != len(chain):
        raise ValueError(f"a chain cannot repeat an id: {list(chain)}")
    after = dict.fromkeys(range(vocab), chain[0])
    after.update(zip(chain, [*chain[1:], eos], strict=True))
    return after


def succ_tensors(
    config: Mapping[str, Any], after: Mapping[int, int], seed: int = 7
) -> dict[str, torch.Tensor]:
    """SUCC's weights, float32: one-hot embeddings, o_proj = down_proj = 0, lm_head[next(t), t] = 1."""
    tensors = llama_tensors(config, seed)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors["model.embed_tokens.weight"] = torch.eye(vocab, hidden)
    head = torch.zeros(vocab, hidden)
    for t in range(vocab):
        head[after.get(t, (t + 1) % vocab), t] = 1
    tensors["lm_head.weight"] = head
    for name, t in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            t.zero_()
        elif name.endswith("norm.weight"):
            t.fill_(1)
    return tensors


def make_succ(
    folder: Path,
    next_map: Mapping[int, int] | None = None,
    *,
    chain: Sequence[int] | str | bytes | None = None,
    dtype: str = "float32",
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """SUCC: greedy output is next(next(...)). Winning logit about 22.6, all others 0.

    `next_map` gives next(t); an id that it lacks goes to t + 1 (mod vocab). `chain` (ids, or text in UTF-8
    bytes) is `chain_map(chain)`; with neither, next(t) = t + 1 (mod vocab).
    """
    if chain is not None:
        if next_map is not None:
            raise ValueError("give next_map or chain, not both")
        ids = chain.encode() if isinstance(chain, str) else chain
        next_map = chain_map(list(ids))
    config = llama_config(dtype=dtype, **{"hidden_size": 512, **config_overrides})
    tensors = {n: t.to(DTYPES[dtype]) for n, t in succ_tensors(config, next_map or {}).items()}
    folder = write_model(Path(folder), config, tensors)
    return make_bytetok(folder) if tokenizer else folder


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble s of an AWQ word holds column 8w + AWQ_ORDER[s]."""


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """codes [rows, N] in 0..15 -> int32 [rows, N / 8] in AWQ's interleaved order."""
    parts = codes.reshape(codes.shape[0], -1, 8).to(torch.int64)
    word = torch.zeros(parts.shape[:2], dtype=torch.int64)
    for s, column in enumerate(AWQ_ORDER):
        word |= parts[:, :, column] << (4 * s)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def quantize_awq(weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight [N, K] -> (AWQ gemm tensors by leaf name, what they mean as float32 [N, K]); nearest rounding."""
    n, k = weight.shape
    group = k if group == -1 else group
    w = weight.float().t().reshape(k // group, group, n)
    low, high = w.amin(1), w.amax(1)
    scale = ((high - low).clamp_min(1e-5) / 15).half()
    s = scale.float()
    zero = (-(low / s).round()).clamp(0, 15)
    codes = ((w / s[:, None]).round() + zero[:, None]).clamp(0, 15)
    meaning = ((codes - zero[:, None]) * s[:, None]).reshape(k, n).t().contiguous()
    tensors = {"qweight": pack_awq(codes.reshape(k, n)), "qzeros": pack_awq(zero), "scales": scale}
    return tensors, meaning


def awq_config(group: int, **extra: Any) -> dict[str, Any]:
    """AutoAWQ's quantization_config."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **extra,
    }


def make_tiny_awq(
    folder: Path,
    *,
    group: int = 64,
    seed: int = 7,
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """TINY as an AWQ gemm checkpoint in fp16, and the dense float32 weights it means by Hugging Face name."""
    fixed = {"dtype": "float16", "quantization_config": awq_config(group)}
    config = llama_config(**fixed | config_overrides)
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, t in llama_tensors(config, seed).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            parts, meaning[name] = quantize_awq(t, group)
            stored |= {f"{module}.{leaf}": value for leaf, value in parts.items()}
        else:
            stored[name] = t.half()
            meaning[name] = stored[name].float()
    folder = write_model(Path(folder), config, stored, shards)
    return (make_bytetok(folder) if tokenizer else folder), meaning
