"""Balances what a model needs against what a checkpoint holds, both ways, on headers alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo, TensorNeed

HARMLESS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    (r"(^|\.)rotary_emb\.inv_freq$", (1,), "rotary frequencies, computed from the config"),
    (r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias)$", (0, 4), "causal mask buffers"),
)
"""Extra tensors of known meaning that no model here reads: (pattern of the name, numbers of dimensions, meaning)."""

LISTED = 10
"""Names that a message lists before it counts the rest."""


@dataclass
class Balance:
    """`take` are the tensors to read for each need that the checkpoint meets; `extra` those nothing asked for.

    `missing` names needs without a tensor, `wrong` says of tensors that do not fit what is there and what is needed.
    """

    take: set[str] = field(default_factory=set)
    extra: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)

    def error(self) -> CheckpointError | None:
        """Missing tensors (the first ten and the count), else wrong ones (have / need)."""
        if self.missing:
            text = _missing_text(self.missing, self.untouched)
            return CheckpointError(text, hint=_missing_hint(self.missing, self.untouched))
        if self.wrong:
            return CheckpointError(f"{len(self.wrong)} tensor(s) do not fit the model: {first_names(self.wrong)}")
        return None


def first_names(names: Collection[str], limit: int = LISTED, between: str = ", ") -> str:
    """The first names and the number of the others."""
    shown = between.join(list(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def balance(
    needs: Iterable[tuple[str, TensorNeed]],
    provided: Mapping[str, TensorInfo],
    consumed: Collection[str] = (),
) -> Balance:
    """`compare`, raising CheckpointError for what is missing or wrong."""
    books = compare(needs, provided, consumed)
    if error := books.error():
        raise error
    return books


def compare(
    needs: Iterable[tuple[str, TensorNeed]],
    provided: Mapping[str, TensorInfo],
    consumed: Collection[str] = (),
) -> Balance:
    """Every need must be met by a tensor of the right shape and dtype; every tensor must be needed, `consumed` by
    somebody else (KV scales) or known to be harmless, else it is `extra`."""
    result = Balance()
    missing: dict[str, None] = {}  # in order, each once, as a tied tensor is needed twice
    wrong: dict[str, None] = {}
    for name, need in needs:
        info = provided.get(name)
        if info is None:
            if need.required:
                missing[name] = None
            continue
        result.take.add(name)
        if problem := _mismatch(info, need):
            wrong[f"{name}: {problem}"] = None
    result.missing, result.wrong = list(missing), list(wrong)
    result.untouched = [n for n in provided if n not in result.take and n not in consumed]
    for name in result.untouched:
        meaning = _harmless(provided[name])
        if meaning is None:
            result.extra.append(name)
        elif (note := f"ignored: {meaning}") not in result.notes:
            result.notes.append(note)
    return result


def _harmless(info: TensorInfo) -> str | None:
    for pattern, dims, meaning in HARMLESS:
        if len(info.shape) in dims and re.search(pattern, info.name):
            return meaning
    return None


def _mismatch(info: TensorInfo, need: TensorNeed) -> str | None:
    fits = len(info.shape) == len(need.shape) and all(
        want is None or have == want for have, want in zip(info.shape, need.shape, strict=True)
    )
    if fits and info.dtype in need.dtypes:
        return None
    want = "x".join("any" if n is None else str(n) for n in need.shape) or "scalar"
    have = "x".join(map(str, info.shape)) or "scalar"
    return f"have {info.dtype} {have}, need {' or '.join(need.dtypes)} {want}"


def _missing_text(missing: list[str], untouched: list[str]) -> str:
    text = f"{len(missing)} tensor(s) that the model needs are not in the checkpoint: {first_names(missing)}"
    if untouched:
        text += f"; it holds {len(untouched)} that nothing needs: {first_names(untouched, 3)}"
    return text


def _missing_hint(missing: list[str], untouched: list[str]) -> str:
    """What most likely happened, judged by what is there instead."""
    modules = {name.rpartition(".")[0] for name in missing}
    instead = [n for n in untouched if n.rpartition(".")[0] in modules]
    if any(n.endswith((".qweight", ".weight_packed", ".weight_scale")) for n in instead):
        return (
            "these modules are stored quantised: --quantization NAME, if config.json does not name the format; "
            "embeddings are read unquantised only"
        )
    return "an unfinished download, or a config.json of another model"
