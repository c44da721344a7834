"""Messages between the front (text, HTTP) and the engine core: one definition, in process or over a socket."""

from __future__ import annotations

import msgspec

from qengine.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, kw_only=True, tag=True):
    """A validated request. `request_id` is unique; the n choices of one prompt are n requests whose `fork_of` is the
    first one's id."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int] = []
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    fork_of: str | None = None


class Abort(msgspec.Struct, kw_only=True, tag=True):
    request_ids: list[str]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Raw log-softmax of one position: the chosen token's value and rank (1 = most likely), and the top alternatives
    (ids and values, most likely first; the chosen token may be among them)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step gave to one request. `new_token_ids` never repeats a token that was sent before.

    `refused`: `error` says why this request can never run here (HTTP 400), not that something failed (HTTP 500)."""

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and counters of the engine loop, sent with every batch of outputs and as a heartbeat when idle."""

    time: float = 0.0
    steps: int = 0
    last_progress: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_slots_allocated: int = 0
    kv_slots_wasted: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    expert_cache_queries: int = 0
    expert_cache_hits: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_blocks_cached: int = 0
    num_swapped: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    num_preemptions: int = 0
    preemptions_swapped: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    nonfinite_requests: int = 0
    synchronous_steps: int = 0
    kernels_compiled: int = 0
    fatal: str | None = None


class StepOutputs(msgspec.Struct, kw_only=True, tag=True):
    outputs: list[RequestOutput]
    stats: EngineStats
