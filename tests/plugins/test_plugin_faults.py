"""An exception from a plugin's code is told apart from our own, and names the plugin, the place and the cause."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from qengine.cli import commands as command
from qengine.plugin import faults
from qengine.plugin.discovery import PluginRecord

RECORDS = [
    PluginRecord("weight", "foo", "qengine-foo", "0.3", "qengine_foo.format:Foo"),
    PluginRecord("weight", "awq", "qengine-llm", "0.1", "qengine_awq.backend:AwqQuant"),
]
SOURCE = "import json\n\ndef bind(text):\n    return json.loads(text)\n"


def function_of(module: str) -> Callable[[str], object]:
    """`bind` of SOURCE, as code of a module of that name."""
    made = types.ModuleType(module)
    exec(compile(SOURCE, f"/site/{module.replace('.', '/')}.py", "exec"), made.__dict__)
    found: Callable[[str], object] = made.bind
    return found


def raised(run: Callable[[str], object]) -> Exception:
    with pytest.raises(ValueError) as caught:
        run("{")
    return caught.value


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "list_plugins", lambda: RECORDS)


def test_the_plugin_the_place_and_the_cause_are_named() -> None:
    fault = faults.plugin_fault(raised(function_of("qengine_foo.deep.kernels")))
    said = "plugin 'foo' of qengine-foo 0.3 fails in bind (kernels.py:4): JSONDecodeError: Expecting property name"
    assert fault is not None and str(fault).startswith(said)
    assert str(fault).endswith("what would work: `qengine plugins check foo` tries it alone")


@pytest.mark.parametrize("module", ["qengine_awq.backend", "qengine.runtime.loader", "json", "qengine_food"])
def test_nobody_else_is_blamed(module: str) -> None:
    assert faults.plugin_fault(raised(function_of(module))) is None


def test_the_command_shows_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.plugins, "run", lambda args: function_of("qengine_foo.format")("{"))
    assert command.run_command(["plugins"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("qengine: error: plugin 'foo' of qengine-foo 0.3 fails in bind") and err.count("\n") == 1
    with pytest.raises(ValueError):
        command.run_command(["plugins", "--debug"])
    monkeypatch.setattr(command.plugins, "run", lambda args: function_of("qengine.cli.plugins")("{"))
    with pytest.raises(ValueError):
        command.run_command(["plugins"])
