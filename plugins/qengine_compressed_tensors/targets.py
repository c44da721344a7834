"""Which group of the config speaks about a linear module.

Order as in compressed-tensors: exact names, then `re:` patterns (anchored at the start only, in alphabetical order),
then class names. Every linear counts as class Linear.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from qengine_compressed_tensors.config import Group

LINEAR_CLASSES = ("Linear", "LinearBase", "Module")
"""The class names that a linear module answers to: its own, vLLM's and torch's base class."""


@functools.lru_cache(maxsize=1024)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def names_module(target: str, module: str) -> bool:
    """Whether a target is this module's exact name or a pattern that matches it."""
    if target.startswith("re:"):
        return _pattern(target.removeprefix("re:")).match(module) is not None
    return target == module


def is_ignored(module: str, ignore: Iterable[str]) -> bool:
    return any(names_module(entry, module) or entry in LINEAR_CLASSES for entry in ignore)


def matching_groups(module: str, groups: Sequence[Group]) -> list[Group]:
    """The groups whose targets match, the most specific first. Of equal targets in two groups the last one counts
    first, as it does for the writer."""
    by_target: dict[str, list[Group]] = {}
    for group in groups:
        for target in group.targets:
            by_target.setdefault(target, []).insert(0, group)
    ordered = sorted(by_target, key=lambda target: ("re:" in target, target))
    matched = [t for t in ordered if names_module(t, module)]
    matched += [t for t in ordered if t in LINEAR_CLASSES and t not in matched]
    found: list[Group] = []
    for target in matched:
        found += [group for group in by_target[target] if group not in found]
    return found
