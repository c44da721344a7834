"""`qengine serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse

from qengine.cli.options import UNITS_NOTE, add_options, config_from, find_named_plugins, take_model
from qengine.config import EngineConfig
from qengine.server.config import ServerConfig

NAME = "serve"
HELP = "Serve a model over an OpenAI-compatible HTTP API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine serve [MODEL] [flags]"
    parser.epilog = UNITS_NOTE
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help="Local folder or hub name; without one, the demo model (SmolLM2-135M-Instruct)",
    )
    add_options(parser, EngineConfig, ServerConfig)


def run(args: argparse.Namespace) -> int:
    take_model(args)
    engine_config = config_from(EngineConfig, args)
    server_config = config_from(ServerConfig, args)
    find_named_plugins(engine_config)  # the engine's process loads them

    from qengine.server.run import serve

    return serve(engine_config, server_config)  # the engine's process prepares the model
