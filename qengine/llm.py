"""The Python API: the very engine that the server runs, driven in this process."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qengine.beam_search import Beam, BeamSearchParams, Candidates, beam_search
from qengine.config import EngineConfig
from qengine.errors import ConfigError, QEngineError, RequestError
from qengine.interrupts import HeldInterrupt
from qengine.prepare import prepare_model
from qengine.runtime.engine import Engine
from qengine.runtime.input_processor import InputProcessor, ProcessedRequest, Prompt, prompt_list
from qengine.runtime.model_texts import ModelTexts
from qengine.runtime.output_processor import OutputProcessor
from qengine.runtime.results import RequestResult
from qengine.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
MAX_BEAM_LOGPROBS = 20
FLAG_NAMES = {"quant": "quantization", "kv_dtype": "kv_cache_dtype"}
"""Keywords named as flags are that have two names."""
AUTO = ("max_model_len", "cpu_offload_gb", "expert_slots")
"""Keywords that take "auto", as their flags do; None is their default, as elsewhere in Python."""


class LLM:
    """A model, ready to generate. Names and keywords follow vLLM.

    `model` is a local folder or hub name; None takes the demo model. Every field of `EngineConfig` is a keyword;
    `quant` and `kv_dtype` are other names of two of them, as among the flags. Raises ConfigError for unknown keywords
    and UserError for all that cannot work on this machine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        chat_template: str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        options = _engine_options({"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}, options)
        if not isinstance(chat_template, str | None):
            raise ConfigError("chat_template has the wrong type", have=repr(chat_template)[:80], need="a text or None")
        say: Callable[[str], None] = _to_stderr if verbose else _silent
        folder = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = EngineConfig(model=folder, **options)
        self.config = prepare_model(config, say)
        texts = ModelTexts.read(
            self.config.model or "",
            self.config.tokenizer,
            trust_remote_code=config.trust_remote_code,
            chat_template=chat_template,
        )
        self.engine = Engine.from_config(self.config)
        for line in self.engine.facts.report:
            say(line)
        self.inputs = InputProcessor.from_engine(self.engine.facts, texts=texts)
        self.outputs = OutputProcessor(self.inputs.tokenizer)
        self._ids = itertools.count()
        self._running = threading.Lock()

    def get_tokenizer(self) -> Any:
        return self.inputs.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json); max_tokens: the rest of the context."""
        return self.inputs.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestResult]:
        """Complete prompts (texts, id lists, or {"prompt_token_ids": ids}); results in the order of the prompts.

        `sampling_params` is one for all or one each. Raises RequestError before anything runs when one is invalid.
        Threads may call this at the same time; their calls run one after the other.
        """
        items = self._prompts(prompts)
        params = self._params(sampling_params, len(items))
        ranks = self._ranks(priority, len(items))
        if not isinstance(cache_salt, str | None):
            raise RequestError("cache_salt is a text", param="cache_salt", have=type(cache_salt).__name__)
        requests = [
            self.inputs.process(
                prompt,
                p,
                request_id=str(next(self._ids)),
                priority=rank,
                cache_salt=cache_salt,
                shorten=sampling_params is None,
            )
            for prompt, p, rank in zip(items, params, ranks, strict=True)
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestResult]:
        """Answer one conversation or a list of them through the model's chat template."""
        if not messages:
            raise RequestError("there are no messages", param="messages")
        if not isinstance(messages, list | tuple):
            kind = type(messages).__name__
            raise RequestError("messages has the wrong type", param="messages", have=kind, need="a list of messages")
        single = isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        params = self._params(sampling_params, len(conversations))
        requests = [
            self.inputs.process_chat(
                conversation,
                p,
                request_id=str(next(self._ids)),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                shorten=sampling_params is None,
            )
            for conversation, p in zip(conversations, params, strict=True)
        ]
        return self._run(requests)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """The best continuations of each prompt, best first. Raises RequestError before anything runs."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError("params has the wrong type", have=type(params).__name__, need="BeamSearchParams")
        if params.beam_width > MAX_BEAM_LOGPROBS // 2:
            have, need = params.beam_width, f"at most {MAX_BEAM_LOGPROBS // 2}"
            raise RequestError("beam_width is too large", param="beam_width", have=have, need=need)
        whole = SamplingParams(max_tokens=params.max_tokens)
        requests = [self.inputs.process(p, whole, request_id=str(next(self._ids))) for p in self._prompts(prompts)]
        eos = self.inputs.facts.eos_token_ids
        return [beam_search(self._next_tokens, r.prompt_token_ids, params, eos) for r in requests]

    def _next_tokens(self, sequences: list[list[int]], k: int) -> list[Candidates]:
        one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=k, ignore_eos=True, detokenize=False)
        results = self.generate([list(s) for s in sequences], one)
        out: list[Candidates] = []
        for result in results:
            logprobs = result.outputs[0].logprobs
            assert logprobs is not None
            ranked = sorted(logprobs[0].items(), key=lambda item: item[1].rank)
            out.append([(token, entry.logprob) for token, entry in ranked[:k]])
        return out

    def _prompts(self, prompts: Any) -> list[Any]:
        if isinstance(prompts, Mapping):
            return [prompts]
        if isinstance(prompts, list | tuple) and prompts and any(isinstance(p, Mapping) for p in prompts):
            return list(prompts)
        return list(prompt_list(prompts))

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.inputs.default_params()] * count
        each = given if isinstance(given, list | tuple) else [given]
        if odd := [type(p).__name__ for p in each if not isinstance(p, SamplingParams)]:
            raise RequestError(
                "sampling_params has the wrong type", param="sampling_params", have=odd[0], need="SamplingParams"
            )
        if len(given) != count:
            raise RequestError(
                "one SamplingParams for all prompts or one each", param="sampling_params", have=len(given), need=count
            )
        return list(given)

    def _ranks(self, given: Any, count: int) -> list[int]:
        """The priority of each prompt."""
        if given is None:
            return [0] * count
        if not isinstance(given, list | tuple) or not all(type(p) is int and abs(p) < 2**31 for p in given):
            raise RequestError("priority is a list of integers", param="priority", have=repr(given)[:80])
        if len(given) != count:
            raise RequestError("one priority for each prompt", param="priority", have=len(given), need=count)
        if any(given) and self.config.scheduling_policy != "priority":
            hint = 'leave it out, or LLM(scheduling_policy="priority")'
            raise RequestError("requests are served first come, first served", param="priority", hint=hint)
        return list(given)

    def _run(self, requests: Sequence[ProcessedRequest]) -> list[RequestResult]:
        """Run all requests to their end. One that fails alone raises; among others it ends with `error` set."""
        with self._running:
            results = self._finish(requests)
        for result in results:
            for output in result.outputs:
                if output.error is not None and len(results) == 1:
                    raise QEngineError(f"request failed: {output.error}")
        return results

    def _finish(self, requests: Sequence[ProcessedRequest]) -> list[RequestResult]:
        with HeldInterrupt() as interrupt:
            try:
                for request in requests:
                    self.outputs.add(request)
                    for message in request.requests:
                        self.engine.add(message)
                while self.engine.has_work:
                    done = self.outputs.process(self.engine.step().outputs)
                    self.engine.abort(done.aborts)
                    interrupt.check()
            except BaseException:
                for request in requests:
                    self.engine.abort(self.outputs.abort(request.request_id))
                raise
        return [self.outputs.pop(request.request_id) for request in requests]


def _engine_options(named: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM` as fields of EngineConfig. Raises ConfigError for what is none, and for a keyword that is given
    under both of its names."""
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    found = dict(named)
    for name, value in options.items():
        field = FLAG_NAMES.get(name, name)
        if field not in defaults:
            near = difflib.get_close_matches(name, [*defaults, *FLAG_NAMES], 1)
            raise ConfigError(f"LLM: unknown keyword {name!r}", hint=", ".join(near or sorted(defaults)))
        if found.get(field, defaults[field]) not in (defaults[field], value):
            raise ConfigError(f"LLM: {name} and {field} are two names of one keyword", have=f"{value}, {found[field]}")
        if field in AUTO:
            value = None if value == "auto" else defaults[field] if value is None else value
        found[field] = value
    return found


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    """For `verbose=False`."""
