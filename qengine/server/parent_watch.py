"""The engine process's side of its parent's life: terminal signals are the parent's business, its end is ours."""

from __future__ import annotations

import os
import shutil
import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLEAN_UP_S = 4.0
"""How long a build that is given up may take to remove what it has half made."""


class ParentWatch:
    """Made first thing in the engine process. The parent starts it with SIGTERM and SIGINT blocked, so that none of
    them comes before `handle` is in place.

    The parent is gone, or wants the process gone, when standard input ends. While the engine is built this raises
    KeyboardInterrupt in the main thread, once: half-made folders in the user's cache are removed on its way out. Later
    there is nothing to clean up, and the process ends at once.
    """

    def __init__(self, folder: str) -> None:
        """`folder` holds the sockets and is removed at the end; the parent does that unless it was killed."""
        self.building = True
        self._folder = folder
        self._gone = False
        for signum in SIGNALS:
            # a handler, not SIG_IGN: programs started from here (pip) shall still end at Ctrl-C
            signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def start(self) -> None:
        """Watch standard input from now on."""
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self, code: int) -> None:
        """End the process: threads of compute libraries must not hold it up."""
        if self._gone:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(code)

    def _handle(self, *_: object) -> None:
        if self._gone and self.building:
            self.building = False
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while os.read(0, 4096):
            pass
        self._gone = True
        if self.building:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(CLEAN_UP_S)
        self.leave(1)
