"""Really installed throw-away distributions (good, broken, clashing, old): what the list says and who fails (C26)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from plugin_site import pip_install, qengine, write_project
from qengine.cli.main import main
from qengine.errors import PluginError
from qengine.plugin.discovery import load_plugin

GOOD = """
from qengine.plugin import WeightQuant

class Good(WeightQuant):
    name = "good"
    contract = 1

    @classmethod
    def parse(cls, config):
        return cls()

    def scheme_for(self, spec, tensors):
        return None
"""
SOURCES = {
    "good": ("good = good_plugin:Good", GOOD),
    "broken": ("broken = broken_plugin:Broken", "import a_library_that_is_not_there\n"),
    "newer": ("newer = newer_plugin:Good", GOOD.replace("contract = 1", 'contract = "1.99"')),
    "chained": (
        "chained = chained_plugin:X",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('set-up failed') from e\n",
    ),
    "exiting": ("exiting = exiting_plugin:X", "raise SystemExit(3)\n"),
    "clash": ("awq = clash_plugin:Good", GOOD),
    "old": ("old = old_plugin:Good", GOOD.replace("contract = 1", "contract = 0")),
    "silent": ("silent = silent_plugin:Good", GOOD.replace("    contract = 1\n", "")),
    "odd": ("odd = odd_plugin:Odd", "class Odd:\n    contract = 1\n"),
}
OWNERS = {"good": "qengine-good", "clash": "qengine-clash"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed three distributions: one of a good plugin, one that registers a built-in's
    name, and one of all that is wrong in another way."""
    folder = tmp_path_factory.mktemp("plugins")
    by_owner: dict[str, dict[str, str]] = {}
    for name, (entry, source) in SOURCES.items():
        by_owner.setdefault(OWNERS.get(name, "qengine-wrong"), {})[entry] = source
    projects = [write_project(folder / o, o, "qengine.weight_quant", sources) for o, sources in by_owner.items()]
    pip_install(folder / "site", projects)
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees them too; what it has imported of them is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(site)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("_plugin"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def records(site: Path) -> dict[tuple[str, str], dict[str, str]]:
    """What the command says in a process of its own."""
    done = qengine(site, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    return {(r["name"], r["distribution"]): r for r in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("name", "state", "error"),
    [
        ("good", "ok", None),
        ("broken", "broken", "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"),
        ("chained", "broken", "ZeroDivisionError: division by zero"),
        ("exiting", "broken", "SystemExit: 3"),
        ("old", "other contract", "have: contract 0.0; need: contract 1.0"),
        ("newer", "other contract", "have: contract 1.99; need: contract 1.0"),
        ("silent", "other contract", "have: no `contract` attribute; need: contract 1.0"),
        ("odd", "broken", "is not a WeightQuant"),
    ],
)
def test_list_shows_state_version_and_cause(
    records: dict[tuple[str, str], dict[str, str]], name: str, state: str, error: str | None
) -> None:
    record = records[name, OWNERS.get(name, "qengine-wrong")]
    assert (record["state"], record["version"]) == (state, "2.5")
    assert error in record["error"] if error else record["error"] is None
    assert ("Traceback" in (record["traceback"] or "")) == (name in ("broken", "chained", "exiting"))


def test_list_shows_a_clash_on_both_sides(records: dict[tuple[str, str], dict[str, str]]) -> None:
    for owner in ("qengine-clash", "qengine-llm"):
        record = records["awq", owner]
        assert record["state"] == "clash"
        assert "qengine-clash 2.5" in record["error"] and "qengine-llm" in record["error"]


@pytest.mark.usefixtures("installed")
def test_table_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--verbose"]) == 0
    text = capsys.readouterr().out
    header, *rows = text.splitlines()
    assert header.split() == ["kind", "name", "state", "contract", "distribution", "version", "class"]
    broken = ["weight", "broken", "broken", "-", "qengine-wrong", "2.5", "broken_plugin:Broken"]
    assert broken in [row.split() for row in rows]
    assert "Traceback" in text


def test_listing_without_loading_runs_no_plugin(site: Path) -> None:
    rows = qengine(site, "plugins", "--no-load", "--verbose").stdout
    assert "not loaded" in rows
    assert [s for s in ("Traceback", "other contract", "a_library_that_is_not_there") if s in rows] == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("good", ["class Good"]),
        ("broken", ["error", "'broken' of qengine-wrong 2.5", "No module named 'a_library_that_is_not_there'"]),
        ("nope", ["error", "no plugin named 'nope'", "broken | chained", "dense", "good"]),
        ("old", ["error", "another plugin contract", "have: contract 0", "need: contract 1.0", "qengine-wrong"]),
        ("awq", ["error", "registered twice", "qengine-clash 2.5 (clash_plugin:Good)", "qengine-llm"]),
        ("dense", ["class DenseQuant"]),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_plugin_matters_only_to_who_asks(name: str, parts: list[str]) -> None:
    assert [p for p in parts if p not in loaded("weight", name)] == []


def loaded(kind: Literal["weight"], name: str) -> str:
    """What load_plugin gives: a class name, or the error."""
    try:
        return f"class {load_plugin(kind, name).__name__}"
    except PluginError as e:
        return f"error {e}"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["broken", "nope", "awq"])
def test_serve_refuses_before_anything_is_fetched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--quant", name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qengine: error: ") and err.count("\n") == 1
