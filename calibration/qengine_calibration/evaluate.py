"""What one setting costs beside another, end to end: perplexity, KL divergence and top-1 agreement on any text.

Both sides run as real engines, the text as prompts: chunk by chunk through the paged cache, with the kernels, weights
and KV dtype that serving has. Logits are compared as they appear and never kept.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qengine.config import EngineConfig
from qengine.errors import CapacityError, ConfigError, UserError
from qengine.runtime import device as devices
from qengine.runtime import report
from qengine.runtime.cache_dir import short_name
from qengine.runtime.decide import Built, decide
from qengine.runtime.engine import Engine
from qengine.runtime.scoring import score
from qengine.text import Tokenizer
from qengine_calibration.eval_text import TextSource, Windows, pack
from qengine_calibration.logit_file import LogitFile
from qengine_calibration.metrics import ARRAYS, Tally, compare, comparison, perplexity

WINDOW = 1024
"""Tokens that are scored together, where the contexts are as long."""
LOGIT_BYTES = 256 << 20
"""Bound of all logits and their temporaries at one moment."""
MOST_ROWS = 512
FEW_POSITIONS = 5000
"""Below this, the 99th percentile of the KL rests on fewer than 50 positions: said in the result."""
WARNING = "WARNING: "

Say = Callable[[str], None]
Tick = Callable[[int, int], None]
"""Called with (positions done, positions in all)."""


@dataclass(frozen=True)
class Evaluation:
    """The result. `sides` describe A and, where there are two, B; arrays are float64 [positions], as in `Positions`.

    `places` are positions within their windows; `notes` say what a reader must know.
    """

    sides: list[dict[str, Any]]
    data: dict[str, Any]
    memory: dict[str, Any]
    seconds: float
    notes: list[str]
    places: np.ndarray
    nll_a: np.ndarray
    nll_b: np.ndarray | None
    kl: np.ndarray | None
    agree: np.ndarray | None

    def summary(self) -> dict[str, Any]:
        """Everything but the arrays, ready for JSON."""
        sides = []
        for side, nll in zip(self.sides, (self.nll_a, self.nll_b), strict=False):
            assert nll is not None
            sides.append({**side, "perplexity": perplexity(nll), "nll": float(nll.mean())})
        between = None
        if self.nll_b is not None and self.kl is not None and self.agree is not None:
            between = comparison(self.nll_a, self.nll_b, self.kl, self.agree)
        return {
            "version": 1, "a": sides[0], "b": sides[1] if len(sides) > 1 else None, "comparison": between,
            "data": self.data, "memory": self.memory, "seconds": round(self.seconds, 2), "notes": self.notes,
        }  # fmt: skip


def evaluate(
    configs: Sequence[EngineConfig],
    source: TextSource,
    *,
    max_tokens: int,
    window: int | None = None,
    one_at_a_time: bool = False,
    max_memory: int | None = None,
    say: Say = lambda line: None,
    tick: Tick = lambda done, total: None,
) -> Evaluation:
    """Run one or two configs, A first, over the text. `config.model` names local folders.

    `window` are the tokens that are scored together (default: 1024, or the longest context where that is shorter). Two
    engines are loaded at once if both fit into memory and the share of it that they may use; else, or with
    `one_at_a_time`, A's logits wait in a temporary file while B is loaded. `max_memory` are bytes that engines may take
    on the device, on a CPU the whole process. Raises UserError for all that cannot work, figures that are not finite
    among it.
    """
    start = time.perf_counter()
    if one_at_a_time and len(configs) < 2:
        raise ConfigError("--one-at-a-time is for two settings", have="one", hint="a second model or setting")
    plans, length = planned(configs, window)
    windows = pack(source, _tokenizers(plans), length, max_tokens)
    vocab = plans[0].model.vocab_size
    if plans[-1].model.vocab_size != vocab:
        have = " and ".join(f"{b.model.vocab_size}" for b in plans)
        raise ConfigError("the two models have vocabularies of different sizes", have=have, need="one vocabulary")
    rows = max(1, min(MOST_ROWS, LOGIT_BYTES // (4 * vocab * ARRAYS)))
    run = _Run(plans, windows, rows, vocab, one_at_a_time, _room(plans, max_memory), say, tick)
    tally = run.run()
    nll_a = tally.array("nll_a")
    assert nll_a is not None
    notes = [f"{i}: {line}" for i, b in zip("AB", plans, strict=False) for line in _warnings(b)]
    if window is None and length < WINDOW:
        notes.append(f"windows have {length} tokens instead of {WINDOW}: the longest context")
    if len(plans) == 2 and windows.positions < FEW_POSITIONS:
        few = max(1, windows.positions // 100)
        notes.append(f"few tokens: the KL's 99th percentile rests on the {few} largest of {windows.positions} values")
    return Evaluation(
        sides=[_describe(b) for b in plans],
        data=_data(source, windows, length, max_tokens),
        memory=run.memory,
        seconds=time.perf_counter() - start,
        notes=notes,
        places=np.concatenate([np.arange(len(w) - 1) for w in windows.ids]),
        nll_a=nll_a,
        nll_b=tally.array("nll_b"),
        kl=tally.array("kl"),
        agree=tally.array("agree"),
    )


def planned(configs: Sequence[EngineConfig], window: int | None) -> tuple[list[Built], int]:
    """What each side will be, from headers, with a cache for one window and not more; and the tokens of a window.

    Raises ConfigError for a window that is longer than the context of a side, asked for or the model's own.
    """
    first = [decide(dataclasses.replace(c, kv_cache_memory_bytes=None)) for c in configs]
    limits = [(b.model.max_position, f"the context of {short_name(Path(b.config.model or ''))}") for b in first]
    limits += [(c.max_model_len, "--max-model-len") for c in configs if c.max_model_len is not None]
    most, whose = min(limits)
    if window is not None and window > most:
        raise ConfigError(f"--window is longer than {whose}", have=f"{window} tokens", need=f"at most {most} tokens")
    length = min(most, WINDOW if window is None else window)
    return [decide(_sized(b, b.config.max_model_len or length)) for b in first], length


def _sized(b: Built, length: int) -> EngineConfig:
    inputs = b.memory.inputs
    size = inputs.blocks_for(length) * inputs.block_bytes
    # One sequence, and no decode steps that a CUDA graph would serve.
    return dataclasses.replace(
        b.config, max_model_len=length, kv_cache_memory_bytes=size, max_num_seqs=1, enforce_eager=True
    )


def _room(plans: Sequence[Built], max_memory: int | None) -> float:
    """Bytes that engines may take together. Raises CapacityError where `max_memory` is too little for one of them."""
    b = plans[-1]
    share = b.config.gpu_memory_utilization * b.memory.inputs.total
    if max_memory is None:
        return share
    base = devices.allocated(b.device) if b.device.type == "cpu" else 0
    most = max(plan.memory.planned for plan in plans)
    if base + most > max_memory:
        have, need = report.gib(max_memory), report.gib(base + most)
        raise CapacityError("--max-memory is too little for the whole model", have=have, need=need)
    return min(share, max_memory - base)


def _tokenizers(plans: Sequence[Built]) -> list[Tokenizer]:
    folders = dict.fromkeys(b.config.tokenizer or b.config.model or "" for b in plans)
    return [Tokenizer.load(f, trust_remote_code=plans[0].config.trust_remote_code) for f in folders]


class _Run:
    """One pass over the windows: engines one beside the other or one after the other, figures into a tally."""

    def __init__(
        self,
        plans: Sequence[Built],
        windows: Windows,
        rows: int,
        vocab: int,
        one_at_a_time: bool,
        room: float,
        say: Say,
        tick: Tick,
    ) -> None:
        self.plans, self.windows, self.rows, self.vocab, self.room = plans, windows, rows, vocab, room
        self.one_at_a_time, self.say, self.tick = one_at_a_time and len(plans) == 2, say, tick
        self.memory: dict[str, Any] = {}
        self.done = self.total = 0

    def run(self) -> Tally:
        engine = Engine.from_config(self.plans[0].config)
        if len(self.plans) == 2 and not self.one_at_a_time:
            self.one_at_a_time = not self._fits_beside(self.plans[1])
        self._state_memory()
        self.total = self.windows.positions * (2 if self.one_at_a_time else 1)
        if not self.one_at_a_time:
            other = Engine.from_config(self.plans[1].config) if len(self.plans) == 2 else None
            return self._tally(self._chunks(engine), self._chunks(other) if other else itertools.repeat(None))
        with LogitFile(self.vocab, self.windows.positions) as kept:
            for logits in self._chunks(engine):
                kept.append(logits)
                self._progress(len(logits))
            del engine
            gc.collect()
            devices.empty_cache(self.plans[0].device)
            other = Engine.from_config(self.plans[1].config)
            return self._tally_kept(kept, other)

    def _fits_beside(self, b: Built) -> bool:
        """Whether B fits, too, and both together stay within what they may take."""
        if sum(plan.memory.planned for plan in self.plans) > self.room:
            return False
        try:
            decide(b.config)
        except CapacityError:
            return False
        return True

    def _state_memory(self) -> None:
        planned = [b.memory.planned for b in self.plans]
        logits = 4 * self.vocab * self.rows * ARRAYS
        file = 4 * self.vocab * self.windows.positions if self.one_at_a_time else 0
        self.memory = {
            "engines_planned_bytes": planned, "engines_at_once": 1 if self.one_at_a_time else len(planned),
            "logit_rows": self.rows, "logits_bytes": logits, "temporary_file_bytes": file,
        }  # fmt: skip
        each = ", ".join(f"{name} {report.gib(size)}" for name, size in zip("AB", planned, strict=False))
        how = "one after the other" if self.one_at_a_time else "at once"
        self.say(
            f"Memory: engines {each}{'' if len(planned) == 1 else ', ' + how}; logits at most {report.gib(logits)} "
            f"({self.rows} positions at a time)"
            + (f"; a temporary file of {report.gib(file)} for A's logits" if file else "")
        )

    def _chunks(self, engine: Engine) -> Iterator[torch.Tensor]:
        """float32 [R, V] for every predicting position of every window; the last of a window predicts nothing."""
        for ids in self.windows.ids:
            at = 0
            for logits in score(engine, ids, self.rows):
                at += len(logits)
                own = logits if at < len(ids) else logits[:-1]
                if len(own):
                    yield own

    def _targets(self) -> torch.Tensor:
        return torch.tensor([t for ids in self.windows.ids for t in ids[1:]], dtype=torch.int64)

    def _tally(self, a: Iterator[torch.Tensor], b: Iterator[torch.Tensor | None]) -> Tally:
        tally, targets, at = Tally(), self._targets(), 0
        for one, two in zip(a, b, strict=False):
            if two is not None and two.shape != one.shape:
                raise AssertionError(f"logits of A {tuple(one.shape)} and of B {tuple(two.shape)} in one step")
            self._settle(tally, one, two, targets[at : at + len(one)], at)
            at += len(one)
        return tally

    def _tally_kept(self, kept: LogitFile, other: Engine) -> Tally:
        tally, targets, at = Tally(), self._targets(), 0
        for two in self._chunks(other):
            one = kept.read(len(two)).to(two.device)
            self._settle(tally, one, two, targets[at : at + len(two)], at)
            at += len(two)
        return tally

    def _settle(self, tally: Tally, a: torch.Tensor, b: torch.Tensor | None, targets: torch.Tensor, at: int) -> None:
        part = compare(a, None if b is None else b.to(a.device), targets)
        for name, values in (("A", part.nll_a), ("B", part.nll_b), ("the KL", part.kl)):
            if values is not None and not bool(torch.isfinite(values).all()):
                where = at + int((~torch.isfinite(values)).nonzero()[0])
                raise UserError(
                    f"the figures of {name} are not finite from position {where} of the text on",
                    have="NaN or infinite logits, or a token of probability 0",
                    hint="another --dtype or KV dtype, or look at that model's own output first",
                )
        tally.add(part)
        self._progress(len(a))

    def _progress(self, positions: int) -> None:
        self.done += positions
        self.tick(self.done, self.total)


def _warnings(b: Built) -> list[str]:
    scales = (line for line in report.scale_lines(b.kv, b.scales.scales) if line.startswith(WARNING))
    unused = b.scales.notes if b.config.kv_scales is not None else []
    found = [*b.notes, *b.checkpoint.notes, *b.load_plan.warnings, *b.scales.warnings, *unused, *scales]
    return [line.removeprefix(WARNING) for line in found]


def _describe(b: Built) -> dict[str, Any]:
    scales = report.scale_lines(b.kv, b.scales.scales)
    return {
        "model": short_name(Path(b.config.model or "")),
        "folder": b.config.model,
        "weights": _counted(b.load_plan.schemes.values()),
        "weights_bytes": b.load_plan.total_bytes,
        "kv_dtype": b.kv.name,
        "kv_bytes_per_token": sum(layout.block_bytes for layout in b.layouts) / b.config.block_size,
        "kv_scale_sources": _counted(s.source for s in b.scales.scales.values()) if scales else "none",
        "kv_scales": [line for line in scales if not line.startswith(WARNING)],
        "dtype": str(b.dtype).removeprefix("torch."),
        "device": f"{b.info.type} {b.info.name}".strip(),
        "max_model_len": b.memory.max_model_len,
        "max_num_batched_tokens": b.batched_tokens,
    }


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(names).most_common())


def _data(source: TextSource, windows: Windows, length: int, max_tokens: int) -> dict[str, Any]:
    return {
        "source": source.name, "sha256": source.sha256, "rows_given": windows.rows_given,
        "rows_used": windows.rows_used, "tokens": windows.tokens, "max_tokens": max_tokens, "window": length,
        "windows": len(windows.ids), "positions": windows.positions, "bos": windows.bos,
    }  # fmt: skip
