"""Which group of the config speaks about a linear module.

Order as in compressed-tensors: exact names, then `re:` patterns (anchored at the start only, in alphabetical order),
then class names. Every linear counts as class Linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qengine_compressed_tensors.config import Group, Target

LINEAR_CLASSES = ("Linear", "LinearBase", "Module")
"""The class names that a linear module answers to: its own, vLLM's and torch's base class."""


def names_module(target: Target, module: str) -> bool:
    """Whether a target is this module's exact name or a pattern that matches it."""
    return target.text == module if target.pattern is None else target.pattern.matches(module)


def is_ignored(module: str, ignore: Iterable[Target]) -> bool:
    return any(names_module(entry, module) or entry.text in LINEAR_CLASSES for entry in ignore)


def matching_groups(module: str, groups: Sequence[Group]) -> list[Group]:
    """The groups whose targets match, the most specific first. Of equal targets in two groups the last one counts
    first, as it does for the writer."""
    by_target: dict[Target, list[Group]] = {}
    for group in groups:
        for target in group.targets:
            by_target.setdefault(target, []).insert(0, group)
    ordered = sorted(by_target, key=lambda target: ("re:" in target.text, target.text))
    matched = [t for t in ordered if names_module(t, module)]
    matched += [t for t in ordered if t.text in LINEAR_CLASSES and t not in matched]
    found: list[Group] = []
    for target in matched:
        found += [group for group in by_target[target] if group not in found]
    return found
