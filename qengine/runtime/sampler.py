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
from qengine.runtime.random_streams import stream_of, uniforms
from qengine.runtime.sampling_kernels import RowMax, TopFloor
from qengine.sampling_params import SamplingParams
from qengine_kernels.row_max import row_max
from qengine_kernels.top_floor import FEW, top_floor

__all__ = ["SampledBatch", "Sampler", "SamplingBatch", "logprobs_of"]

BLOCK = 1024
"""Tokens of one block of the two-level cumulative sum."""


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
class Limited:
    """Drawing rows that have a top_k or top_p: their positions among those that draw, and both values, on the device.
    top_k is the vocabulary size for none; `most` is the largest."""

    rows: torch.Tensor
    most: int
    top_k: torch.Tensor
    top_p: torch.Tensor


@dataclass
class SamplingBatch:
    """What stays the same while the same requests are sampled: streams and filter values, on the device.

    `random` are the rows that draw; tensors have one entry for each of them. `limited` are those of them with a top_k
    or top_p, rows of small top_k apart: how a row is filtered does not depend on the rows beside it. `edited` are the
    rows whose logits may be edited, `logprob_rows` those that want logprobs.
    """

    requests: list[Request]
    streams: np.ndarray
    random: list[int]
    edited: list[int]
    rows: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor | None
    limited: list[Limited]
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
        groups = [i for i in filtered if limits[i] <= FEW], [i for i in filtered if limits[i] > FEW]

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
            limited=[
                Limited(
                    index(rows),
                    max(limits[i] for i in rows),
                    index([limits[i] for i in rows]),
                    number([drawn[i].top_p for i in rows]),
                )
                for rows in groups
                if rows
            ],
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
        self.top_floor: TopFloor = top_floor
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
            drawn = draw(x, best if everyone else best[batch.rows], batch, u, self.top_floor)
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


def draw(
    logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch, u: torch.Tensor, find: TopFloor = top_floor
) -> torch.Tensor:
    """Token ids int64 [N] of drawing rows. logits float32 [N, V], best [N] their maxima, u float64 [N] in [0, 1)."""
    x = (logits - best[:, None]) / batch.temperature[:, None]
    floor = torch.full_like(best, -torch.inf) if batch.log_min_p is None else batch.log_min_p
    p = x.exp()
    for limited in batch.limited:
        at = limited.rows
        floor = floor.index_copy(0, at, find(x, p, at, limited.most, limited.top_k, limited.top_p, floor[at]))
    if batch.limited or batch.log_min_p is not None:
        p.masked_fill_(x < floor[:, None], 0.0)
    return inverse_cdf(p, u)


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
