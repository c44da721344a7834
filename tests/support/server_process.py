"""A qengine server in a process of its own, as a test's tool: on a free port, and always stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

REAL = "qengine.server.engine_process:build_engine"
FAKE = "fake_engine:build"

_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.server.config import ServerConfig
from qengine.server.run import serve
engine, server, factory = json.loads(sys.argv[2])
try:
    server = {k: tuple(v) if isinstance(v, list) else v for k, v in server.items()}
    sys.exit(serve(EngineConfig(**engine), ServerConfig(**server), factory=factory))
except UserError as e:
    print(f"qengine: error: {e}", file=sys.stderr)
    sys.exit(2)
"""


class ServerProcess:
    """`url` is known once `wait_ready` has returned; `output` collects what the process printed."""

    def __init__(self, folder: Path, factory: str, engine: dict[str, Any], server: dict[str, Any]) -> None:
        configs = json.dumps([{"model": str(folder), **engine}, {"port": 0, **server}, factory])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(sys.path), configs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.output: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"serves .* at (http://\S+)/v1", line):
                self.url = found.group(1)

    @property
    def text(self) -> str:
        return "".join(self.output)

    def wait_ready(self, timeout: float = 120) -> None:
        until(lambda: self.url or self.process.poll() is not None, timeout)
        assert self.url, f"the server did not start:\n{self.text}"

    def engine_pid(self) -> int:
        """The child that runs the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(c) for c in children if b"engine_process" in Path(f"/proc/{c}/cmdline").read_bytes())

    def stop(self, timeout: float = 40) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 40) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith((f"qengine:{name}{{", f"qengine:{name} ")) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name} {labels}")


@contextlib.contextmanager
def running(
    folder: Path, factory: str = FAKE, *, engine: dict[str, Any] | None = None, **server: Any
) -> Iterator[ServerProcess]:
    """A server that is ready. `engine` and `server` are fields of the two configs."""
    made = ServerProcess(folder, factory, engine or {}, server)
    try:
        made.wait_ready()
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.wait()


def until(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    """Poll until the condition holds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
