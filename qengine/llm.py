"""The Python API: the very engine that the server runs, driven in this process."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qengine.beam_search import Beam, BeamSearchParams, Candidates, beam_search
from qengine.config import EngineConfig
from qengine.errors import ConfigError, QEngineError, RequestError
from qengine.prepare import prepare_model
from qengine.runtime.engine import Engine
from qengine.runtime.input_processor import InputProcessor, ProcessedRequest, Prompt, prompt_list
from qengine.runtime.output_processor import OutputProcessor
from qengine.runtime.results import RequestResult
from qengine.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
MAX_BEAM_LOGPROBS = 20


class LLM:
    """A model, ready to generate. Names and keywords follow vLLM.

    `model` is a local folder or hub name; None takes the demo model. Every field of `EngineConfig` is a keyword.
    Raises ConfigError for unknown keywords and UserError for all that cannot work on this machine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        chat_template: str | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        for name in options:
            if name not in known:
                raise ConfigError(f"LLM: unknown keyword {name!r}", hint=", ".join(sorted(known)))
        if options.get("max_model_len") == "auto":
            options["max_model_len"] = None
        say: Callable[[str], None] = _to_stderr if verbose else _silent
        config = EngineConfig(model=model, quantization=quantization, kv_cache_dtype=kv_cache_dtype, **options)
        self.config = prepare_model(config, say)
        self.engine = Engine.from_config(self.config)
        for line in self.engine.facts.report:
            say(line)
        self.inputs = InputProcessor.from_engine(
            self.engine.facts, trust_remote_code=config.trust_remote_code, chat_template=chat_template
        )
        self.outputs = OutputProcessor(self.inputs.tokenizer)
        self._ids = itertools.count()

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
        """
        items = self._prompts(prompts)
        params = self._params(sampling_params, len(items))
        ranks = list(priority) if priority is not None else [0] * len(items)
        if len(ranks) != len(items):
            raise RequestError("one priority for each prompt", param="priority", have=len(ranks), need=len(items))
        requests = [
            self.inputs.process(
                prompt, p, request_id=str(next(self._ids)), priority=rank, cache_salt=cache_salt
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
            )
            for conversation, p in zip(conversations, params, strict=True)
        ]
        return self._run(requests)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[list[Beam]]:
        """The best continuations of each prompt, best first."""
        eos = self.inputs.facts.eos_token_ids
        found = []
        for prompt in self._prompts(prompts):
            request = self.inputs.process(prompt, SamplingParams(max_tokens=1), request_id=str(next(self._ids)))
            found.append(beam_search(self._next_tokens, request.prompt_token_ids, params, eos))
        return found

    def _next_tokens(self, sequences: list[list[int]], k: int) -> list[Candidates]:
        if k > MAX_BEAM_LOGPROBS:
            raise RequestError("beam_width is too large", param="beam_width", have=k // 2, need=MAX_BEAM_LOGPROBS // 2)
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
        params = list(given)
        if len(params) != count:
            raise RequestError(
                "one SamplingParams for all prompts or one each", param="sampling_params", have=len(params), need=count
            )
        return params

    def _run(self, requests: Sequence[ProcessedRequest]) -> list[RequestResult]:
        """Run all requests to their end. One that fails alone raises; among others it ends with `error` set."""
        for request in requests:
            self.outputs.add(request)
            for message in request.requests:
                self.engine.add(message)
        try:
            while self.engine.has_work:
                done = self.outputs.process(self.engine.step().outputs)
                self.engine.abort(done.aborts)
        except BaseException:
            for request in requests:
                self.engine.abort(self.outputs.abort(request.request_id))
            raise
        results = [self.outputs.pop(request.request_id) for request in requests]
        for result in results:
            for output in result.outputs:
                if output.error is not None and len(results) == 1:
                    raise QEngineError(f"request failed: {output.error}")
        return results


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    """For `verbose=False`."""
