"""From logits to tokens: edits, temperature, min_p, top_k, top_p, then a seeded draw.

Randomness is one number in [0, 1) a token, a hash of (seed, tokens generated so far), put through the inverse of the
row's cumulative distribution. So a token depends on its seed, its place and its logits only: not on the batch around
it, not on preemption, not on the device's random generator.

top_k and top_p become a floor on the logit: what is below is out. Tokens that tie with the last kept one are all kept,
which makes the outcome independent of how a sort orders equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from qengine.core.request import Request
from qengine.messages import TokenLogprobs
from qengine.runtime.logit_edits import LogitEdits, has_penalty, may_edit
from qengine.runtime.logprobs import PendingLogprobs, logprobs_of, start_logprobs
from qengine.runtime.marker import mark, wait
from qengine.runtime.maxima import RowMax
from qengine.runtime.random_streams import stream_of, uniforms
from qengine.sampling_params import SamplingParams
from qengine_kernels.row_max import row_max

__all__ = ["SampledBatch", "Sampler", "SamplingBatch", "logprobs_of"]

BLOCK = 1024
"""Tokens of one block of the two-level cumulative sum."""
FEW = 256
"""Up to this top_k, the likeliest tokens are picked out instead of sorting the vocabulary."""
SORT_ROWS = 32
"""Rows sorted at once: bounds the peak at about SORT_ROWS * vocab * 24 bytes."""


@dataclass
class SampledBatch:
    """One entry a row. `nonfinite`: the row's logits hold NaN or +inf, or every token is -inf; its token means
    nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    nonfinite: list[bool]


@dataclass
class Draws:
    """What was sampled, on the device, and on its way to the host. `token_ids` int64 [R]: any id in range for a row
    that is not finite. `read` may be called once the device has come so far."""

    token_ids: torch.Tensor
    ids: torch.Tensor
    """int64 [R] on the host, -1 for a row that is not finite."""
    logprobs: PendingLogprobs | None
    logprob_rows: Sequence[int]

    def read(self) -> SampledBatch:
        ids = self.ids.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if self.logprobs is not None:
            for i, found in zip(self.logprob_rows, self.logprobs.read(), strict=True):
                logprobs[i] = found
        bad = [i < 0 for i in ids]
        return SampledBatch([max(i, 0) for i in ids] if any(bad) else ids, logprobs, bad)


