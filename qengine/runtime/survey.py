"""Everything that headers tell about how a checkpoint fits a model: schemes, and all that keeps it from being served.

The loader raises the first problem; `qengine inspect` shows all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from qengine.errors import CheckpointError
from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.module import FLOAT_CODES, Leaf
from qengine.plugin import LinearScheme, LinearSpec, TensorInfo, WeightQuant
from qengine.runtime.accounting import Balance, compare, first_names
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.described import stays_dense
from qengine.runtime.surplus import surplus


class TensorSource(Protocol):
    """What is needed of a checkpoint; dummy weights are one too."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor: ...

    def file_position(self, name: str) -> tuple[str, int]: ...


@dataclass
class Survey:
    """`schemes` by checkpoint name; `quantised`: names of those that are not 16-bit; `refused`: why a linear
    or embedding cannot be read; `unread`: why a tensor that no module takes must not be ignored; `extra`: tensors that
    nothing uses; biases that the architecture does not have, zero or not; `surplus`: what the config does not count;
    `unquantised`: what the config calls quantised and is all stored in 16 bits, empty where it is not so."""

    schemes: dict[str, LinearScheme] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    quantised: set[str] = field(default_factory=set)
    books: Balance = field(default_factory=Balance)
    unread: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    zero_biases: list[str] = field(default_factory=list)
    odd_biases: list[str] = field(default_factory=list)
    surplus: list[CheckpointError] = field(default_factory=list)
    unquantised: str = ""

    def problems(self) -> list[CheckpointError]:
        """All that keeps the checkpoint from being served, each with its list of names."""
        out = []
        if len(self.refused) == 1:
            out += [CheckpointError(f"{name}: {reason}") for name, reason in self.refused.items()]
        elif self.refused:
            reasons = grouped(self.refused.items())
            out.append(CheckpointError(f"{len(self.refused)} modules cannot be read: {first_names(reasons, 3)}"))
        out += self.surplus  # before the books: it tells why a router's shape is wrong, too
        if error := self.books.error():
            out.append(error)
        for reason in grouped(self.unread.items(), "tensor"):
            out.append(CheckpointError(reason))
        if self.odd_biases:
            verb = "is" if len(self.odd_biases) == 1 else "are"
            out.append(
                CheckpointError(
                    f"{first_names(self.odd_biases)} {verb} not zero, but the model has no bias there",
                    hint="a config.json that fits the weights",
                )
            )
        return out

    def contradictions(self) -> list[str]:
        """Where config and headers disagree and a reading is still certain."""
        notes = grouped((name, text) for name, scheme in self.schemes.items() for text in scheme.notes)
        return [self.unquantised, *notes] if self.unquantised else notes


def survey(
    leaves: Sequence[Leaf],
    source: TensorSource,
    quant: WeightQuant | None,
    dense: WeightQuant,
    consumed: Collection[str] = (),
    about: Checkpoint | None = None,
) -> Survey:
    """Give every linear its schemes and balance all needs against the checkpoint; raises nothing for its faults.

    `quant` is asked first, then `dense`; each decides from the tensors that are there. `consumed` names tensors that
    somebody else reads (KV scales); `about` is the checkpoint whose config.json the tensors are held against.
    """
    out = Survey()
    modules = _by_module(source.tensors)
    needs: list[Leaf] = []
    taken = set(consumed)
    for leaf in leaves:
        if isinstance(leaf, Embedding) and (reason := quantised_embedding(leaf, modules.get(leaf.name, {}))):
            out.refused[leaf.name] = reason
    for leaf in leaves:
        own = _names(leaf)
        readable = not out.refused.keys() & own  # a tied head has its embedding's name
        if isinstance(leaf, Linear) and readable:
            readable = _resolved(out, leaf, modules, quant, dense)
        if readable:
            needs.append(leaf)
        else:
            taken |= {info.name for name in own for info in modules.get(name, {}).values()}
    out.books = compare((need for leaf in needs for need in leaf.needs()), source.tensors, taken)
    out.unquantised = unquantised(out, leaves, source, quant, about)
    _sort_extra(out, leaves, source, quant, about)
    return out


def _sort_extra(
    out: Survey,
    leaves: Sequence[Leaf],
    source: TensorSource,
    quant: WeightQuant | None,
    about: Checkpoint | None,
) -> None:
    """What becomes of each tensor that no module takes."""
    modules = {name for leaf in leaves for name in _names(leaf)}
    beyond = surplus(out.books.extra, source.tensors, modules, about.raw_config if about is not None else {})
    out.surplus = beyond.errors
    out.books.notes += beyond.notes
    biases = {f"{name}.bias" for name in modules}
    for name in out.books.extra:
        if name in beyond.needless:
            continue
        if name in biases:
            # Some quantisers write zero biases; anything else means that the config describes another model.
            (out.odd_biases if source.read(name).count_nonzero() else out.zero_biases).append(name)
        elif quant is not None and (reason := quant.unread(source.tensors[name])):
            out.unread[name] = reason
        else:
            out.extra.append(name)


