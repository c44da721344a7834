"""`qengine serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse

from qengine.cli.options import UNITS_NOTE, add_options, config_from, take_model
from qengine.config import EngineConfig
from qengine.core.kv_map import read_kv_map
from qengine.plugin.discovery import find_plugin
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

    # Names are looked up here, at once and without importing torch; the engine's process loads the plugins.
    if engine_config.quantization is not None:
        find_plugin("weight", engine_config.quantization)
    skipped = engine_config.kv_cache_dtype_skip_layers
    for name in read_kv_map(engine_config.kv_cache_dtype, EngineConfig.kv_cache_dtype, skipped).dtypes:
        find_plugin("kv", name)

    from qengine.server.run import serve

    return serve(engine_config, server_config)  # the engine's process prepares the model
