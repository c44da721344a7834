"""The example weight packages as a stranger has them: installed with pip beside qengine, found, calibrated, served."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_site import complete, pip_install, qengine, serving
from toy_models import make_succ, make_tiny_awq

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [ROOT / "plugins" / "examples" / name for name in ("qengine-nf4", "qengine-awq-kernels")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which both were installed, from copies, so that nothing is built among the sources."""
    base = tmp_path_factory.mktemp("examples")
    pip_install(base / "site", [shutil.copytree(example, base / example.name) for example in EXAMPLES])
    return base / "site"


def test_they_are_found(site: Path) -> None:
    records = json.loads(qengine(site, "plugins", "--json").stdout)
    found = {(r["kind"], r["name"]): r for r in records}
    for kind, name, owner in (("weight", "nf4", "qengine-nf4"), ("kernels", "awq", "qengine-awq-kernels")):
        record = found[kind, name]
        assert (record["state"], record["distribution"], record["contract"]) == ("ok", owner, "1.0"), record
    assert found["weight", "awq"]["state"] == "ok"  # kernels for a format are no second owner of its name


def test_their_own_tests_pass(site: Path) -> None:
    """What compiles is left to `qengine plugins check`: it takes half a minute each."""
    files = [str(path) for example in EXAMPLES for path in (example / "tests").glob("test_*.py")]
    options = ["-q", "-p", "qengine.plugin.conformance", "-p", "no:cacheprovider", "-c", os.devnull]
    options += ["--rootdir", str(ROOT), "--import-mode=importlib", "-k", "not targets"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_nf4_is_calibrated_and_served(site: Path, tmp_path: Path) -> None:
    chain = "nf4 keeps the chain."
    model = make_succ(tmp_path / "succ", chain="".join(dict.fromkeys(chain)), dtype="float16")
    done = qengine(site, "calibrate", str(model), "--quant", "nf4", "--out", str(tmp_path / "made"), "--samples", "2")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "nf4" and config["group_size"] == 128
    with serving(site, tmp_path / "made", "--quant", "nf4") as (url, lines):
        assert complete(url, "Z", 5) == "nf4 k"
    assert "nf4 g128" in "".join(lines) and "nf4 decoded at load" in "".join(lines)


def test_kernels_that_do_not_fit_are_said_and_the_formats_own_run(site: Path, tmp_path: Path) -> None:
    model, _ = make_tiny_awq(tmp_path / "awq")
    with serving(site, model) as (url, lines):
        assert len(complete(url, "0123456789")) > 0
    text = "".join(lines)
    said = "Kernels of autoawq (qengine-awq-kernels 0.1.0) are not used: the extension runs on NVIDIA GPUs"
    assert said in text and "awq 4-bit g64" in text


def test_they_import_the_public_modules_only() -> None:
    """Of ours: qengine.plugin, qengine_kernels and themselves. And nothing in qengine knows their names."""
    for example in EXAMPLES:
        own = example.name.replace("-", "_")
        for path in (example / own).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                ours = [n for n in names if n.startswith("qengine")]
                assert [n for n in ours if not n.startswith(("qengine.plugin", "qengine_kernels", own))] == [], path
        for room in ("qengine", "kernels", "calibration"):
            known = [p for p in (ROOT / room).rglob("*.py") if own in p.read_text()]
            assert known == []
