"""Throw-away plugin distributions, really built and installed by pip into a folder of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "2.5"

[project.entry-points."{group}"]
{entries}

[tool.setuptools]
py-modules = {modules}
"""


def write_project(folder: Path, name: str, group: str, sources: Mapping[str, str]) -> Path:
    """A distribution with an entry point ("name = module:Class") and that module's source for each of `sources`."""
    folder.mkdir(parents=True)
    pairs = [tuple(part.strip() for part in entry.split("=")) for entry in sources]
    modules = [value.split(":")[0] for _, value in pairs]
    entries = "\n".join(f'"{left}" = "{right}"' for left, right in pairs)
    text = PYPROJECT.format(name=name, group=group, entries=entries, modules=json.dumps(modules))
    (folder / "pyproject.toml").write_text(text)
    for module, source in zip(modules, sources.values(), strict=True):
        (folder / f"{module}.py").write_text(source)
    return folder


def pip_install(target: Path, projects: Sequence[Path]) -> None:
    """Installs them with pip into `target`; nothing is fetched."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *map(str, projects)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def qengine(
    site: Path, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that sees what is installed in `site` beside this environment."""
    own = {**os.environ, "PYTHONPATH": str(site), **(env or {})}
    command = [sys.executable, "-m", "qengine.cli.main", *argv]
    return subprocess.run(command, cwd=cwd or site, env=own, capture_output=True, text=True, timeout=280)


@contextmanager
def serving(site: Path, model: Path, *flags: str) -> Iterator[tuple[str, list[str]]]:
    """`qengine serve` on a CPU: its address once it answers, and the lines printed so far."""
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "qengine.cli.main", "serve", str(model), "--device", "cpu", "--port", "0", *flags]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"serves .* at (http://\S+)/v1", line):
                yield found[1], lines
                break
        else:
            raise AssertionError("the server did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.communicate(timeout=60)


def complete(url: str, prompt: str, max_tokens: int = 8) -> str:
    """The greedy continuation."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    return str(answer["choices"][0]["text"])
