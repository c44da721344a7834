"""Takes other kernels than a format's own where some are installed and run here; says which, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
            trial = Trial(kernels(), info, dtype)
            for leaf in leaves:
                if isinstance(leaf, Linear):
                    pairs = zip(leaf.schemes, leaf.specs, strict=True)
                    leaf.schemes = [trial.chosen(scheme, spec) for scheme, spec in pairs]
            schemes |= trial.taken
            notes.append(trial.note(f"{kernels.name} ({record.origin})"))
    return notes, warnings


class Trial:
    """Asks one package's kernels about linears. `taken`: what they run, by checkpoint name; `refused`, `unknown`: why
    the first of the others is left."""

    def __init__(self, kernels: WeightKernels, info: DeviceInfo, dtype: torch.dtype) -> None:
        self.kernels, self.info, self.dtype = kernels, info, dtype
        self.taken: dict[str, LinearScheme] = {}
        self.refused = self.unknown = ""

    def chosen(self, scheme: LinearScheme, spec: LinearSpec) -> LinearScheme:
        """The scheme to run a linear by. Where kernels of a greater priority run it already, it stays."""
        if isinstance(scheme, KernelScheme):
            return scheme
        other = self.kernels.scheme(scheme, spec)
        if other is None:
            self.unknown = self.unknown or f"not made for {scheme.format} (first in {spec.name})"
            return scheme
        answer = other.capability(self.info, self.dtype)
        if not answer:
            self.refused = self.refused or answer.reason
            return scheme
        self.taken[spec.name] = other
        return other

    def note(self, label: str) -> str:
        if self.taken:
            return f"{len(self.taken)} linears run on the kernels of {label}"
        return f"Kernels of {label} are not used: {self.refused or self.unknown or 'others come first'}"
