"""Which plugins are installed is read once, and again when something was installed or removed meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from qengine.errors import PluginError
from qengine.plugin.discovery import find_plugin, list_plugins


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the metadata of everything installed has been read."""
    real, found = metadata.entry_points, []
    monkeypatch.setattr(metadata, "entry_points", lambda **k: found.append(k) or real(**k))
    return lambda: len(found)


def install(site: Path, name: str) -> Path:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[qengine.kv_dtype]\n{name} = nowhere:X\n")
    return folder


def test_read_once_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Callable[[], int]
) -> None:
    install(tmp_path, "here-first")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_plugin("kv", "here-first").origin == "here-first 1.0"
    before = reads()
    assert {r.kind for r in list_plugins()} >= {"weight", "kv"} and find_plugin("weight", "awq").name == "awq"
    assert reads() == before > 0

    later = install(tmp_path, "came-later")
    assert find_plugin("kv", "came-later").origin == "came-later 1.0"
    shutil.rmtree(later)
    with pytest.raises(PluginError, match="no plugin named 'came-later'"):
        find_plugin("kv", "came-later")


def test_what_is_listed_is_the_callers() -> None:
    list_plugins("weight").clear()
    assert find_plugin("weight", "awq").name == "awq"
