"""The sequences of one HTTP request, from the engine's outputs to deltas, usage and metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from qengine.errors import EngineDeadError, RequestError
from qengine.messages import RequestOutput
from qengine.runtime.input_processor import ProcessedRequest
from qengine.runtime.output_processor import OutputProcessor
from qengine.runtime.results import Delta, RequestResult
from qengine.server.errors import RequestFailedError
from qengine.server.metrics import RequestTimer
from qengine.server.responses import PromptTokensDetails, Usage
from qengine.server.state import ServerState


class Generation:
    """Runs prompts with n choices each; the choices of all prompts are counted through."""

    def __init__(self, state: ServerState, prompts: Sequence[ProcessedRequest], arrival: float) -> None:
        """`arrival`: when the request came, by time.monotonic()."""
        self._state = state
        self._prompts = prompts
        self._outputs = OutputProcessor(state.tokenizer)
        self._first_choice: dict[str, int] = {}
        self._timers: dict[str, RequestTimer] = {}
        count = 0
        for prompt in prompts:
            self._outputs.add(prompt)
            self._first_choice[prompt.request_id] = count
            count += len(prompt.requests)
            for request in prompt.requests:
                self._timers[request.request_id] = RequestTimer(state.metrics, arrival)

    def result(self, delta: Delta) -> RequestResult:
        """The whole result that `delta` belongs to, as far as it has come."""
        return self._outputs.result(delta.request_id)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, what was added to it), until all choices are finished.

        Closing the generator early aborts the rest. Raises RequestError when the engine refuses a request,
        RequestFailedError when one ends with an error, EngineDeadError when the engine dies.
        """
        requests = [request for prompt in self._prompts for request in prompt.requests]
        ending = "abort"
        try:
            async with self._state.client.submit(requests) as stream:
                async for output in stream:
                    if output.refused:
                        raise RequestError(output.error or "refused")
                    processed = self._outputs.process([output])
                    stream.abort(processed.aborts)
                    for delta in processed.deltas:
                        self._measure(output, delta)
                        if delta.error is not None:
                            raise RequestFailedError(delta.error)
                        yield self._first_choice[delta.request_id] + delta.index, delta
        except (RequestError, RequestFailedError, EngineDeadError):
            ending = "error"
            raise
        finally:
            for timer in self._timers.values():
                timer.finished(ending, time.monotonic())
            self._timers.clear()

    def _measure(self, output: RequestOutput, delta: Delta) -> None:
        timer, now = self._timers[output.request_id], time.monotonic()
        timer.tokens(len(delta.token_ids), now)
        if delta.finish_reason is not None:
            timer.finished(delta.finish_reason, now)
            del self._timers[output.request_id]

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, all choices; the token that ended a choice counts."""
        results = [self._outputs.result(prompt.request_id) for prompt in self._prompts]
        prompt_tokens = sum(len(r.prompt_token_ids) for r in results)
        completion_tokens = sum(r.num_output_tokens for r in results)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(r.num_cached_tokens for r in results)),
        )
