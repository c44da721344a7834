"""qengine.plugin as a public module: versioned, documented, and all that the built-in formats need."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import qengine.plugin as plugin
from qengine.plugin.version import accepts_contract, parse_contract, written_for

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = sorted((ROOT / "plugins").glob("qengine_*"))



@pytest.mark.parametrize("package", BUILT_IN, ids=lambda p: p.name)
def test_a_built_in_format_needs_nothing_but_the_public_modules(package: Path) -> None:
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    ours = {name for name in found if name.startswith("qengine")}
    assert {n for n in ours if not n.startswith(("qengine.plugin", "qengine_kernels", package.name))} == set()
    assert any(name.startswith("qengine.plugin") for name in ours)


@pytest.mark.parametrize("name", plugin.__all__)
def test_everything_public_is_there_and_has_a_docstring(name: str) -> None:
    """Methods too, those aside that carry out what a base class describes."""
    value = getattr(plugin, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return  # constants: see below
    assert (value.__doc__ or "").strip()
    for member, own in vars(value).items():
        function = own.__func__ if isinstance(own, (classmethod, staticmethod)) else own
        if inspect.isfunction(function) and not member.startswith("_"):
            assert (inspect.getdoc(getattr(value, member)) or "").strip(), f"{name}.{member}"


def test_constants_are_documented() -> None:
    """A string stands behind each, as everywhere in this code."""
    for module, name in (("version", "CONTRACT_VERSION"), ("random_tensors", "WEIGHT_STD")):
        body = ast.parse((ROOT / "qengine" / "plugin" / f"{module}.py").read_text()).body
        at = next(
            i for i, node in enumerate(body) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
        assert isinstance(body[at + 1], ast.Expr), name


@pytest.mark.parametrize(
    ("stated", "accepted"),
    [(1, True), ("1.0", True)]
    + [(bad, False) for bad in ("1.99", "0.9", 2, "2.0", None, True, "1", "1.0.0", 1.0, "one")],
)
def test_which_versions_are_taken(stated: object, accepted: bool) -> None:
    assert accepts_contract(stated) is accepted


def test_a_lower_minor_goes_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qengine.plugin.version.CONTRACT_VERSION", "1.3")
    assert [accepts_contract(v) for v in (1, "1.2", "1.3", "1.4", "2.0")] == [True, True, True, False, False]


def test_how_a_statement_is_shown() -> None:
    assert [written_for(v) for v in (1, "1.2", None, "x")] == ["1.0", "1.2", "none stated", "'x'"]
    assert parse_contract("1.2") == (1, 2)


def test_version_is_not_inherited() -> None:
    """A plugin that states none must not pass for one of the newest contract."""
    for base in (plugin.WeightQuant, plugin.KVDtype, plugin.WeightKernels):
        assert not hasattr(base, "contract")
