"""From what a user gives to requests that the engine can run. Everything that can be refused is refused here."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from qengine.errors import RequestError
from qengine.messages import NewRequest
from qengine.runtime.chat_messages import flatten_messages
from qengine.runtime.facts import EngineFacts
from qengine.runtime.model_texts import ModelTexts
from qengine.runtime.sampling_checks import check_against_vocab, checked_sampling, seed_of_choice
from qengine.sampling_params import SamplingParams
from qengine.text import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | list[int]
"""One prompt: a text or token ids."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")
"""What a prompt that is a mapping may hold; ids count where both are given."""


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against. `defaults` are SamplingParams fields that generation_config.json sets."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model_context: int | None = None
    """What the model itself allows, where that is known."""


@dataclass(frozen=True)
class ProcessedRequest:
    """A request ready for the engine: `requests` holds one NewRequest a choice, the first one first. `prompt` is the
    text, or None when ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    requests: list[NewRequest]


class InputProcessor:
    """Templates, tokenises, validates. Thread-safe: the server calls it from a pool."""

    def __init__(self, tokenizer: Tokenizer | None, facts: ModelFacts) -> None:
        """Without a tokenizer only prompts of ids are served, with `detokenize=False`."""
        self.tokenizer = tokenizer
        self.facts = facts

    @classmethod
    def from_engine(
        cls,
        engine: EngineFacts,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        texts: ModelTexts | None = None,
    ) -> InputProcessor:
        """For a running engine. `texts`: what its folders say, where that has been read already."""
        if texts is None:
            texts = ModelTexts.read(
                engine.model_folder,
                engine.tokenizer_folder,
                trust_remote_code=trust_remote_code,
                chat_template=chat_template,
            )
        if texts.tokenizer.vocab_size > engine.vocab_size:
            logger.warning(
                "the tokenizer of %s knows %d ids and the model only %d: texts that need the others are refused",
                engine.tokenizer_folder,
                texts.tokenizer.vocab_size,
                engine.vocab_size,
            )
        # Ids that no token has (the start-up report names them) must not reach the logits.
        ends = tuple(end for end in texts.eos_token_ids if 0 <= end < engine.vocab_size)
        facts = ModelFacts(engine.vocab_size, engine.max_model_len, ends, texts.defaults, engine.model_context)
        return cls(texts.tokenizer, facts)

    def default_params(self, **given: Any) -> SamplingParams:
        """SamplingParams with the model's own defaults for what is not given; max_tokens None unless given."""
        return SamplingParams(**{"max_tokens": None, **self.facts.defaults, **given})

    def process(
        self,
        prompt: Prompt | Mapping[str, Any],
        params: SamplingParams,
        *,
        request_id: str,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float | None = None,
        shorten: bool = False,
    ) -> ProcessedRequest:
        """One prompt: a text, ids, {"prompt": text} or {"prompt_token_ids": ids}. Raises RequestError.

        `shorten`: max_tokens is a default that nobody asked for, so where it does not fit what fits is taken.
        """
        text, ids = self._prompt_ids(prompt, add_special_tokens)
        sampling = self._sampling(params, len(ids), shorten)
        return ProcessedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            sampling=sampling,
            requests=self._requests(request_id, ids, sampling, priority, cache_salt, arrival),
        )

    def process_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        request_id: str,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float | None = None,
        shorten: bool = False,
    ) -> ProcessedRequest:
        """A conversation, through the chat template; the template writes the special tokens. Raises RequestError."""
        text = self.chat_text(
            messages,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
        )
        return self.process(
            text,
            params,
            request_id=request_id,
            add_special_tokens=False,
            priority=priority,
            cache_salt=cache_salt,
            arrival=arrival,
            shorten=shorten,
        )

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, to be encoded with `add_special_tokens=False`. Raises RequestError."""
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        flat = flatten_messages(messages)
        # A conversation far too long is refused before the template copies it around.
        self._check_size("".join(m["content"] for m in flat if isinstance(m["content"], str)), "messages")
        return self._tokenizer().apply_chat_template(
            flat,
            chat_template=chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_variables,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt text; one that cannot fit is refused before it is tokenised."""
        self._check_size(text, "prompt")
        return self._tokenizer().encode(text, add_special_tokens)

    def check_ids(self, ids: Sequence[Any], param: str = "prompt") -> list[int]:
        """Ids as a list; RequestError for the first that is no id of the model."""
        vocab = self.facts.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise RequestError(
                    f"{param} holds something that is not a token id of this model",
                    param=param,
                    have=token if isinstance(token, int | float) else repr(token)[:80],
                    need=f"integers 0..{vocab - 1}",
                )
        return list(ids)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("no tokenizer is loaded", param="prompt", hint="give the prompt as token ids")
        return self.tokenizer

    def _prompt_ids(self, prompt: Prompt | Mapping[str, Any], add_special: bool) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(given, Mapping):
            if unknown := [name for name in given if name not in PROMPT_KEYS]:
                raise RequestError(
                    f"a prompt has no field {unknown[0]!r}", param="prompt", need=" or ".join(PROMPT_KEYS)
                )
            ids = given.get("prompt_token_ids")
            given = given.get("prompt") if ids is None else ids
        if isinstance(given, str):
            text, ids = given, self.check_ids(self.encode(given, add_special))
        elif isinstance(given, list | tuple):
            text, ids = None, self.check_ids(given)
        else:
            raise RequestError("a prompt is a text or a list of token ids", param="prompt", have=type(given).__name__)
        if not ids:
            raise RequestError("the prompt has no tokens", param="prompt", have=0, need="at least 1 token")
        if len(ids) >= self.facts.max_model_len:
            self._too_long(f"{len(ids)} tokens")
        return text, ids

    def _check_size(self, text: str, param: str) -> None:
        least = self._tokenizer().least_tokens(text)
        if least >= self.facts.max_model_len:
            self._too_long(f"at least {least} tokens ({len(text)} characters)", param)

    def _too_long(self, have: str, param: str = "prompt") -> None:
        longest, possible = self.facts.max_model_len, self.facts.model_context
        larger = possible is None or longest < possible
        raise RequestError(
            "the prompt is longer than the model's context",
            param=param,
            have=have,
            need=f"at most {longest - 1} tokens, so that one more fits into {longest}",
            hint="a shorter prompt" + (", or a larger --max-model-len where memory allows" if larger else ""),
        )

    def _sampling(self, params: SamplingParams, num_prompt_tokens: int, shorten: bool) -> SamplingParams:
        """A checked copy with max_tokens and the ids of bad words filled in."""
        p = checked_sampling(params)
        check_against_vocab(p, self.facts.vocab_size, self.facts.eos_token_ids)
        if p.detokenize and self.tokenizer is None:
            raise RequestError("no tokenizer is loaded", param="detokenize", hint="detokenize=False")
        if p.stop and not p.detokenize:
            raise RequestError("stop strings need text", param="stop", have="detokenize=False", need="detokenize=True")
        room = self.facts.max_model_len - num_prompt_tokens
        if p.max_tokens is None or (shorten and p.max_tokens > room):
            p.max_tokens = room
        if p.max_tokens > room:
            raise RequestError(
                "prompt and max_tokens together are longer than the model's context",
                param="max_tokens",
                have=f"{num_prompt_tokens} + {p.max_tokens} tokens",
                need=f"at most {self.facts.max_model_len}",
                hint=f"max_tokens up to {room}, or none at all",
            )
        if p.min_tokens > p.max_tokens:
            raise RequestError(
                "min_tokens is above what can be generated", param="min_tokens", have=p.min_tokens, need=f"<= {room}"
            )
        p.bad_words_token_ids = self._bad_words(p.bad_words)
        return p

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each word as it stands at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip() or word, " " + word.lstrip()):
                ids = self._tokenizer().encode(text, add_special_tokens=False)
                if not ids:
                    raise RequestError("a bad word has no tokens", param="bad_words", have=repr(word))
                self.check_ids(ids, "bad_words")
                if ids not in found:
                    found.append(ids)
        return found

    def _requests(
        self,
        request_id: str,
        ids: list[int],
        sampling: SamplingParams,
        priority: int,
        cache_salt: str | None,
        arrival: float | None,
    ) -> list[NewRequest]:
        first = request_id if sampling.n == 1 else f"{request_id}-0"
        return [
            NewRequest(
                request_id=first if i == 0 else f"{request_id}-{i}",
                prompt_token_ids=ids,
                sampling=_choice(sampling, i),
                eos_token_ids=list(self.facts.eos_token_ids),
                arrival=time.time() if arrival is None else arrival,
                priority=priority,
                cache_salt=cache_salt,
                fork_of=first if i else None,
            )
            for i in range(sampling.n)
        ]


def _choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling of one of n choices. The prompt's logprobs are the same for all: only the first computes them."""
    return msgspec.structs.replace(
        sampling,
        n=1,
        seed=seed_of_choice(sampling.seed, index),
        prompt_logprobs=None if index else sampling.prompt_logprobs,
    )


def prompt_list(prompt: Any) -> list[Prompt]:
    """The OpenAI API's `prompt`: a text, ids, a list of texts or a list of id lists, as a list of single prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise RequestError("prompt has the wrong type", param="prompt", have=kind, need="a text, token ids or a list")
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", have="[]", need="a text, token ids or a list")
    if all(isinstance(p, str) for p in prompt) or all(isinstance(p, list | tuple) for p in prompt):
        return list(prompt)
    if any(isinstance(p, str | list | tuple) for p in prompt):
        raise RequestError("prompt mixes texts and ids", param="prompt", need="all texts, all ids or all lists of ids")
    return [list(prompt)]
