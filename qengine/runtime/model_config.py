"""From a checkpoint's config.json to the config object that models are built from."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qengine.errors import CheckpointError, UserError
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.config_checks import check_sizes, check_values
from qengine.runtime.expert_layout import settle_experts
from qengine.runtime.model_texts import read_settings

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEAD = "lm_head."


def load_config(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json through transformers, read from the folder alone. Raises CheckpointError with the cause's line.

    `tie_word_embeddings` is already settled by what the file holds, see `settle_tied`, and `checkpoint` shows experts
    under their family's names, see `settle_experts`.
    """
    raw = checkpoint.raw_config
    check_values(raw)
    check_sizes(raw, checkpoint.tensors)
    if "auto_map" in raw and raw.get("model_type") is None and not trust_remote_code:
        raise CheckpointError("this model brings its own code", hint="--trust-remote-code, if you trust it")
    try:
        config = AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as e:  # transformers raises anything from KeyError to OSError here
        said = " ".join(str(e).split()) or type(e).__name__
        kind = raw.get("model_type")
        raise CheckpointError(
            f"config.json (model_type {kind!r}) is not understood: {said[:300]}",
            hint="a model type that the installed transformers knows" if str(kind) not in CONFIG_MAPPING else None,
        ) from e
    checkpoint.notes += settle_tied(config, checkpoint) + settle_experts(config, checkpoint)
    checkpoint.notes += config_doubts(config, checkpoint)
    return config


def config_doubts(config: PretrainedConfig, checkpoint: Checkpoint) -> list[str]:
    """What config.json and generation_config.json say that cannot be meant, and how it is read."""
    return [*_odd_architecture(config, checkpoint), *_odd_ends(config, checkpoint)]


def _odd_architecture(config: PretrainedConfig, checkpoint: Checkpoint) -> list[str]:
    """model_type decides which code runs; the name beside it may be another model's. A model with code of its own may
    call itself anything."""
    stated = getattr(config, "architectures", None) or []
    stated = [stated] if isinstance(stated, str) else list(stated)
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    known = [usual] if isinstance(usual, str) else list(usual or ())
    if not stated or not known or "auto_map" in checkpoint.raw_config or any(name in known for name in stated):
        return []
    return [
        f"WARNING: config.json's architectures says {', '.join(map(str, stated))}, which is no {config.model_type} "
        f"({' or '.join(known)}): read as model_type {config.model_type}"
    ]


def _odd_ends(config: PretrainedConfig, checkpoint: Checkpoint) -> list[str]:
    """End-of-sequence ids that no token has. Files that cannot be read are refused by those who need them."""
    size = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
    if type(size) is not int:
        return []
    try:
        ends, _ = read_settings(checkpoint.folder)
    except UserError:
        return []
    return [
        f"WARNING: eos_token_id {end} (config.json, generation_config.json) is no token of this model, which has ids "
        f"0..{size - 1}: it ends no text"
        for end in ends
        if not 0 <= end < size
    ]


def settle_tied(config: Any, checkpoint: Checkpoint) -> list[str]:
    """Set `config.tie_word_embeddings` by what the file holds; returns notes.

    A head in the file counts, whatever the flag says, unless the flag says tied and both hold the same values: then
    the head is taken off the checkpoint's list. With no head in the file the embedding is used, unless config.json
    says in so many words that it is not tied: then the head is missing and accounting will say so.
    """
    text: Any = getattr(config, "text_config", None)
    if not hasattr(text, "tie_word_embeddings"):  # none, or a model type that has no text_config of its own
        text = config
    stated = _stated_flag(checkpoint.raw_config)
    flag = bool(getattr(text, "tie_word_embeddings", False))
    head = [name for name in checkpoint.tensors if name.startswith(HEAD) or f".{HEAD}" in name]
    notes: list[str] = []
    if not head:
        tied = stated is not False
        if tied and not flag:
            notes.append("no lm_head in the file and config.json says nothing: the embedding is used as the head")
    elif flag and _same_values(checkpoint, head):
        tied = True
        del checkpoint.tensors[head[0]]
        notes.append("lm_head and the embedding hold the same values: kept once")
    else:
        tied = False
        if flag:
            notes.append("tie_word_embeddings is set, but the file's lm_head differs from the embedding: it is used")
    for c in (config, text):
        c.tie_word_embeddings = tied
    return notes


def _stated_flag(raw: dict[str, Any]) -> bool | None:
    for source in (raw, raw.get("text_config")):
        if isinstance(source, dict) and "tie_word_embeddings" in source:
            return bool(source["tie_word_embeddings"])
    return None


def _same_values(checkpoint: Checkpoint, head: list[str]) -> bool:
    """True when the head is one plain tensor equal to the embedding."""
    table = next((name for name in checkpoint.tensors if name.endswith(EMBEDDINGS)), None)
    if table is None or len(head) != 1 or not head[0].endswith("lm_head.weight"):
        return False
    a, b = checkpoint.tensors[head[0]], checkpoint.tensors[table]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(checkpoint.read(head[0]), checkpoint.read(table))
