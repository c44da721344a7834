"""compressed-tensors: which scheme each linear of a checkpoint has.

The tensors decide, the config is a cross-check: whether a module is quantised is what the file holds for it; how it is
quantised is what a group of the config says, provided that the headers agree.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qengine.plugin import (
    LinearScheme,
    LinearSpec,
    RandomTensors,
    TensorInfo,
    WeightQuant,
    WeightSample,
    dummy_samples,
    headers_of,
)
from qengine_compressed_tensors.arguments import Args
from qengine_compressed_tensors.config import Config, Group, read_config
from qengine_compressed_tensors.dummy import dummy_tensors, sample_configs
from qengine_compressed_tensors.fp8 import Fp8Scheme
from qengine_compressed_tensors.headers import (
    FORMAT_KIND,
    Kind,
    check_kind,
    fp8_format,
    int_format,
    is_marked,
    static_scale_shape,
    stored_kind,
)
from qengine_compressed_tensors.int8 import Int8Scheme
from qengine_compressed_tensors.integers import IntFormat
from qengine_compressed_tensors.layout import Packing
from qengine_compressed_tensors.targets import is_ignored, matching_groups, names_module
from qengine_compressed_tensors.weight_only import WeightOnlyInt

log = logging.getLogger("qengine.compressed_tensors")

DENSE_PACKING = (0, 17)
"""The first version whose packing leaves no unused bits."""


class CompressedTensorsQuant(WeightQuant):
    """Reads what llm-compressor and other users of compressed-tensors write."""

    name = "compressed-tensors"
    contract = 1
    methods = ("compressed-tensors", "compressed_tensors")

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> CompressedTensorsQuant:
        return cls(read_config(config))

    @property
    def likely_packing(self) -> Packing:
        """The packing of files in which a width fits both."""
        return "padded" if self.config.version and self.config.version < DENSE_PACKING else "dense"

    @classmethod
    def with_kv_scales(cls, config: Mapping[str, Any] | None, granularity: str) -> dict[str, Any] | None:
        strategies = {"tensor": "tensor", "head": "attn_head"}
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        return {**(config or {}), "kv_cache_scheme": {**scheme, "strategy": strategies[granularity]}}

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        kind = stored_kind(tensors)
        matched = matching_groups(spec.name, self.config.groups)
        if kind is None and not ("weight" not in tensors and is_marked(tensors)):
            self._warn_if_named(spec.name, tensors)
            return None
        notes: list[str] = []
        if is_ignored(spec.name, self.config.ignore):
            notes.append("in the config's ignore list, but the file holds it quantised: the file counts")
        if not matched:
            matched = list(self.config.groups)
            notes.append("no target of the config matches, but the file holds it quantised: the file counts")
        if not matched:
            have = ", ".join(sorted(tensors))
            raise ValueError(f"the file holds it quantised ({have}), but the config has no config_groups for it")
        return self._first_that_fits(matched, kind, spec, tensors, notes)

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        matched = matching_groups(spec.name, self.config.groups)
        if not matched or is_ignored(spec.name, self.config.ignore):
            return None
        scheme, _ = self._scheme(matched[0], nominal_kind(matched[0]), spec, {})
        return headers_of(scheme, spec)

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        scheme = self.scheme_for(spec, tensors)
        integers = scheme.stored if isinstance(scheme, WeightOnlyInt | Int8Scheme) else None
        return dummy_tensors(spec, tensors, integers, random)

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        return dummy_samples(cls, sample_configs())

    def _warn_if_named(self, module: str, tensors: Mapping[str, TensorInfo]) -> None:
        """A dense module that a target names. Class names say little: a tied head is an embedding, for one."""
        if "weight" not in tensors or is_ignored(module, self.config.ignore):
            return
        named = next((g.name for g in self.config.groups if any(names_module(t, module) for t in g.targets)), None)
        if named is not None:
            log.warning("%s is a target of %s, but the file holds it dense: the file counts", module, named)

    def _first_that_fits(
        self,
        groups: Sequence[Group],
        kind: Kind | None,
        spec: LinearSpec,
        tensors: Mapping[str, TensorInfo],
        notes: list[str],
    ) -> LinearScheme:
        """Of several groups that match a module, the most specific one that agrees with the headers."""
        errors: list[ValueError] = []
        for group in groups:
            try:
                scheme, more = self._scheme(group, kind or nominal_kind(group), spec, tensors)
            except ValueError as e:
                errors.append(e)
                continue
            if errors:
                more = [f"{groups[0].name} does not fit the file: {group.name} is taken", *more]
            scheme.notes = (*notes, *more)
            return scheme
        raise errors[0]

    def _scheme(
        self, group: Group, kind: Kind, spec: LinearSpec, tensors: Mapping[str, TensorInfo]
    ) -> tuple[LinearScheme, list[str]]:
        notes = check_kind(kind, group)
        if kind == "fp8":
            fp8, more = fp8_format(group, spec, tensors)
            return Fp8Scheme(fp8), notes + more
        stored, more = int_format(kind, group, spec, tensors, self.likely_packing)
        notes += more
        if group.inputs is None:
            return WeightOnlyInt(stored, unused_inputs(tensors)), notes
        if runs_in_int8(stored, group.inputs):
            static = None if group.inputs.dynamic else static_scale_shape(group, tensors)
            return Int8Scheme(stored, static), notes
        notes.append(f"activations are kept in 16 bits or more, where the config asks for {group.inputs}")
        return WeightOnlyInt(stored, unused_inputs(tensors)), notes


def nominal_kind(group: Group) -> Kind:
    """What a module should hold whose weight is missing from the file; the accounting then names it."""
    assert group.weights is not None
    kinds = FORMAT_KIND.get(group.format)
    if kinds is not None and len(kinds) == 1:
        return kinds[0]
    if group.weights.type == "float":
        return "fp8"
    return "int8" if kinds is not None else "packed"


def unused_inputs(tensors: Mapping[str, TensorInfo]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Activation scales that nothing here needs."""
    leaves = ("input_scale", "input_zero_point")
    return tuple((leaf, tensors[leaf].shape) for leaf in leaves if leaf in tensors)


def runs_in_int8(stored: IntFormat, inputs: Args) -> bool:
    """Whether both sides of the product can be int8: one scale an output row, and symmetric activations with a scale a
    row or a stored one."""
    weights = stored.bits == 8 and stored.group_size == -1 and stored.zeros is None and not stored.reordered
    rows = inputs.strategy in ("token", "tensor") if inputs.dynamic else inputs.strategy == "tensor"
    return weights and inputs.type == "int" and inputs.bits == 8 and inputs.symmetric and rows
