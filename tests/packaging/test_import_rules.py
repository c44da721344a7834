"""Who may import whom: the table of docs/architecture.md, held over the syntax trees of every module."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT, ROOT / "kernels", ROOT / "plugins", ROOT / "calibration")
LEAVES = {"qengine", "qengine.config", "qengine.errors", "qengine.text", "qengine.messages", "qengine.sampling_params"}
BUILT_IN_PLUGINS = tuple(sorted(p.name for p in (ROOT / "plugins").glob("qengine_*")))

FRONT = {"qengine.core", "qengine.runtime", "qengine.plugin"} | LEAVES
ALLOWED: dict[str, set[str]] = {
    "qengine_kernels": set(),
    "qengine.core": {"qengine.errors"},
    "qengine.plugin": {"qengine.errors"},
    "qengine.plugin.conformance": {"qengine.conformance"},
    "qengine.conformance": {"qengine.layers", "qengine.models", "qengine.plugin", "qengine.runtime", "qengine_kernels"}
    | LEAVES,
    "qengine.layers": {"qengine.plugin", "qengine_kernels"} | LEAVES,
    "qengine.models": {"qengine.layers", "qengine.plugin"} | LEAVES,
    "qengine.runtime": {"qengine.core", "qengine.layers", "qengine.models", "qengine.plugin", "qengine_kernels"}
    | LEAVES,
    "qengine.prepare": {"qengine_calibration"} | FRONT,
    "qengine.beam_search": FRONT,
    "qengine.interrupts": set(),
    "qengine.llm": {"qengine.prepare", "qengine.beam_search", "qengine.interrupts"} | FRONT,
    "qengine.server": {"qengine.prepare"} | FRONT,
    "qengine.bench": {"qengine.prepare", "qengine_kernels"} | FRONT,
    "qengine.doctor": {"qengine.conformance", "qengine.layers", "qengine_kernels"} | FRONT,
    "qengine.cli": {
        "qengine.prepare", "qengine.server", "qengine.llm", "qengine_calibration", "qengine.conformance",
        "qengine.bench", "qengine.doctor",
    }
    | FRONT,
    "qengine_calibration": {"qengine.plugin", "qengine.models", "qengine.layers", "qengine.runtime"} | LEAVES,
    **{name: {"qengine.plugin", "qengine.errors", "qengine_kernels"} for name in BUILT_IN_PLUGINS},
    **dict.fromkeys(LEAVES - {"qengine"}, LEAVES),
    "qengine": {"qengine.llm", "qengine.beam_search"} | LEAVES,
}
THIRD_PARTY_FREE = ("qengine.core", "qengine.config", "qengine.errors", "qengine.cli")


def modules() -> Iterator[tuple[str, Path]]:
    for root in SOURCE_ROOTS:
        for top in sorted(root.glob("qengine*")):
            for path in sorted(top.rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                yield ".".join(p for p in parts if p != "__init__"), path


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import, also those inside functions; a relative one has a leading dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def room(name: str) -> str | None:
    """The longest key of ALLOWED that `name` lies in."""
    return max((k for k in ALLOWED if name == k or name.startswith(k + ".")), key=len, default=None)


def broken_rules(module: str, source: str) -> list[str]:
    own = room(module)
    assert own is not None and (own != "qengine" or module == own), f"{module} is in no room: add it to ALLOWED"
    found = []
    for name, line in imports(ast.parse(source)):
        top = name.split(".")[0]
        target = room(name) if top.startswith("qengine") else None
        if name.startswith("."):
            found.append(f"{module}:{line} relative import {name}")
        elif target is not None and target != own and target not in ALLOWED[own]:
            found.append(f"{module}:{line} {own} may not import {name}")
        elif top == "triton" and not may_use_triton(module):
            found.append(f"{module}:{line} triton outside a kernel module")
        elif name.startswith("importlib.metadata") and module != "qengine.plugin.discovery":
            found.append(f"{module}:{line} only qengine.plugin.discovery reads importlib.metadata")
        elif own in THIRD_PARTY_FREE and target is None and top not in sys.stdlib_module_names:
            found.append(f"{module}:{line} {own} takes the standard library only, not {name}")
    return found


def may_use_triton(module: str) -> bool:
    if module == "qengine.conformance.launches":  # compiles what plugins launch
        return True
    if module.startswith("qengine_kernels."):
        return not module.endswith(".reference")
    return module.startswith(BUILT_IN_PLUGINS) and module.endswith(".kernels")


def test_imports_follow_the_table() -> None:
    assert [rule for module, path in modules() for rule in broken_rules(module, path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qengine.core.pages", "import torch"),
        ("qengine.core.pages", "from qengine.runtime import engine"),
        ("qengine.core.pages", "def f():\n    from qengine.plugin import KVDtype"),
        ("qengine.plugin.kv", "from qengine.plugin.conformance import KVConformance"),
        ("qengine.runtime.engine", "import qengine.conformance.kit"),
        ("qengine.models.llama", "from qengine_kernels import rope"),
        ("qengine_awq.backend", "import qengine_dense.backend"),
        ("qengine_awq.backend", "from qengine import runtime"),
        ("qengine_kernels.w4_gemm.reference", "import triton.language as tl"),
        ("qengine.runtime.engine", "from . import runner"),
        ("qengine.runtime.engine", "from importlib import metadata"),
    ],
)
def test_a_broken_rule_is_seen(module: str, source: str) -> None:
    assert broken_rules(module, source)


def environment_reads(tree: ast.AST) -> Iterator[str]:
    """Names (or the expressions that name them) of environment variables read in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=f, args=[name, *_]) if ast.unparse(f) in ("os.environ.get", "os.getenv"):
                yield ast.unparse(name)
            case ast.Subscript(value=v, slice=name, ctx=ast.Load()) if ast.unparse(v) == "os.environ":
                yield ast.unparse(name)


def test_an_environment_variable_is_read_in_one_module() -> None:
    readers: dict[str, set[str]] = {}
    for module, path in modules():
        for name in environment_reads(ast.parse(path.read_text())):
            readers.setdefault(name, set()).add(module)
    assert {name: mods for name, mods in readers.items() if len(mods) > 1} == {}


def test_every_library_that_is_imported_is_declared() -> None:
    """Nothing may be there only because something else happens to bring it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    declared = {re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in needs}
    owners = metadata.packages_distributions()
    missing = {}
    for module, path in modules():
        for name, _ in imports(ast.parse(path.read_text())):
            top = name.split(".")[0]
            if top.startswith("qengine") or top in sys.stdlib_module_names:
                continue
            found = {owner.lower().replace("_", "-") for owner in owners.get(top, [top])}
            if not found & declared:
                missing[top] = module
    assert missing == {}