@dataclass
class SamplingBatch:
    """What stays the same while the same requests are sampled: streams and filter values, on the device.

    `random` are the rows that draw; tensors have one entry for each of them. `filtered` are the positions among them
    that have a top_k or top_p, `limits` their top_k (vocabulary size for none). `edited` are the rows whose logits may
    be edited, `logprob_rows` those that want logprobs.
    """

    requests: list[Request]
    streams: np.ndarray
    random: list[int]
    edited: list[int]
    rows: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor | None
    filtered: torch.Tensor
    limits: list[int]
    top_k: torch.Tensor
    top_p: torch.Tensor
    logprob_rows: list[int]
    logprob_index: torch.Tensor

    @classmethod
    def build(
        cls, requests: Sequence[Request], streams: Callable[[Request], int], vocab_size: int, device: torch.device
    ) -> SamplingBatch:
        params: list[SamplingParams] = [r.sampling for r in requests]
        random = [i for i, p in enumerate(params) if not p.greedy]
        drawn = [params[i] for i in random]
        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in drawn]
        with_logprobs = [i for i, p in enumerate(params) if p.logprobs is not None]
        filtered = [i for i, p in enumerate(drawn) if p.top_p < 1 or limits[i] < vocab_size]

        def number(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)

        def index(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        min_p = number([p.min_p for p in drawn]).log() if any(p.min_p > 0 for p in drawn) else None
        return cls(
            requests=list(requests),
            streams=np.array([streams(requests[i]) for i in random], dtype=np.uint64),
            random=random,
            edited=[i for i, r in enumerate(requests) if may_edit(r)],
            rows=index(random),
            temperature=number([p.temperature for p in drawn]),
            log_min_p=min_p,
            filtered=index(filtered),
            limits=[limits[i] for i in filtered],
            top_k=index([limits[i] for i in filtered]),
            top_p=number([drawn[i].top_p for i in filtered]),
            logprob_rows=with_logprobs,
            logprob_index=index(with_logprobs),
        )

    def is_for(self, requests: list[Request]) -> bool:
        return self.requests == requests  # requests are equal only to themselves


class Sampler:
    """Samples one token a row. Not thread-safe: one engine loop drives it.

    `seed` serves requests that bring none: their stream is (seed, request id).
    """

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.seed = seed
        self.row_max: RowMax = row_max
        self._edits = LogitEdits()
        self._batch: SamplingBatch | None = None
        self._streams: dict[str, int] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a finished request; unknown ids are ignored."""
        self._edits.forget(request_id)
        self._streams.pop(request_id, None)

    def batch(self, requests: Sequence[Request]) -> SamplingBatch:
        """The batch of these requests; the last one where nothing changed."""
        wanted = list(requests)
        if self._batch is None or not self._batch.is_for(wanted):
            self._batch = SamplingBatch.build(wanted, self._stream, self.vocab_size, self.device)
        return self._batch

    def _stream(self, request: Request) -> int:
        found = self._streams.get(request.request_id)
        if found is None:
            found = self._streams[request.request_id] = stream_of(request, self.seed)
        return found

    def uniforms(self, requests: Sequence[Request], positions: Sequence[int]) -> np.ndarray | None:
        """One number in [0, 1) for each row that draws its token at random, float64; None where none does."""
        batch = self.batch(requests)
        if not batch.random:
            return None
        at = positions if len(batch.random) == len(positions) else [positions[i] for i in batch.random]
        return uniforms(batch.streams, np.array(at, dtype=np.uint64))

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> SampledBatch:
        """The next token of each request, all ids of which are known. logits float32 [R, V], unchanged."""
        positions = [len(r.output_token_ids) for r in requests]
        draws = self.draw(logits, requests, positions)
        wait(mark(logits.device))
        return draws.read()

    def draw(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        positions: Sequence[int],
        u: torch.Tensor | None = None,
    ) -> Draws:
        """As `sample`, waiting for nothing. `positions`: how many tokens each request has generated, known or not; ids
        that are not known matter to edits only (see `needs_ids`). `u`: the `uniforms`, where they are there already."""
        batch = self.batch(requests)
        work = self._edits.apply(logits, requests, positions, batch.edited)
        best, tokens, ids = self.row_max(work)
        if work is not logits:
            ids = torch.where(torch.isfinite(logits.amax(dim=1)), ids, -1)
        if batch.random:
            if u is None:
                u = torch.from_numpy(self.uniforms(requests, positions)).to(logits.device, non_blocking=True)
            everyone = len(batch.random) == len(requests)
            x = work if everyone else work[batch.rows]
            drawn = draw(x, best if everyone else best[batch.rows], batch, u)
            tokens = drawn if everyone else tokens.index_copy(0, batch.rows, drawn)
            ids = torch.where(ids < 0, -1, tokens)
        logprobs = None
        if at := batch.logprob_rows:
            ks = [requests[i].sampling.logprobs for i in at]
            some = batch.logprob_index
            rows = (logits, tokens) if len(at) == len(requests) else (logits[some], tokens[some])
            logprobs = start_logprobs(*rows, ks)
        return Draws(tokens, ids.to("cpu", non_blocking=True), logprobs, batch.logprob_rows)


def needs_ids(p: SamplingParams) -> bool:
    """Whether the next token's logits depend on the ids of all tokens before it."""
    return has_penalty(p) or any(len(word) > 1 for word in p.bad_words_token_ids)


def draw(logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch, u: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [N] of drawing rows. logits float32 [N, V], best [N] their maxima, u float64 [N] in [0, 1)."""
    x = (logits - best[:, None]) / batch.temperature[:, None]
    floor = torch.full_like(best, -torch.inf) if batch.log_min_p is None else batch.log_min_p
    p = x.exp()
    if batch.limits:
        floor = floor.clone()
        everyone = len(batch.limits) == len(x)
        for i in range(0, len(batch.limits), SORT_ROWS):
            part = slice(i, i + SORT_ROWS)
            at = part if everyone else batch.filtered[part]
            floor[at] = filter_floor(x[at], p[at], floor[at], batch.limits[part], batch.top_k[part], batch.top_p[part])
    if batch.limits or batch.log_min_p is not None:
        p.masked_fill_(x < floor[:, None], 0.0)
    return inverse_cdf(p, u)


def filter_floor(
    x: torch.Tensor, p: torch.Tensor, floor: torch.Tensor, limits: list[int], top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The lowest x that top_k and top_p keep, [M]. x float32 [M, V] with maximum 0, p = exp(x), floor [M] from min_p;
    `limits` are the numbers of `top_k` on the host."""
    most = max(limits)
    ordered = x.topk(most, dim=1).values if most <= min(FEW, x.shape[1]) else _descending(x)
    kth = ordered.gather(1, (top_k - 1)[:, None])[:, 0]
    floor = torch.maximum(floor, kth)
    target = top_p * torch.where(x >= floor[:, None], p, 0.0).sum(dim=1)
    # Values below the floor need no mask here: they stand last, and the floor wins over them.
    above = (ordered.exp().cumsum(dim=1, dtype=torch.float64) < target[:, None]).sum(dim=1)
    nucleus = ordered.gather(1, above.clamp(max=ordered.shape[1] - 1)[:, None])[:, 0]
    return torch.where(top_p < 1, torch.maximum(floor, nucleus), floor)


def _descending(x: torch.Tensor) -> torch.Tensor:
    """Values of each row, highest first. On a CPU numpy's vectorised sort takes 2.3 ms for 16 x 49152 where torch's,
    which also returns indices, takes 45 (AVX2, one thread)."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=1)).flip(1)
    return x.sort(dim=1, descending=True).values


def inverse_cdf(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token of each row at which the running sum of p exceeds u times the row's sum: int64 [N].

    p float32 [N, V] >= 0, u float64 [N] in [0, 1). Two levels, blocks and then tokens, so that float32 rounding of a
    long sum never reaches a token. Never gives a token with p = 0; rows with NaN give some id in range.
    """
    rows, vocab = p.shape
    if vocab % BLOCK:
        p = F.pad(p, (0, BLOCK - vocab % BLOCK))
    blocks = p.view(rows, -1, BLOCK)
    upto = blocks.sum(dim=2).double().cumsum(dim=1)
    target = u * upto[:, -1]
    block = (upto <= target[:, None]).sum(dim=1).clamp(max=blocks.shape[1] - 1)
    before = F.pad(upto, (1, 0)).gather(1, block[:, None])[:, 0]
    inside = blocks[torch.arange(rows, device=p.device), block]
    token = (inside.double().cumsum(dim=1) <= (target - before)[:, None]).sum(dim=1)
    # The block's sum and the sum over its tokens may round differently: then the last possible token is meant.
    last = ((inside > 0) * torch.arange(BLOCK, device=p.device)).amax(dim=1)
    return block * BLOCK + torch.minimum(token, last)
