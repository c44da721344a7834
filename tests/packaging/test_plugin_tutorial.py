"""docs/plugins.md, done as it says: the files it writes, the commands it runs, the lines it shows."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from plugin_site import complete, pip_install, serving
from qengine.conformance.check_table import with_table
from toy_models import make_succ

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
STEP = re.compile(r"<!-- (write|prepend|replace|run|shows|serve)(?:: (\S+))? -->\n```\w*\n(.*?)```", re.DOTALL)
CHAIN = "tiny4 serv"


class Reader:
    """Does what the page says in a folder; a toy model stands for the demo."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site, self.output = folder / "qengine-tiny4", folder / "site", ""
        self.folder.mkdir()
        model = make_succ(folder / "succ", chain=CHAIN, dtype="float16")
        self.words = {"demo": str(model), "demo-tiny4": str(folder / "demo-tiny4")}

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(exist_ok=True)
        (self.folder / path).write_text(text)

    def prepend(self, path: str, text: str) -> None:
        self.write(path, text + (self.folder / path).read_text())

    def replace(self, path: str, text: str) -> None:
        """The methods in `text` take the place of those of their names in the file's last class, which ends it."""
        names = {f.name for f in ast.parse(textwrap.dedent(text)).body if isinstance(f, ast.FunctionDef)}
        lines = (self.folder / path).read_text().splitlines(keepends=True)
        last = ast.parse("".join(lines)).body[-1]
        assert isinstance(last, ast.ClassDef)
        old = [f for f in last.body if isinstance(f, ast.FunctionDef) and f.name in names]
        for f in reversed(old):
            first = min([f.lineno, *(d.lineno for d in f.decorator_list)])
            del lines[first - 1 : f.end_lineno]
        self.write(path, "".join(lines).rstrip() + "\n\n" + text)

    def run(self, _: str, text: str) -> None:
        self.output = ""
        for line in text.splitlines():
            self._command(line)

    def _command(self, line: str) -> None:
        if line == "pip install -e .":
            copy = shutil.copytree(self.folder, self.site.with_name("copy"))
            pip_install(self.site, [copy])
            shutil.rmtree(self.site / "qengine_tiny4")  # as editable: metadata there, code here
            return
        program, *argv = [self.words.get(word, word) for word in shlex.split(line)]
        module = {"qengine": "qengine.cli.main", "pytest": "pytest"}[program]
        path = os.pathsep.join(map(str, (self.folder, self.site)))
        done = subprocess.run(
            [sys.executable, "-m", module, *argv], cwd=self.folder, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        self.output += done.stdout

    def shows(self, _: str, text: str) -> None:
        """Each line's words stand in this order in some line of what was printed."""
        for line in text.splitlines():
            assert re.search(r"[^\n]*?".join(map(re.escape, line.split())), self.output), (line, self.output)

    def serve(self, _: str, text: str) -> None:
        _, _, model, *_ = shlex.split(text)
        site = Path(os.pathsep.join(map(str, (self.folder, self.site))))
        with serving(site, Path(self.words[model])) as (url, lines):
            assert complete(url, "Z", len(CHAIN)) == CHAIN
        assert "tiny4 decoded for each call" in "".join(lines)


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    steps = STEP.findall(DOCUMENT.read_text())
    assert len(steps) >= 18
    for action, argument, text in steps:
        getattr(reader, action)(argument, text)


def test_the_table_of_checks_is_fresh() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, "run: python -m qengine.conformance.check_table --write docs/plugins.md"
