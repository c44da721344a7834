"""What a model's folders say about texts: tokenizer, end-of-sequence ids, sampling defaults.

Cheap to read beside the weights, so callers read it first: what is wrong here must not cost a model's loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qengine.errors import CheckpointError, RequestError
from qengine.runtime.sampling_checks import checked_sampling, default_sampling
from qengine.sampling_params import SamplingParams
from qengine.text import Tokenizer, eos_ids


@dataclass(frozen=True)
class ModelTexts:
    """`defaults` are SamplingParams fields that generation_config.json sets, all within their ranges."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def read(
        cls,
        model_folder: str | Path,
        tokenizer_folder: str | Path | None = None,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
    ) -> ModelTexts:
        """From local folders; the tokenizer's is the model's unless given. Raises CheckpointError or ConfigError."""
        tokenizer = Tokenizer.load(tokenizer_folder or model_folder, trust_remote_code, chat_template=chat_template)
        ends, defaults = read_settings(model_folder)
        if tokenizer.eos_id is not None:
            ends = tuple(sorted({*ends, tokenizer.eos_id}))
        return cls(tokenizer, ends, defaults)


def read_settings(model_folder: str | Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What no other tokenizer changes: end-of-sequence ids by config.json and generation_config.json, and the sampling
    defaults. Raises CheckpointError."""
    config, generation = (_json(Path(model_folder, n)) for n in ("config.json", "generation_config.json"))
    defaults = default_sampling(generation)
    try:
        checked_sampling(SamplingParams(**{"max_tokens": None, **defaults}))
    except RequestError as e:
        raise CheckpointError(f"generation_config.json: {e}", hint="mend the file or take it away") from e
    return eos_ids(config, generation), defaults


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path.name} cannot be read: {str(e)[:200]}", hint="fetch it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", have=type(value).__name__)
    return value