def _names(leaf: Leaf) -> list[str]:
    """The modules of a leaf by checkpoint name."""
    return [spec.name for spec in leaf.specs] if isinstance(leaf, Linear) else [leaf.name]


def unquantised(
    found: Survey,
    leaves: Sequence[Leaf],
    source: TensorSource,
    quant: WeightQuant | None,
    about: Checkpoint | None,
) -> str:
    """The contradiction of a quantization_config over plain weights. What the tensors are is certain, so they are read
    as that. None ("") where the config itself leaves every linear in 16 bits, or is about the KV cache alone."""
    if quant is None or about is None or about.quant is None or found.quantised or found.refused:
        return ""
    tables = {leaf.name for leaf in leaves if isinstance(leaf, Embedding)}
    covered = [
        spec
        for leaf in leaves
        if isinstance(leaf, Linear)
        for spec in leaf.specs
        if not stays_dense(leaf, spec, tables) and f"{spec.name}.weight" in source.tensors and _covers(quant, spec)
    ]
    if not covered:
        return ""
    return (
        f"{about.quant.source} says {about.quant.method}, but the file holds plain 16-bit weights in all "
        f"{len(covered)} linears that it is about: they are read as that, and take 16 bits of memory each"
    )


def _covers(quant: WeightQuant, spec: LinearSpec) -> bool:
    try:
        return quant.expected(spec) is not None
    except (NotImplementedError, ValueError):
        return True  # a config that does not tell leaves nothing out


def quantised_embedding(leaf: Embedding, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why rows cannot be gathered from what the file holds under an embedding's name; None where they can, or where
    nothing is there, which is left to the accounting."""
    weight = tensors.get("weight")
    if not tensors or (weight is not None and weight.dtype in FLOAT_CODES):
        return None
    have = ", ".join(f"{name} {info.dtype} {list(info.shape)}" for name, info in sorted(tensors.items()))
    return (
        f"the file holds this embedding quantised ({have}), and embeddings are read unquantised only; need: weight "
        f"{' | '.join(FLOAT_CODES)} [{leaf.vocab_size}, {leaf.hidden_size}]; what would work: a copy of the model "
        "quantised without its embedding"
    )


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """module name -> leaf name -> tensor."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    return modules


def _resolved(
    out: Survey,
    leaf: Linear,
    modules: Mapping[str, Mapping[str, TensorInfo]],
    quant: WeightQuant | None,
    dense: WeightQuant,
) -> bool:
    """Give `leaf` its schemes; False when a module of it is refused."""
    chosen = []
    for spec in leaf.specs:
        try:
            scheme = _quantised(leaf, spec, modules.get(spec.name, {}), quant)
            if scheme is not None:
                out.quantised.add(spec.name)
            chosen.append(scheme or _dense(spec, modules.get(spec.name, {}), dense))
        except ValueError as e:
            out.refused[spec.name] = str(e)
    if len(chosen) < len(leaf.specs):
        return False
    leaf.resolve(chosen)
    out.schemes |= {spec.name: scheme for spec, scheme in zip(leaf.specs, chosen, strict=True)}
    return True


def _quantised(
    leaf: Linear, spec: LinearSpec, tensors: Mapping[str, TensorInfo], quant: WeightQuant | None
) -> LinearScheme | None:
    stays_dense = not leaf.quantizable and "weight" in tensors and tensors["weight"].dtype in FLOAT_CODES
    return None if quant is None or stays_dense else quant.scheme_for(spec, tensors)


def _dense(spec: LinearSpec, tensors: Mapping[str, TensorInfo], dense: WeightQuant) -> LinearScheme:
    scheme = dense.scheme_for(spec, tensors)
    if scheme is None:
        # The file holds nothing that anybody reads under this name: plan it as 16-bit, so that the balance
        # reports its weight as missing together with all others.
        absent = TensorInfo(f"{spec.name}.weight", "F16", (spec.out_features, spec.in_features))
        scheme = dense.scheme_for(spec, {"weight": absent})
    if scheme is None:
        raise ValueError(f"no weight format reads it; have: {', '.join(tensors) or 'no tensors'}")
    return scheme


def grouped(notes: Iterable[tuple[str, str]], what: str = "module") -> list[str]:
    """One line for each text of (name, text), with the names that it is about."""
    names: dict[str, list[str]] = {}
    for name, text in notes:
        names.setdefault(text, []).append(name)
    return [
        f"{text} ({len(own)} {what}{'s' * (len(own) > 1)}: {first_names(own, 3)})" for text, own in names.items()
    ]
