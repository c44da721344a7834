"""What SamplingParams must satisfy beyond its own ranges: field types, and the model's vocabulary."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from qengine.errors import RequestError
from qengine.sampling_params import SamplingParams

_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's names -> ours, the same that vLLM takes over."""


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that a model's generation_config.json sets; nulls are left out."""
    return {
        ours: generation_config[theirs]
        for theirs, ours in _GENERATION_FIELDS.items()
        if generation_config.get(theirs) is not None
    }


def checked_sampling(params: SamplingParams) -> SamplingParams:
    """A deep copy whose every field has its declared type and range (Python callers can write anything into them)."""
    try:
        return msgspec.convert(msgspec.to_builtins(params, str_keys=True), SamplingParams, str_keys=True)
    except msgspec.ValidationError as e:
        if isinstance(e.__cause__, RequestError):
            raise e.__cause__ from None
        where = re.search(r"`\$\.(\w+)", str(e))
        raise RequestError(f"sampling parameter: {e}", param=where[1] if where else None) from e
    except (TypeError, OverflowError) as e:
        raise RequestError(f"sampling parameter of an unknown type: {e}") from e


def check_against_vocab(p: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
    """Raise RequestError for the first id outside the model's vocabulary, and when min_tokens leaves no token at all:
    until then every stop id and end of sequence is forbidden."""
    for name, ids in (("stop_token_ids", p.stop_token_ids), ("logit_bias", list(p.logit_bias))):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} holds an id outside the vocabulary", param=name, have=token, need=f"0..{vocab_size - 1}"
                )
    if p.min_tokens and len({*p.stop_token_ids, *eos_token_ids}) >= vocab_size:
        raise RequestError("min_tokens forbids every token", param="min_tokens", hint="fewer stop_token_ids")


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Seed of one of n choices; the first keeps the request's, so that it equals the answer of n = 1."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} choice {index}".encode(), digest_size=8).digest(), "little")
