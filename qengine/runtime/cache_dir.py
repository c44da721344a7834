"""The user's cache, and how a folder gets into it: all or nothing, by one process at a time."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from qengine.errors import UserError

VARIABLE = "QENGINE_CACHE"
"""Environment variable that names another cache folder; read here only."""


NO_SPACE = "No space left on device"


def cache_root() -> Path:
    """The cache folder: $QENGINE_CACHE, else the platform's place for caches."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().resolve() if named else platformdirs.user_cache_path("qengine")


def short_name(folder: Path) -> str:
    """A name for what is made from `folder`: its own; for a hub snapshot, whose folder is named by a commit, the
    repository's."""
    name = folder.parents[1].name if folder.parent.name == "snapshots" else folder.resolve().name
    return name.removeprefix("models--").replace("--", "_")


def no_space(error: BaseException) -> bool:
    """Whether a full disk is behind it; writers of other languages say so in words only."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or NO_SPACE in str(error)


ELSEWHERE = f"another folder in ${VARIABLE}"


def _full(target: Path, elsewhere: str) -> UserError:
    free = shutil.disk_usage(target.parent).free
    return UserError(
        f"no space is left for {target}", have=f"{free / 2**20:.0f} MiB free",
        hint=f"room there, or {elsewhere}",
    )  # fmt: skip


@contextmanager
def _held(path: Path, doing: str, say: Callable[[str], None], wait: float, elsewhere: str) -> Iterator[None]:
    """While the block runs, the lock file `path` is held; then it is removed. `doing`: what another process that has it
    is about, which is said before it is waited for. Raises UserError after `wait` seconds, or where the file cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        if not _taken(lock, path, 0):
            say(f"another process is {doing}: waiting for it")
            if not _taken(lock, path, wait):
                raise UserError(f"another process has been {doing} for {wait:.0f} s", hint="wait for it")
    except OSError as e:
        raise UserError(f"the folder {path.parent} cannot be written: {e}", hint=elsewhere) from e
    try:
        yield
    finally:
        with suppress(OSError):  # a system that removes no open file keeps it
            path.unlink()
        lock.release()


def _taken(lock: FileLock, path: Path, wait: float) -> bool:
    """Whether `lock` was had within `wait` seconds, on the file that `path` still names.

    Its last holder may have removed the file between our opening and our locking it, and a third process may hold a new
    one. A file that we have open beside the lock tells: its number is not given to another one, so where `path` names
    it before and after, it was this file that was locked."""
    end = time.monotonic() + wait
    while True:
        with path.open("ab") as seen:
            try:
                lock.acquire(timeout=max(0.0, end - time.monotonic()))
            except Timeout:
                return False
            try:
                if os.path.samestat(os.fstat(seen.fileno()), path.stat()):
                    return True
            except FileNotFoundError:
                pass
        lock.release()


@contextmanager
def only_one(folder: Path, say: Callable[[str], None], *, wait: float = 1800.0) -> Iterator[None]:
    """While the block runs, no other process is in such a block for this folder, in which nothing appears: the lock
    lies in the cache. That another process is waited for is said. Raises UserError after `wait` seconds, or where the
    cache cannot be written."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    with _held(cache_root() / "locks" / f"{name}.lock", f"at work in {folder}", say, wait, ELSEWHERE):
        yield


@contextmanager
def building(
    target: Path, say: Callable[[str], None] = lambda line: None, *, wait: float = 1800.0, elsewhere: str = ELSEWHERE
) -> Iterator[Path | None]:
    """Hold the lock on `target` and yield an empty folder beside it that becomes `target` when the block ends well.

    Yields None when another process finished `target` meanwhile; that it is waited for is said first. When the block
    raises (Ctrl-C included) the folder is removed and nothing is left, the lock included. Folders and locks that a
    killed process left behind are removed by the next one. Raises UserError when the lock is not free within `wait`
    seconds, or the folder cannot be written or its disk is full; `elsewhere` is what would work then.
    """
    with _held(target.with_name(target.name + ".lock"), f"making {target}", say, wait, elsewhere):
        if target.is_dir():
            yield None
            return
        prefix = f".{target.name}.partial-"
        for leftover in target.parent.glob(prefix + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            yield partial
            partial.chmod(0o755)
            partial.rename(target)
        except Exception as e:
            if no_space(e):
                raise _full(target, elsewhere) from e
            raise
        finally:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
