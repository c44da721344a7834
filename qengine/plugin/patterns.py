"""Regular expressions that come with a checkpoint.

Whoever wrote the file chose them, and a short pattern can take longer than anyone lives on a name of ordinary length.
So every pattern has a budget of time for all the names that it is matched against; one that has used it up is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

SECONDS = 2.0
"""A pattern's time for all names of a model. What people write needs microseconds for a name."""


class NamePattern:
    """A pattern out of a config, matched against module names from their beginning on, as `re.match` does.

    `where` is the config's field, for messages ("config_groups.group_0.targets"), `shown` the entry as it stands there,
    where that is more than the pattern ("re:.*q_proj").
    """

    def __init__(self, where: str, text: str, shown: str | None = None) -> None:
        """Raises ValueError naming field and entry when `text` is no regular expression."""
        self.where, self.shown = where, text if shown is None else shown
        self._left = SECONDS
        try:
            self._pattern = regex.compile(text, regex.VERSION0)
        except (regex.error, RecursionError, OverflowError) as e:
            raise ValueError(f"{where} {_short(self.shown)} is no regular expression: {e}") from e

    def matches(self, name: str) -> bool:
        """Raises ValueError naming field and entry once the pattern has used up its time."""
        if self._left > 0:
            start = time.thread_time()
            try:
                return self._pattern.match(name, timeout=self._left) is not None
            except TimeoutError:
                self._left = 0.0
            finally:
                self._left -= time.thread_time() - start
        raise ValueError(
            f"{self.where} {_short(self.shown)} takes more than {SECONDS:g} seconds to match module names: its nested "
            "repeats can be read in endlessly many ways; need: a pattern without them, or the names themselves"
        )


@dataclass(frozen=True)
class NameRule:
    """One entry of a config's `dynamic`: it is about the modules whose full name `pattern` matches from its start on.
    `settings` None: those are not quantised."""

    text: str
    pattern: NamePattern
    settings: Mapping[str, Any] | None


def read_dynamic(
    dynamic: Any, read_settings: Callable[[Mapping[str, Any], str], Mapping[str, Any]]
) -> tuple[NameRule, ...]:
    """The rules of `dynamic` in file order, of which the first that matches counts. A pattern with "-:" takes modules
    out, one with "+:" or neither overrides settings: `read_settings` gets those and the words to begin a message with.

    Raises ValueError naming the entry.
    """
    if not dynamic:
        return ()
    if not isinstance(dynamic, Mapping):
        raise ValueError(f"dynamic {dynamic!r} makes no sense; need: an object of patterns")
    rules = []
    for text, value in dynamic.items():
        pattern = NamePattern("dynamic", text.removeprefix("-:").removeprefix("+:"), text)
        if text.startswith("-:"):
            rules.append(NameRule(text, pattern, None))
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"dynamic {text!r} is {value!r}; need: an object of settings")
        rules.append(NameRule(text, pattern, read_settings(value, f"dynamic {text!r}: ")))
    return tuple(rules)


def _short(text: str) -> str:
    text = repr(text)
    return text if len(text) <= 200 else text[:197] + "..."
