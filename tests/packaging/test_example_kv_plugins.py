"""The example KV dtypes as a stranger has them: installed with pip beside qengine, found, compiled, served."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from plugin_site import pip_install, serving
from toy_models import make_tiny

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [ROOT / "plugins" / "examples" / f"qengine-kv-{name}" for name in ("int4", "int8")]
WORKER = ROOT / "tests" / "kernels" / "cross_compile_worker.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which both were installed, from copies, so that nothing is built among the sources."""
    base = tmp_path_factory.mktemp("examples")
    copies = [shutil.copytree(example, base / example.name) for example in EXAMPLES]
    pip_install(base / "site", copies)
    return base / "site"


def environment(site: Path, **changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **changes}


def test_they_are_found_with_their_distribution(site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qengine.cli.main", "plugins", "--json"], env=environment(site), capture_output=True
    )
    records = {r["name"]: r for r in json.loads(done.stdout) if r["kind"] == "kv"}
    for name in ("int4", "int8"):
        assert records[name]["state"] == "ok", records[name]
        assert records[name]["distribution"] == f"qengine-kv-{name}"


def test_their_own_tests_pass(site: Path) -> None:
    """But for the conformance kit's, which take a minute each."""
    files = [str(path) for example in EXAMPLES for path in (example / "tests").glob("test_*_rows.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = subprocess.run(
        [*command, *files], env=environment(site, TRITON_INTERPRET="1"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_they_compile_for_every_chip(site: Path) -> None:
    """Keys of one and values of the other, both ways round; attention itself where tensor cores are and are not."""
    every = "75,80,86,89,90,100,120"
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "kv", k, v, targets], env=environment(site), stdout=subprocess.PIPE
        )
        for k, v, targets in (("int4", "int8", every), ("int8", "int4", "75,90"))
    ]
    rows = [json.loads(line) for worker in workers for line in worker.communicate()[0].splitlines()]
    assert {row["sm"] for row in rows} == set(map(int, every.split(",")))
    assert not [row for row in rows if "error" in row or row["shared"] > row["limit"]]
    kinds = {(row["sm"], row["name"].split()[0]) for row in rows}
    assert {(75, "write_kv"), (75, "decode"), (75, "gather"), (90, "decode"), (90, "prefill")} <= kinds


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(
    ("kv", "said", "token_bytes"),
    [
        ("int8", "int8", 2 * 2 * 2 * (64 + 4)),
        ("k=fp8_e4m3,v=int4,layers.0=int4", "int4; layer 1: k=fp8_e4m3, v=int4", 2 * (40 + 36) + 2 * (64 + 36)),
    ],
)
def test_they_serve(site: Path, tiny: Path, kv: str, said: str, token_bytes: int) -> None:
    with serving(site, tiny, "--kv-dtype", kv, "--kv-cache-memory-bytes", "1M") as (url, lines):
        body = {"model": "model", "prompt": "0123456789" * 5, "max_tokens": 12, "temperature": 0}
        models = httpx.get(f"{url}/v1/models").json()["data"]
        answers = [httpx.post(f"{url}/v1/completions", json=body | {"model": models[0]["id"]}).json() for _ in range(2)]
    text = "".join(lines)
    assert f"KV cache: {said}" in text and f"KV cache bytes for one token: {token_bytes}" in text
    assert answers[0]["usage"]["completion_tokens"] == 12
    # The second one reads cached rows of its prompt.
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_calibrate_takes_them_in_a_map(site: Path, tiny: Path, tmp_path: Path) -> None:
    """Keys get scales; int4 makes its own. The attention's error is of both."""
    (tmp_path / "text.txt").write_text("some text " * 50)
    command = [sys.executable, "-m", "qengine.cli.main", "calibrate", str(tiny), "--kv-dtype", "k=fp8_e4m3,v=int4"]
    command += ["--data", str(tmp_path / "text.txt"), "--seq-len", "64", "--eval-tokens", "0", "--device", "cpu", "-q"]
    done = subprocess.run([*command, "--out", str(tmp_path)], env=environment(site), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kv = json.loads((tmp_path / "kv_scales.json").read_text())
    assert set(map(str, kv["kv_dtype"].values())) == {"{'k': 'fp8_e4m3', 'v': 'int4'}"}
    for figures in kv["layers"].values():
        assert "scale" in figures["k"] and "scale" not in figures["v"]
        assert 0.03 < figures["attention_output_error"] < 0.2


def test_a_missing_package_is_said(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qengine.cli.main", "serve", str(tiny), "--kv-dtype", "k=int8,v=auto"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2 and "no plugin named 'int8'" in done.stderr


def test_they_import_the_public_modules_only() -> None:
    """Of ours: qengine.plugin, qengine_kernels and themselves. And nothing in qengine knows their names."""
    for example in EXAMPLES:
        own = example.name.replace("-", "_")
        for path in (example / own).glob("*.py"):
            tree = ast.parse(path.read_text())
            found = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            found |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            ours = {name for name in found if name.startswith("qengine")}
            assert all(name == "qengine.plugin" or name.split(".")[0] in ("qengine_kernels", own) for name in ours)
    for room in ("qengine", "kernels", "calibration"):
        for path in (ROOT / room).rglob("*.py"):
            assert "qengine_kv_int" not in path.read_text(), path
