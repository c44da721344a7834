"""`qengine bench serve`: streamed requests to any OpenAI-compatible server, at a rate, timed where a client stands."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from qengine.bench.figures import Timing, summary, table, write_json
from qengine.bench.http_client import Client, HttpError
from qengine.bench.options import ServeOptions, percentiles_of
from qengine.bench.prompts import Ask, asks, token_ids, words
from qengine.errors import ConfigError, QEngineError

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


class Target:
    """The server that is asked, and how."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.base = options.base_url or f"http://{options.host}:{options.port}"
        self.path = options.endpoint or PATHS[options.backend]
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self.client = Client(self.base, headers)
        self.model = options.model or ""
        self._text = _texts(options)

    async def find_model(self) -> None:
        """The first model that the server lists, unless one was named. Raises ConfigError when nobody answers."""
        if self.model:
            return
        try:
            listed = json.loads(await self.client.get("/v1/models"))
            self.model = str(listed["data"][0]["id"])
        except (OSError, HttpError, ValueError, LookupError, TypeError) as e:
            raise ConfigError(
                f"no model can be asked for at {self.base}", have=f"{type(e).__name__}: {e}",
                hint="is the server up? `qengine serve MODEL`; or --base-url, --model",
            ) from e  # fmt: skip

    def body(self, ask: Ask) -> bytes:
        o, text = self.options, self._text(ask)
        asked: dict[str, Any] = {
            "model": self.model, "max_tokens": ask.output_len, "temperature": o.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if o.ignore_eos:
            asked["ignore_eos"] = True
        if o.backend == "openai-chat":
            asked["messages"] = [{"role": "user", "content": text}]
        else:
            asked["prompt"] = text
        return json.dumps(asked).encode()

    async def ask(self, ask: Ask) -> Timing:
        """One request; what goes wrong is told in its timing."""
        body = self.body(ask)
        timing = Timing(start=time.perf_counter())
        try:
            await asyncio.wait_for(self._stream(body, timing), self.options.timeout)
            if not timing.times:
                timing.error = "the answer was empty"
        except TimeoutError:
            timing.error = f"no end after {self.options.timeout:g} s"
        except (OSError, HttpError, ValueError, asyncio.IncompleteReadError) as e:
            timing.error = f"{type(e).__name__}: {e}"
        return timing

    async def _stream(self, body: bytes, timing: Timing) -> None:
        async for line in self.client.post(self.path, body):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            now = time.perf_counter()
            event = json.loads(data)
            if "error" in event:
                raise HttpError(str(event["error"])[:300])
            if any(_brings_token(choice) for choice in event.get("choices") or ()):
                timing.times.append(now)
            if usage := event.get("usage"):
                timing.prompt_tokens = usage["prompt_tokens"]
                timing.tokens = usage["completion_tokens"]
        timing.tokens = timing.tokens or len(timing.times)


def _brings_token(choice: dict[str, Any]) -> bool:
    """Whether a piece of a stream belongs to a token: not the role in front, not a last one that only says why."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def _texts(options: ServeOptions) -> Callable[[Ask], str]:
    """How a prompt's text is made: random tokens of the tokenizer, or words."""
    if options.tokenizer is None:
        return lambda ask: words(ask, options.random_prefix_len)
    from qengine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(options.tokenizer)
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    prefix = options.random_prefix_len
    return lambda ask: tokenizer.decode(token_ids(ask, prefix, tokenizer.vocab_size, special))


def arrivals(options: ServeOptions) -> list[float]:
    """When each request is sent, in seconds from the start: gaps of a gamma distribution around the rate."""
    if options.request_rate == float("inf"):
        return [0.0] * options.num_prompts
    rng = random.Random(options.seed)
    at, times = 0.0, []
    for _ in range(options.num_prompts):
        times.append(at)
        at += rng.gammavariate(options.burstiness, 1 / (options.request_rate * options.burstiness))
    return times


async def send(target: Target, made: Sequence[Ask], when: Sequence[float], most: int | None) -> list[Timing]:
    """All requests at their times, at most `most` in flight."""
    slots = asyncio.Semaphore(most or len(made))
    start = time.perf_counter()

    async def one(ask: Ask, at: float) -> Timing:
        await asyncio.sleep(start + at - time.perf_counter())
        async with slots:
            return await target.ask(ask)

    return await asyncio.gather(*(one(ask, at) for ask, at in zip(made, when, strict=True)))


async def _run(options: ServeOptions) -> tuple[Target, list[Timing], float]:
    target = Target(options)
    await target.find_model()
    o = options
    lengths = (o.random_input_len, o.random_output_len, o.random_range_ratio)
    for ask in asks(o.dataset_name, o.num_warmups, *lengths, o.seed + 1):
        first = await target.ask(ask)
        if first.error is not None:
            raise QEngineError(f"the first request to {target.base}{target.path} failed: {first.error}")
    made = asks(o.dataset_name, o.num_prompts, *lengths, o.seed)
    start = time.perf_counter()
    timings = await send(target, made, arrivals(o), o.max_concurrency)
    duration = time.perf_counter() - start
    await target.client.close()
    return target, timings, duration


def measure(options: ServeOptions) -> dict[str, Any]:
    """Raises ConfigError where there is nobody to ask, QEngineError when every request fails."""
    target, timings, duration = asyncio.run(_run(options))
    errors = [t.error for t in timings if t.error is not None]
    if len(errors) == len(timings):
        raise QEngineError(f"every request failed, the first with: {errors[0]}")
    metrics = options.percentile_metrics.split(",")
    rate, most = options.request_rate, options.max_concurrency
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "base_url": target.base,
        "model_id": target.model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": options.burstiness,
        "max_concurrency": most,
        **summary(timings, duration, metrics, percentiles_of(options.metric_percentiles)),
        "errors": sorted(set(errors)),
    }
    if options.save_detailed:
        found["requests"] = [t.as_dict() for t in timings]
    return found


def lines(figures: dict[str, Any], options: ServeOptions) -> list[str]:
    out = table(figures, options.percentile_metrics.split(","), percentiles_of(options.metric_percentiles))
    return out + [f"failed: {error}" for error in figures["errors"]]


def save(figures: dict[str, Any], options: ServeOptions) -> Path:
    """Write the figures; returns where."""
    model = str(figures["model_id"]).rstrip("/").rpartition("/")[2]
    name = f"{options.backend}-{figures['request_rate']}qps-{model}-{figures['date']}.json"
    path = Path(options.result_dir or ".") / (options.result_filename or name)
    write_json(path, figures)
    return path
