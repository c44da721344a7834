"""From the engine's token ids to text, stop strings, logprobs and usage: one code for streamed and whole answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qengine.core.request import FinishReason
from qengine.messages import RequestOutput, TokenLogprobs
from qengine.runtime.input_processor import ProcessedRequest
from qengine.runtime.results import CompletionOutput, Delta, Logprob, PositionLogprobs, RequestResult
from qengine.sampling_params import SamplingParams
from qengine.text import IncrementalDetokenizer, StopMatcher, Tokenizer


@dataclass
class Processed:
    """`deltas` in the order of the outputs; `aborts`: engine request ids that a stop string has ended."""

    deltas: list[Delta] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class OutputProcessor:
    """Holds the growing result of every request in flight. Not thread-safe: one loop feeds it.

    A result stays until `pop`. Outputs for requests that are unknown or already ended (tokens computed before an abort
    reached the engine) are dropped and not counted.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}
        self._results: dict[str, RequestResult] = {}

    def add(self, request: ProcessedRequest) -> None:
        """Expect outputs of this request. Call it before the engine gets its messages."""
        outputs = [CompletionOutput(index=i) for i in range(len(request.requests))]
        result = RequestResult(request.request_id, request.prompt, request.prompt_token_ids, outputs)
        self._results[request.request_id] = result
        for message, output in zip(request.requests, outputs, strict=True):
            self._choices[message.request_id] = _Choice(self._tokenizer, message.sampling, result, output)

    def process(self, outputs: Iterable[RequestOutput]) -> Processed:
        """Take in what one step gave. The caller sends an Abort for `aborts`."""
        done = Processed()
        for out in outputs:
            choice = self._choices.get(out.request_id)
            if choice is None:
                continue
            delta = choice.take_token(out) or choice.take(out)
            if delta.finish_reason is not None:
                del self._choices[out.request_id]
                if out.finish_reason is None:
                    done.aborts.append(out.request_id)
            done.deltas.append(delta)
        return done

    def result(self, request_id: str) -> RequestResult:
        """The result so far; it keeps growing. KeyError for an unknown request."""
        return self._results[request_id]

    def pop(self, request_id: str) -> RequestResult:
        """The result, no longer kept here. For a finished request, or after `abort`."""
        return self._results.pop(request_id)

    def abort(self, request_id: str) -> list[str]:
        """Stop expecting outputs of a request whose client has gone, drop its result, and give the engine request ids
        to abort. Unknown ids give none."""
        result = self._results.pop(request_id, None)
        gone = [key for key, choice in self._choices.items() if choice.result is result]
        for key in gone:
            del self._choices[key]
        return gone


class _Choice:
    """One choice: its detokeniser, its stop matcher, and its part of the result."""

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, result: RequestResult, output: CompletionOutput
    ) -> None:
        self.result = result
        self._tokenizer = tokenizer
        self._params = params
        self._output = output
        self._text: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._text = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, result.prompt_token_ids)
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._plain = not params.stop and params.logprobs is None
        if params.logprobs is not None:
            output.logprobs = []
            output.cumulative_logprob = 0.0

    def take_token(self, out: RequestOutput) -> Delta | None:
        """`take` for what most steps give: one token among others. None for anything else, and nothing is done."""
        if not self._plain or out.finish_reason is not None or len(out.new_token_ids) != 1:
            return None
        if out.num_cached_tokens or out.prompt_logprobs is not None:
            return None
        text = "" if self._text is None else self._text.push_token(out.new_token_ids[0])
        output = self._output
        output.text += text
        output.token_ids.append(out.new_token_ids[0])
        return Delta(self.result.request_id, output.index, text, out.new_token_ids)

    def take(self, out: RequestOutput) -> Delta:
        """Add what one step gave; returns the same as a delta."""
        if out.num_cached_tokens and not self._output.index:  # the others find what the first choice has computed
            self.result.num_cached_tokens = out.num_cached_tokens
        if out.prompt_logprobs is not None:
            self.result.prompt_logprobs = [None if p is None else self._position(p) for p in out.prompt_logprobs]
        text, used = self._read(out)
        reason, stop_reason, error = out.finish_reason, out.stop_reason, out.error
        if self._stop.matched is not None:
            reason, stop_reason, error = FinishReason.STOP.value, self._stop.matched, None
        output = self._output
        delta = Delta(
            request_id=self.result.request_id,
            index=output.index,
            text=text,
            token_ids=out.new_token_ids[:used],
            logprobs=self._logprobs(out.logprobs, used),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
        )
        output.text += text
        output.token_ids += delta.token_ids
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs += delta.logprobs
        output.finish_reason, output.stop_reason, output.error = reason, stop_reason, error
        self.result.finished = delta.finished = all(o.finished for o in self.result.outputs)
        return delta

    def _read(self, out: RequestOutput) -> tuple[str, int]:
        """(text to show, tokens that count). Token by token, so that a stop string's token is the last that counts.

        The stop token itself (end of sequence or a stop id) counts but is not shown. Stop strings are looked for in
        the text after the first min_tokens tokens.
        """
        if self._text is None:
            return "", len(out.new_token_ids)
        shown = []
        hidden = out.finish_reason == FinishReason.STOP and not self._params.include_stop_str_in_output
        last = len(out.new_token_ids) - 1
        for i, token in enumerate(out.new_token_ids):
            piece = "" if hidden and i == last else self._text.push_token(token)
            shown.append(self._match(piece, len(self._output.token_ids) + i + 1))
            if self._stop.matched is not None:
                return "".join(shown), i + 1
        if out.finish_reason is not None:
            shown.append(self._match(self._text.flush(), len(self._output.token_ids) + last + 1))
            shown.append(self._stop.flush())
        return "".join(shown), len(out.new_token_ids)

    def _match(self, piece: str, num_tokens: int) -> str:
        if num_tokens <= self._params.min_tokens:
            return piece
        return self._stop.push(piece).text

    def _logprobs(self, given: Sequence[TokenLogprobs] | None, used: int) -> list[PositionLogprobs] | None:
        if self._output.logprobs is None:
            return None
        positions = list(given or ())[:used]
        if self._output.cumulative_logprob is not None:
            self._output.cumulative_logprob += sum(p.logprob for p in positions)
        return [self._position(p) for p in positions]

    def _position(self, p: TokenLogprobs) -> PositionLogprobs:
        found = {p.token_id: self._logprob(p.token_id, p.logprob, p.rank)}
        for i, (token, value) in enumerate(zip(p.top_ids, p.top_logprobs, strict=True)):
            if token != p.token_id:
                found[token] = self._logprob(token, value, i + 1)
        return found

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        data = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return Logprob(value, rank, data.decode("utf-8", errors="replace"), data)
