"""Ctrl-C between an engine's steps instead of within one, where it would leave the scheduler's books half written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """Context manager: SIGINT waits until `check` is called or the context ends; then its former handler is called,
    which as a rule raises KeyboardInterrupt. A second SIGINT while one waits goes through at once.

    Does nothing outside the main thread, where no signal arrives, and where SIGINT has no Python handler.
    """

    def __init__(self) -> None:
        self._former: object = None
        self._frame: FrameType | None = None
        self._waits = False

    def __enter__(self) -> HeldInterrupt:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._former = signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._former):
            signal.signal(signal.SIGINT, self._former)
        if error is None:
            self.check()

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if self._waits:
            self.check()
        self._waits, self._frame = True, frame

    def check(self) -> None:
        """Let a SIGINT that waits through."""
        if self._waits and callable(self._former):
            self._waits = False
            self._former(signal.SIGINT, self._frame)
