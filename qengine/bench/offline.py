"""An engine in this process, driven step by step with a clock beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from qengine.bench.figures import Timing
from qengine.config import EngineConfig
from qengine.errors import QEngineError
from qengine.messages import NewRequest
from qengine.prepare import prepare_model
from qengine.runtime.engine import Engine
from qengine.runtime.input_processor import ProcessedRequest
from qengine.runtime.model_texts import ModelTexts
from qengine.runtime.output_processor import OutputProcessor
from qengine.sampling_params import SamplingParams


class TimedEngine:
    """`ready_s`: seconds from nothing to an engine that serves. With `detokenize` the cost of making text is in every
    figure, as in `LLM.generate`."""

    def __init__(self, config: EngineConfig, detokenize: bool, say: Callable[[str], None]) -> None:
        config = prepare_model(config, say)
        start = time.perf_counter()
        self.engine = Engine.from_config(config)
        self.ready_s = time.perf_counter() - start
        for line in self.engine.facts.report:
            say(line)
        self.detokenize = detokenize
        tokenizer = None
        if detokenize:
            tokenizer = ModelTexts.read(config.model or "", config.tokenizer).tokenizer
        self.outputs = OutputProcessor(tokenizer)
        self._serial = 0

    def run(self, prompts: Sequence[tuple[list[int], int]]) -> list[Timing]:
        """(ids, tokens to generate) of each prompt, all at once, greedy, to the full length."""
        start = time.perf_counter()
        timings: dict[str, Timing] = {}
        for ids, new in prompts:
            name = f"bench-{self._serial}"
            self._serial += 1
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=self.detokenize)
            message = NewRequest(request_id=name, prompt_token_ids=ids, sampling=params)
            self.outputs.add(ProcessedRequest(name, None, ids, params, [message]))
            self.engine.add(message)
            timings[name] = Timing(prompt_tokens=len(ids), start=start)
        while self.engine.has_work:
            done = self.outputs.process(self.engine.step().outputs)
            now = time.perf_counter()
            for delta in done.deltas:
                if delta.error is not None:
                    raise QEngineError(f"a prompt of {timings[delta.request_id].prompt_tokens} tokens: {delta.error}")
                timings[delta.request_id].times.append(now)
                timings[delta.request_id].tokens += len(delta.token_ids)
        for name in timings:
            self.outputs.pop(name)
        return list(timings.values())
