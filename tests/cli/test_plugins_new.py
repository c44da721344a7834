"""A package that `qengine plugins new` wrote passes the conformance kit as it stands, installed by pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_site import pip_install, qengine
from qengine.cli.main import main
from qengine.cli.plugins_new import files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind, and `site`, where pip put them."""
    base = tmp_path_factory.mktemp("new")
    for kind in ("weight", "kv"):
        assert main(["plugins", "new", f"my-{kind}", "--kind", kind, "--out", str(base / kind)]) == 0
    pip_install(base / "site", [base / "weight", base / "kv"])
    return base


@pytest.mark.parametrize("kind", ["weight", "kv"])
def test_it_passes_the_kit(written: Path, kind: str) -> None:
    """Compiling is the longest part and done for one chip."""
    test = next((written / kind / "tests").glob("test_*.py"))
    test.write_text(test.read_text().replace("targets = (75, 90)", "targets = (90,)"))
    env = {**os.environ, "PYTHONPATH": str(written / "site"), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=written / kind, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 16


def test_they_are_listed_and_checked_by_name(written: Path) -> None:
    site = written / "site"
    assert "my-kv" in qengine(site, "plugins", "--no-load").stdout
    done = qengine(site, "plugins", "check", "my-weight", "--only", "headers", "--only", "products")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "weight my-weight (qengine-my-weight 0.1.0, qengine_my_weight:MyWeightQuant)"
    assert done.stdout.splitlines()[-1] == "2 checks, 0 failed"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["check", "nope"], "no plugin named 'nope'; need: auto | awq"),
        (["check", "awq", "--only", "nope"], "--only: no check named 'nope' for a weight plugin; need: contract |"),
        (["check", "awq", "--targets", "70"], "--targets '70'; need: some of 75,80"),
        (["new", "My Format", "--kind", "kv"], "NAME 'My Format'; need: lower-case words"),
        (["new", "awq", "--kind", "weight"], "NAME 'awq' is taken by qengine-llm"),
        (["new", "x", "--kind", "other"], "--kind: invalid choice: 'other'"),
        (["new", "x", "--kind", "kv", "--out", "."], "is there already"),
        (["check"], "the following arguments are required: NAME"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_failing_check_is_shown_and_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qengine_dense.kv import AutoKV

    monkeypatch.setattr(AutoKV, "scale_granularity", ("tensor",))
    assert main(["plugins", "check", "auto", "--only", "contract"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  contract" in out and "1 checks, 1 failed (--verbose: tracebacks)" in out


@pytest.mark.parametrize("kind", ["weight", "kv"])
def test_every_placeholder_is_filled(kind: str) -> None:
    values = {"NAME": "a", "DIST": "qengine-a", "PACKAGE": "qengine_a", "CLASS": "A", "CONTRACT": "1.0"}
    made = files(kind, values)
    assert {"pyproject.toml", "README.md", "qengine_a/__init__.py", "tests/test_qengine_a.py"} <= made.keys()
    assert not [name for name, text in made.items() if "@PACKAGE" in text or "@CLASS" in text or not text.strip()]
