"""Runs one scheduled step: inputs, forward pass, logits of the rows that need them, sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from qengine.core.step import SampledToken, Step
from qengine.messages import TokenLogprobs
from qengine.models.model import Model
from qengine.runtime.expert_slots import SlotLayers
from qengine.runtime.graphs import DecodeGraphs
from qengine.runtime.inputs import InputBuilder, StepInputs
from qengine.runtime.kv_cache import KVCache
from qengine.runtime.kv_host import HostBlocks
from qengine.runtime.logprobs import logprobs_of
from qengine.runtime.marker import mark, wait
from qengine.runtime.prompt_graphs import PromptGraphs
from qengine.runtime.sampler import Draws, Sampler
from qengine.runtime.threads import ThreadChoice
from qengine.runtime.weight_stream import WeightStream
from qengine_kernels.expert_slots import HITS, QUERIES

NONFINITE = "the model's logits were not finite (NaN or infinity) for this request"
PROMPT_ROWS = 512
"""Prompt-logprob rows whose logits are held at once: bounds the peak at PROMPT_ROWS * vocab floats."""


@dataclass
class StepResult:
    """One entry a sampling sequence, in step order; `prompt_logprobs` by request id when its prompt is complete."""

    sampled: list[SampledToken] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)


@dataclass
class Launched:
    """A step that the device works on, or has done. `draws` is None where no sequence samples."""

    step: Step
    draws: Draws | None
    marker: torch.cuda.Event | None
    result: StepResult
    slot_counts: torch.Tensor | None = None
    """Of expert slots, on their way to the host (`SlotLayers.totals`)."""


class Runner:
    """Owns the model, its cache and the sampler. Not thread-safe: one engine loop drives it."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.inputs = InputBuilder(cache.block_size, num_groups, device)
        self.device = device
        self.host: HostBlocks | None = None
        """Where steps' `swap_out` and `swap_in` go and come from; set before the first step that has any."""
        self.threads: ThreadChoice | None = None
        """CPU only; set once measured."""
        self.graphs: DecodeGraphs | None = None
        """CUDA only; set once captured."""
        self.prompt_graphs: PromptGraphs | None = None
        """CUDA only; set once captured."""
        self.weights: WeightStream | None = None
        """Set where layers live in host memory."""
        self.expert_slots: SlotLayers | None = None
        """Set where experts of those layers have slots on the device."""
        self.slot_queries = self.slot_hits = 0
        """Experts that layers of collected steps looked for in slots, and those that had one."""
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._sampled: torch.Tensor | None = None
        """What the last step samples, on the device."""

    def use_graphs(self, graphs: DecodeGraphs | None) -> None:
        """Replay decode steps from now on, padded to the graphs' buffers; None: run them eagerly."""
        self.graphs = graphs
        self.inputs.fixed_rows = 0 if graphs is None else graphs.rows

    def count_anew(self) -> None:
        """Warming up is over, which asked for experts as nobody else will."""
        if self.expert_slots is not None:
            self.expert_slots.reset()
        self.slot_queries = self.slot_hits = 0

    def forget(self, request_id: str) -> None:
        """Drop what is kept between steps for a finished request."""
        self.inputs.forget(request_id)
        self.sampler.forget(request_id)
        self.prompt_logprobs.pop(request_id, None)

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[StepInputs, torch.Tensor]:
        """The step's block operations and its forward pass: inputs, and hidden states [num_tokens, hidden_size]."""
        inputs = self._begin(step)
        return inputs, self._hidden(inputs)

    def _begin(self, step: Step, uniforms: np.ndarray | None = None) -> StepInputs:
        if self.host is not None:
            self.host.copy_out(step.swap_out)
        self.cache.zero_blocks(step.zero_blocks)
        if self.host is not None:
            self.host.copy_in(step.swap_in)
        self.cache.copy_blocks(step.copy_blocks)
        return self.inputs.build(step, self._sampled, uniforms)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        if self.threads is not None:
            torch.set_num_threads(self.threads.for_tokens(inputs.batch.num_tokens))
        if self.weights is not None:
            self.weights.begin(inputs.batch.num_tokens)
        hidden = self.model.forward(inputs.token_ids, inputs.batch)
        if self.weights is not None:
            self.weights.finish()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size] of hidden states [R, hidden_size]."""
        if self.threads is not None:
            torch.set_num_threads(self.threads.for_rows(len(hidden)))
        return self.model.logits(hidden)

    def execute(self, step: Step) -> StepResult:
        """Run one step and wait for its result."""
        return self.collect(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Start a step. It may go on from tokens that the step launched before it samples, whether or not that one was
        collected. On a CPU it is done when this returns."""
        requests = [s.request for s in step.sequences if s.samples]
        positions = [s.start + s.num_new_tokens - s.request.num_prompt_tokens for s in step.sequences if s.samples]
        inputs = self._begin(step, self.sampler.uniforms(requests, positions))
        result = StepResult()
        hidden = self.graphs.run(inputs) if self.graphs is not None else None
        if hidden is None and self.prompt_graphs is not None:
            hidden = self.prompt_graphs.run(inputs)
        if hidden is None:
            hidden = self._hidden(inputs)
        self._prompt_logprobs(step, inputs, hidden, result)
        draws = None
        if requests:
            rows = hidden if len(requests) == len(hidden) else hidden[inputs.sample_rows]
            draws = self.sampler.draw(self.logits(rows), requests, positions, inputs.uniforms)
        self._sampled = None if draws is None else draws.token_ids
        counts = None if self.expert_slots is None else self.expert_slots.totals()
        return Launched(step, draws, mark(self.device), result, counts)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step's result. Steps are collected in the order in which they were launched."""
        wait(launched.marker)
        if launched.slot_counts is not None:
            counts = launched.slot_counts.tolist()
            self.slot_queries, self.slot_hits = counts[QUERIES], counts[HITS]
        result = launched.result
        if launched.draws is not None:
            out = launched.draws.read()
            result.sampled = [
                SampledToken(token, NONFINITE if bad else None)
                for token, bad in zip(out.token_ids, out.nonfinite, strict=True)
            ]
            result.logprobs = out.logprobs
        return result

    def _prompt_logprobs(self, step: Step, inputs: StepInputs, hidden: torch.Tensor, result: StepResult) -> None:
        """Logprobs of prompt tokens, chunk by chunk; position 0 has none. Replays after preemption overwrite."""
        row = 0
        for s in step.sequences:
            request, first = s.request, row
            row += s.num_new_tokens
            if not request.prompt_logprobs or s.start >= request.num_prompt_tokens:
                continue
            kept = self.prompt_logprobs.setdefault(request.request_id, [None] * request.num_prompt_tokens)
            count = min(s.num_new_tokens, request.num_prompt_tokens - 1 - s.start)
            k = request.sampling.prompt_logprobs
            for i in range(0, count, PROMPT_ROWS):
                n = min(PROMPT_ROWS, count - i)
                at = s.start + i
                logits = self.model.logits(hidden[first + i : first + i + n])
                targets = request.prompt_token_ids[at + 1 : at + n + 1]
                kept[at + 1 : at + n + 1] = logprobs_of(logits, targets, k)
            if s.start + s.num_new_tokens == request.num_prompt_tokens:
                result.prompt_logprobs[request.request_id] = kept
