"""Takes other kernels than a format's own where some are installed and run here; says which, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from qengine.layers.linear import Linear
from qengine.layers.module import Leaf
from qengine.plugin import DeviceInfo, KernelScheme, LinearScheme, LinearSpec, WeightKernels
from qengine.plugin.discovery import PluginRecord, load_kernels

Found = tuple[Sequence[tuple[PluginRecord, type[WeightKernels]]], Sequence[PluginRecord]]


def prefer_kernels(
    leaves: Sequence[Leaf],
    schemes: dict[str, LinearScheme],
    formats: Sequence[str],
    info: DeviceInfo,
    dtype: torch.dtype,
    find: Callable[[str], Found] = load_kernels,
) -> tuple[list[str], list[str]]:
    """Give every linear the scheme of the first installed kernels for one of `formats` (names of weight plugins) that
    know it and run here; `schemes` (by checkpoint name) follows. Returns notes and warnings for the report. Kernels
    that do not load keep nothing from running.
    """
    notes, warnings = [], []
    for name in formats:
        good, bad = find(name)
        warnings += [f"kernels of {r.origin} for {name} are not used: they do not load: {r.error}" for r in bad]
        for record, kernels in good:
            trial = Trial(kernels, info, dtype)
            for leaf in leaves:
                if isinstance(leaf, Linear):
                    pairs = zip(leaf.schemes, leaf.specs, strict=True)
                    leaf.schemes = [trial.chosen(scheme, spec) for scheme, spec in pairs]
            schemes |= trial.taken
            label = f"{kernels.name} ({record.origin})"
            if trial.failed:
                warnings.append(f"kernels of {label} for {name} fail and are asked no more: {trial.failed}")
            notes.append(trial.note(label))
    return notes, warnings


class Trial:
    """Asks one package's kernels about linears. `taken`: what they run, by checkpoint name; `refused`, `unknown`: why
    the first of the others is left; `failed`: what they raised."""

    def __init__(self, kernels: type[WeightKernels], info: DeviceInfo, dtype: torch.dtype) -> None:
        self.kernels, self.info, self.dtype = kernels, info, dtype
        self.taken: dict[str, LinearScheme] = {}
        self.refused = self.unknown = self.failed = ""

    @cached_property
    def own(self) -> WeightKernels:
        return self.kernels()

    def chosen(self, scheme: LinearScheme, spec: LinearSpec) -> LinearScheme:
        """The scheme to run a linear by. Where kernels of a greater priority run it already, it stays."""
        if isinstance(scheme, KernelScheme) or self.failed:
            return scheme
        try:
            other = self.own.scheme(scheme, spec)
            answer = None if other is None else other.capability(self.info, self.dtype)
        except Exception as e:  # they are an extra: the format's own kernels do
            self.failed = f"{type(e).__name__}: {e}"
            return scheme
        if other is None or answer is None:
            self.unknown = self.unknown or f"not made for {scheme.format} (first in {spec.name})"
            return scheme
        if not answer:
            self.refused = self.refused or answer.reason
            return scheme
        self.taken[spec.name] = other
        return other

    def note(self, label: str) -> str:
        if self.taken:
            return f"{len(self.taken)} linears run on the kernels of {label}"
        return f"Kernels of {label} are not used: {self.failed or self.refused or self.unknown or 'others come first'}"
