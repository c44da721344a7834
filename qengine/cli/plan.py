"""`qengine plan`: what serving a model would choose and how it would divide a GPU's memory, before anything is read."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from qengine.cli.options import UNITS_NOTE, add_options, config_from, find_named_plugins, say, take_model
from qengine.config import EngineConfig
from qengine.errors import ConfigError
from qengine.server.config import ServerConfig

NAME = "plan"
HELP = "Plan a model's memory on this or another GPU, from headers or config.json alone"
DOES_NOT_FIT = 1
GOALS = ("context", "streams")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "qengine plan MODEL [--gpu NAME] [--fit [context|streams]] [flags of serve]"
    parser.epilog = (
        "Exit code 1: `qengine serve` with these flags would refuse, and --fit, where asked for, found none that fit. "
        "Flags of the HTTP server change nothing here. "
        + UNITS_NOTE
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="Local folder, hub name or demo")
    gpus = "t4, a10, 3090, 4090, l4, a100-40, h100, ... (default: auto, this machine)"
    parser.add_argument("--gpu", metavar="NAME", help=gpus)
    parser.add_argument(
        "--fit",
        nargs="?",
        const=GOALS[0],
        metavar="context|streams",
        type=_goal,
        help="Search settings that fit: the longest context (default), or the most requests at once",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables")
    parser.add_argument("--png", metavar="FILE", help="Also draw the division of memory as a stacked bar")
    add_options(parser, EngineConfig, ServerConfig)


def _goal(text: str) -> str:
    if text not in GOALS:
        raise argparse.ArgumentTypeError(f"unknown goal {text!r}; need: {' | '.join(GOALS)}, and MODEL before --fit")
    return text


def run(args: argparse.Namespace) -> int:
    """Print the plan. 1 when serving would refuse it, and no settings were searched for or found that fit."""
    take_model(args)
    config = config_from(EngineConfig, args)
    server_config = config_from(ServerConfig, args)  # a wrong value is refused as serving would
    if config.model is None:
        raise ConfigError("plan needs a model", hint="qengine plan MODEL")
    find_named_plugins(config)
    if args.png is not None:
        from qengine.runtime.plan_chart import check_chart

        check_chart(args.png)

    from qengine.runtime.hub import resolve_folder
    from qengine.runtime.plan_report import plan_report

    _check_texts(config, server_config)
    folder = resolve_folder(config.model, revision=config.revision, config_only=True, say=say)
    report = plan_report(dataclasses.replace(config, model=str(folder), revision=None), args.gpu, args.fit)
    report.model = config.model
    if args.png is not None and report.memory is None and report.fit is None:
        report.notes.append("WARNING: --png: there is nothing to draw, because the plan is refused")
    elif args.png is not None:
        from qengine.runtime.plan_chart import draw

        draw(report, Path(args.png))
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        from qengine.runtime.plan_view import show

        show(report, args.fit)
    return 0 if report.refused is None or report.fit is not None else DOES_NOT_FIT


def _check_texts(config: EngineConfig, server_config: ServerConfig) -> None:
    """Raise as serving would for --tokenizer and --chat-template, which change nothing in a plan. Of a tokenizer on the
    hub, only that it is there is known."""
    from qengine.runtime.hub import resolve_tokenizer
    from qengine.text import ChatTemplate, Tokenizer

    if config.tokenizer is not None:
        folder = resolve_tokenizer(config.tokenizer, config_only=True)
        if Path(config.tokenizer).expanduser().is_dir():
            Tokenizer.load(folder, config.trust_remote_code)
    if server_config.chat_template is not None:
        ChatTemplate.from_option(server_config.chat_template)
