"""The distribution: what is installed, what a wheel holds, what imports cost, what must not be in the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("qengine", "kernels", "plugins", "calibration")
TREE = (*SOURCE_FOLDERS, "tests", "benchmarks", "docs", ".ci", "README.md", "CHANGELOG.md", "pyproject.toml")
TEXT = {".py", ".md", ".toml", ".json", ".txt", ".jinja", ""}
LONGEST_FILE = 400


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tree(*suffixes: str) -> Iterator[Path]:
    """Files of the project; caches and build output are not part of it."""
    for name in TREE:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and path.suffix in (suffixes or TEXT) and "__pycache__" not in path.parts:
                yield path


def python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_entry_points_are_those_of_pyproject() -> None:
    """A stale *.egg-info in the root would shadow the installed ones."""
    wanted = {("console_scripts", n, v) for n, v in project()["scripts"].items()}
    for group, entries in project()["entry-points"].items():
        wanted |= {(group, n, v) for n, v in entries.items()}
    installed = {(e.group, e.name, e.value) for e in metadata.distribution("qengine-llm").entry_points}
    assert installed == wanted


def test_version_is_stated_once_and_the_same() -> None:
    import qengine

    assert qengine.__version__ == project()["version"] == metadata.version("qengine-llm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, wheel): built offline from a copy of the source, so that no build output lands in the tree."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = python("from setuptools import build_meta; print(build_meta.build_wheel('dist'))", source)
    return source, source / "dist" / out.splitlines()[-1]


def test_wheel_holds_the_packages_and_nothing_else(wheel: tuple[Path, Path]) -> None:
    source, path = wheel
    names = zipfile.ZipFile(path).namelist()
    tops = {n.split("/")[0] for n in names}
    plugins = {p.name for p in (source / "plugins").glob("qengine_*")}
    info = "qengine_llm-" + project()["version"] + ".dist-info"
    assert tops == {"qengine", "qengine_kernels", "qengine_calibration", info} | plugins
    roots = [source if name == "qengine" else source / name for name in SOURCE_FOLDERS]
    modules = {p.relative_to(root).as_posix() for root in roots for p in root.glob("qengine*/**/*.py")}
    assert {n for n in names if n.endswith(".py")} == modules
    assert {"qengine/py.typed", "qengine_calibration/data/heldout.txt"} <= set(names)
    assert any(n.startswith(info) and n.endswith("LICENSE") for n in names)


@pytest.mark.parametrize("name", ["kernels", "plugins", "calibration", "tests"])
def test_source_folders_are_not_importable(name: str, tmp_path: Path) -> None:
    """An index package is called `kernels`, and transformers probes for it."""
    spec = python(f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)", tmp_path).strip()
    assert spec == "None" or not spec.startswith(str(ROOT))
    assert not (ROOT / name / "__init__.py").exists()
    assert str(ROOT) not in sys.path


@pytest.mark.parametrize(
    "code",
    [
        "import qengine",
        "from qengine import EngineConfig, SamplingParams",
        "import qengine.plugin.discovery as d; d.list_plugins()",
        "from qengine.cli.main import main; main(['plugins', '--no-load'])",
        "from qengine.cli.main import main; main(['serve', '--no-such-flag'])",
        "from qengine.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from qengine.cli.main import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_cheap_things_import_nothing_heavy(code: str, tmp_path: Path) -> None:
    heavy = ("torch", "triton", "transformers", "fastapi")
    check = f"import sys; print('heavy:', [m for m in {heavy} if m in sys.modules])"
    assert python(f"{code}\n{check}", tmp_path).splitlines()[-1] == "heavy: []"


def test_checking_plugins_imports_no_kernel(tmp_path: Path) -> None:
    """Loading a plugin class needs torch's types, but no Triton and no CUDA context."""
    out = python(
        "import sys; from qengine.plugin.discovery import check_plugins\n"
        "states = {r.state for r in check_plugins() if r.distribution == 'qengine-llm'}\n"
        "print(states, 'triton' in sys.modules, sys.modules['torch'].cuda.is_initialized())",
        tmp_path,
    )
    assert out.strip() == "{'ok'} False False"


def test_no_machine_path_in_the_tree() -> None:
    machine = re.compile("/(?:" + "|".join(("work", "root", "home", "Users")) + r")/\w")
    found = [f"{p.relative_to(ROOT)}: {m.group()}" for p in tree() for m in machine.finditer(p.read_text())]
    assert found == []


def test_no_python_file_is_too_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in tree(".py")}
    assert {name: n for name, n in lengths.items() if n >= LONGEST_FILE} == {}


def test_test_file_names_are_unique() -> None:
    """The importlib import mode gives every test file its bare name."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_readme_flag_table_is_fresh() -> None:
    from qengine.cli.flag_table import flag_table, main, with_table

    readme = ROOT / "README.md"
    assert main([str(readme)]) == 0, "run: python -m qengine.cli.flag_table --write README.md"
    assert "| `--kv-dtype`, `--kv-cache-dtype` | `auto` |" in flag_table()
    stale = readme.read_text().replace("`--block-size`", "`--size-of-block`")
    assert with_table(stale) != stale


def test_ci_runs_the_readme_line() -> None:
    """.ci/run takes its one command from between the markers, so that the two cannot drift."""
    line = (ROOT / "README.md").read_text().split("<!-- test:begin -->")[1].split("<!-- test:end -->")[0]
    commands = [s for s in line.splitlines() if s and not s.startswith("```")]
    assert commands == ["python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest -n auto"]
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
