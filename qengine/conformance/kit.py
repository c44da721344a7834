"""What a check is, and running checks one after the other."""

from __future__ import annotations

import time
import traceback as tracebacks
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

State = Literal["passed", "failed", "not applicable"]
Run = TypeVar("Run", bound=Callable[[Any], str | None])


class CheckFailed(AssertionError):
    """The plugin does not keep the contract; the message says what was found and what is needed."""


class NotApplicable(Exception):
    """This check has nothing to say about this plugin here; the message says why."""


@dataclass(frozen=True)
class Check:
    """One property that every plugin of a kind has. `what` says it in a line; `run` raises CheckFailed, or returns
    what it had to leave out, if anything."""

    name: str
    what: str
    run: Callable[[Any], str | None]
    gpu: bool = False
    """Only on a real GPU."""


@dataclass(frozen=True)
class Outcome:
    """`line` is the first line of a failure, why a check does not apply, or what one that passed left out; `traceback`
    that of a failure."""

    name: str
    what: str
    state: State
    line: str = ""
    traceback: str | None = None
    seconds: float = 0.0


class Registry(list[Check]):
    """The checks of one kind, in the order in which they are told to authors."""

    def add(self, name: str, *, gpu: bool = False) -> Callable[[Run], Run]:
        """Register a function under `name`; the first line of its docstring is what is shown."""

        def register(run: Run) -> Run:
            what = (run.__doc__ or "").strip().splitlines()[0].rstrip(".")
            self.append(Check(name, what, run, gpu))
            return run

        return register


def run_check(check: Check, subject: Any) -> Outcome:
    """A check that ends with any other exception has failed too: the plugin raised it."""
    begin = time.perf_counter()
    state: State = "passed"
    line, trace = "", None
    try:
        line = check.run(subject) or ""
    except NotApplicable as e:
        state, line = "not applicable", str(e)
    except Exception as e:
        state, trace = "failed", tracebacks.format_exc()
        first = (str(e).strip().splitlines() or [""])[0]
        line = first if isinstance(e, CheckFailed) else f"{type(e).__name__}: {first}"
    return Outcome(check.name, check.what, state, line, trace, time.perf_counter() - begin)


def run_checks(checks: Iterable[Check], subject: Any, *, gpu: bool = False) -> Iterator[Outcome]:
    """The outcomes, one by one; checks that need a GPU are left out without `gpu`."""
    for check in checks:
        if gpu or not check.gpu:
            yield run_check(check, subject)


def need(condition: bool, message: str) -> None:
    """Raise CheckFailed unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)
