"""Throw-away plugin distributions, really built and installed by pip into a folder of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
