"""A calibration run: every layer in turn, statistics and results on disk, then what was asked for from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from qengine.errors import CapacityError, CheckpointError, ConfigError
from qengine.models.blocks import DecoderLayer
from qengine.plugin import Quantizer, WeightQuant
from qengine.runtime import device as devices
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.host_memory import large_blocks_mapped
from qengine_calibration.kv_scales import KVLayerResult, KVOptions, settle
from qengine_calibration.layer import LayerQuantizer, LayerResult
from qengine_calibration.memory import plan_memory
from qengine_calibration.observe import InputObserver, KVObserver, observe
from qengine_calibration.stream import TOKENS_AT_ONCE, LayerStream, MicroBatch
from qengine_calibration.texts import Texts
from qengine_calibration.work import WorkFolder

VERSION = 2
"""Changes when the same source and text would give another result; part of a run's key."""
FEEDS = ("original", "quantised")
SIXTEEN_OR_MORE = (torch.float16, torch.bfloat16, torch.float32)

Say = Callable[[str], None]
Tick = Callable[[int, int], None]
"""Called after each layer with (layers done, layers in all)."""


@dataclass(frozen=True)
class Weights:
    """Which weights to make: `options` are what the quantizer was made with, for the run's key and the report."""

    plugin: type[WeightQuant]
    quantizer: Quantizer
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunOptions:
    """`weights` or `kv`, or both in one pass. `feed`: whether a layer reads what the original or the quantised layers
    before it make of the text. `max_memory`: bytes that the run may take on the device where layers run, of the
    whole process where that is the CPU. `resume` goes on where a killed run with the same source, text and options
    stood."""

    weights: Weights | None = None
    kv: KVOptions | None = None
    feed: str = "original"
    device: str = "auto"
    tokens_at_once: int = TOKENS_AT_ONCE
    max_memory: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.weights is None and self.kv is None:
            raise ConfigError("nothing to calibrate", need="--quant NAME, --kv-dtype NAME, or both")
        if self.feed not in FEEDS:
            raise ConfigError("--feed", have=self.feed, need=" | ".join(FEEDS))

    def key(self, checkpoint_mark: str, texts: Texts) -> str:
        made = None if self.weights is None else [self.weights.plugin.name, self.weights.options]
        kv = None if self.kv is None else [self.kv.kv_dtype, self.kv.granularity, self.kv.method]
        text = json.dumps([VERSION, checkpoint_mark, texts.digest, made, kv, self.feed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class MemoryShortError(Exception):
    """A micro-batch did not fit; the next ones are smaller."""


class CalibrationRun:
    """Runs all layers into a work folder. What is held at a time is one layer and one micro-batch, however much text
    there is."""

    def __init__(self, checkpoint: Checkpoint, texts: Texts, options: RunOptions, work: Path, mark: str) -> None:
        """`mark` identifies the checkpoint's contents."""
        if options.weights is not None and not checkpoint.is_dense():
            method = checkpoint.quant.method if checkpoint.quant else "integer tensors"
            raise CheckpointError(f"{checkpoint.folder} is quantised already", have=method, need="a 16-bit checkpoint")
        self.options, self.texts = options, texts
        device, info = devices.select_device(options.device)
        dtype = torch.float32 if device.type == "cpu" else devices.choose_dtype("auto", checkpoint.dtype, info)[0]
        self.stream = LayerStream(checkpoint, texts.sequences, device, info, dtype, options.tokens_at_once)
        if options.kv is not None:
            options.kv.check_layers(layer.spec.sliding_window is not None for layer in self.stream.model.attention)
        w = options.weights
        self.quantizer = None if w is None else LayerQuantizer(w.quantizer, w.plugin)
        self.again = w is not None and (options.kv is not None or options.feed == "quantised")
        self.memory = plan_memory(
            self.stream, self.quantizer, self.again, options.max_memory, kv=options.kv is not None
        )
        self.stream.tokens_at_once = self.memory.tokens
        # Last: what is refused leaves no folder.
        self.work = WorkFolder(work, options.key(mark, texts), self.stream.model.hidden_size, options.resume)

    def plan(self) -> list[str]:
        """What will be needed, for the start of a run."""
        stream = self.stream
        hidden = self.texts.tokens * stream.model.hidden_size * 4
        name = str(stream.dtype).removeprefix("torch.")
        return [
            f"{len(stream.layers)} layers, one at a time, on {stream.device.type} in {name}",
            *self.memory.lines(stream.device),
            f"hidden states of the text lie on disk: {2 * hidden / 2**20:.0f} MiB in {self.work.path}",
        ]

    def run(self, tick: Tick = lambda done, total: None) -> None:
        """Do what is left to do."""
        with large_blocks_mapped():
            try:
                self._run(tick)
            finally:
                devices.limit_memory(self.stream.device, None)

    def _run(self, tick: Tick) -> None:
        stream, work = self.stream, self.work
        total = len(stream.layers)
        devices.start_peak(stream.device)
        if self.options.max_memory is not None:
            devices.limit_memory(stream.device, self.options.max_memory)
        if work.done == 0:
            stream.embed(work.fresh_hidden(0))
        tick(work.done, total)
        for index in range(work.done, total):
            tensors, facts = self._layer(index)
            work.save(index, tensors, facts)
            tick(index + 1, total)

    def memory_facts(self) -> dict[str, int]:
        """Bytes on the device where layers run; on a CPU those of the whole process, whose peak may be an older one."""
        return {"planned": self.memory.peak, "peak": devices.peak_bytes(self.stream.device),
                "tokens_at_once": self.stream.tokens_at_once}  # fmt: skip

    def _layer(self, index: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        stream, layer = self.stream, self.stream.layers[index]
        name = layer.attention.attention.name
        facts: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        observers, seen = self._original(index, keep=self.options.feed == "original", see_kv=not self.again)
        stream.forget(layer)
        if self.quantizer is not None:
            try:
                result = self.quantizer.run(layer, self._float_tensors(layer), observers, keep_meaning=self.again)
            except ValueError as e:
                raise CheckpointError(f"{stream.checkpoint.folder} cannot be quantised: {e}") from e
            tensors |= result.tensors
            facts |= {
                "replaced": result.replaced, "linears": result.linears, "factors": result.factors, "cold": result.cold,
            }  # fmt: skip
            if self.again:
                seen = self._quantised(index, result, keep=self.options.feed == "quantised")
        stream.forget(layer)
        if self.options.kv is not None:
            assert seen is not None
            kv = settle(name, index, seen, self.options.kv)
            tensors |= kv.tensors()
            facts["kv"] = {name: kv.facts()}
        return tensors, facts

    def _original(self, index: int, keep: bool, see_kv: bool) -> tuple[dict[str, InputObserver], KVObserver | None]:
        """Run the layer as the checkpoint has it; `keep` its outputs for the next one."""
        layer = self.stream.layers[index]
        while True:
            self.stream.load(layer.leaves)
            observers: dict[str, InputObserver] = {}
            if self.quantizer is not None:
                observers = observe(self.quantizer.observed(layer), self.quantizer.wants_moment, self.texts.tokens)
            try:
                return observers, self._pass(index, keep, see_kv)
            except MemoryShortError:
                continue

    def _quantised(self, index: int, result: LayerResult, keep: bool) -> KVObserver | None:
        """Run the layer with the weights that were made of it."""
        layer = self.stream.layers[index]
        self.stream.tidy()
        while True:
            self.stream.load(layer.leaves, lambda n: result.meaning[n].to("cpu") if n in result.meaning else
                             self.stream.checkpoint.read(n))  # fmt: skip
            try:
                return self._pass(index, keep, see_kv=True)
            except MemoryShortError:
                continue

    def _pass(self, index: int, keep: bool, see_kv: bool) -> KVObserver | None:
        """One run of all text through a loaded layer. Raises MemoryShortError when smaller micro-batches are to be
        tried; nothing is counted twice then, since observers and hidden states are made anew."""
        stream, layer = self.stream, self.stream.layers[index]
        attention = layer.attention.attention
        observer = KVObserver(attention.spec) if see_kv and self.options.kv is not None else None
        after = self.work.fresh_hidden(index + 1) if keep else None

        def each(batch: MicroBatch, before: torch.Tensor, hidden: torch.Tensor) -> None:
            if not bool(torch.isfinite(hidden).all()):
                self._refuse(index)
            if after is not None:
                after.write(batch.first, hidden)

        stream.kv(index).observer = observer
        try:
            stream.run(layer, self.work.hidden(index), each)
        except (torch.OutOfMemoryError, MemoryError) as e:
            stream.forget(layer)
            if not stream.halve():
                raise CapacityError(
                    f"one sequence of {self.texts.length} tokens does not fit beside layer {index}: {e}",
                    hint="a smaller --seq-len",
                ) from e
            raise MemoryShortError from e
        finally:
            stream.kv(index).observer = None
        return observer

    def _refuse(self, index: int) -> NoReturn:
        """Raises CheckpointError for a layer whose outputs are not finite, naming those of its weights that are not."""
        weights = self._float_tensors(self.stream.layers[index])
        bad = [n for n, t in weights.items() if t.dtype in SIXTEEN_OR_MORE and not bool(torch.isfinite(t).all())]
        raise CheckpointError(
            f"{self.stream.checkpoint.folder}: outputs of layer {index} are not finite",
            have=f"NaN or infinity in {', '.join(bad[:4])}" if bad else f"values beyond {self.stream.dtype}",
            hint="another copy of the model" if bad else None,
        )  # fmt: skip

    def _float_tensors(self, layer: DecoderLayer) -> dict[str, torch.Tensor]:
        stream = self.stream
        names = dict.fromkeys(n for leaf in layer.leaves for n, _ in leaf.needs() if n in stream.checkpoint.tensors)
        return {n: stream.checkpoint.read(n).to(stream.device) for n in names}


def kv_facts(work: WorkFolder) -> dict[str, Any]:
    """Figures of all attention layers, by name."""
    return {name: f for i in range(work.done) for name, f in work.facts(i).get("kv", {}).items()}


__all__ = ["CalibrationRun", "KVLayerResult", "RunOptions", "Weights", "kv_facts"]
