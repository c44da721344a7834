"""`qengine plugins new NAME --kind weight|kv`: a package that passes the conformance kit and is to be changed."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from qengine.errors import ConfigError
from qengine.plugin.discovery import list_plugins
from qengine.plugin.version import CONTRACT_VERSION

HELP = "Write a new plugin package, complete and tested"
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="Name of the format, as users will give it: --quant NAME")
    parser.add_argument("--kind", choices=("weight", "kv"), required=True, help="Weight format or KV-cache dtype")
    parser.add_argument("--out", metavar="FOLDER", help="Where to write it (default: qengine-NAME)")


def run(args: argparse.Namespace) -> int:
    """Print the folder and what to do next."""
    if not NAME.fullmatch(args.name):
        raise ConfigError(f"NAME {args.name!r}", need="lower-case words of letters and digits, joined by - or _")
    for taken in list_plugins(args.kind):
        if taken.name == args.name:
            raise ConfigError(f"NAME {args.name!r} is taken by {taken.origin}", hint="another name: two would clash")
    words = re.split("[-_]", args.name)
    values = {
        "NAME": args.name,
        "DIST": "qengine-" + "-".join(words),
        "PACKAGE": "qengine_" + "_".join(words),
        "CLASS": "".join(word.capitalize() for word in words),
        "CONTRACT": CONTRACT_VERSION,
    }
    folder = Path(args.out or values["DIST"])
    if folder.exists():
        raise ConfigError(f"{folder} is there already", hint="another --out")
    for path, text in files(args.kind, values).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{folder}\n  pip install -e '{folder}[test]'\n  pytest {folder}\n  qengine plugins check {args.name}")
    return 0


def files(kind: str, values: dict[str, str]) -> dict[str, str]:
    """Every file of a new package, by path."""
    found: dict[str, str] = {}
    _collect(resources.files("qengine.cli") / "templates" / kind, "", values, found)
    return found


def _collect(folder: Traversable, prefix: str, values: dict[str, str], found: dict[str, str]) -> None:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        name = prefix + entry.name.replace("PACKAGE", values["PACKAGE"])
        if entry.is_dir():
            inner = values["PACKAGE"] if entry.name == "package" else entry.name
            _collect(entry, f"{prefix}{inner}/", values, found)
        else:
            found[name.removesuffix(".txt")] = re.sub(r"@([A-Z]+)@", lambda m: values[m[1]], entry.read_text("utf-8"))
