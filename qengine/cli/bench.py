"""`qengine bench`: what an engine or a server does in a second, and how long a client waits."""

from __future__ import annotations

import argparse
from pathlib import Path

from qengine.bench.options import KernelOptions, LatencyOptions, ServeOptions, ThroughputOptions
from qengine.cli.options import UNITS_NOTE, add_options, config_from, say, take_model
from qengine.config import EngineConfig
from qengine.errors import ConfigError

NAME = "bench"
HELP = "Measure latency and throughput of an engine, or of any OpenAI-compatible server"
ACTIONS = {
    "latency": "One batch of random prompts, again and again",
    "throughput": "Many prompts at once, as fast as it goes",
    "serve": "Streamed requests to a server that runs already, at a rate",
    "kernels": "Linears and attention of given shapes on this GPU, each kernel alone",
}
ALONE = {"serve": ServeOptions, "kernels": KernelOptions}
"""Actions that build no engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    for name, text in ACTIONS.items():
        sub = actions.add_parser(name, help=text, description=text + ".", epilog=UNITS_NOTE)
        sub.set_defaults(action_parser=sub)
        if name in ALONE:
            add_options(sub, ALONE[name])
            continue
        sub.usage = f"qengine bench {name} [MODEL] [flags]"
        sub.add_argument(
            "positional_model", nargs="?", metavar="MODEL", help="Local folder or hub name (default: the demo model)"
        )
        add_options(sub, LatencyOptions if name == "latency" else ThroughputOptions, EngineConfig)


def run(args: argparse.Namespace) -> int:
    if args.action is None:
        raise ConfigError("nothing to measure", need=" | ".join(ACTIONS))
    if args.action == "serve":
        return _serve(config_from(ServeOptions, args))
    if args.action == "kernels":
        return _kernels(config_from(KernelOptions, args))
    take_model(args)
    config = config_from(EngineConfig, args)
    if args.action == "latency":
        return _latency(config, config_from(LatencyOptions, args))
    return _throughput(config, config_from(ThroughputOptions, args))


def _latency(config: EngineConfig, options: LatencyOptions) -> int:
    path = writable(options.output_json)
    from qengine.bench import figures, latency

    found = latency.measure(config, options, say)
    print("\n".join(latency.lines(found, options)))
    if path is not None:
        figures.write_json(path, found)
    return 0


def _throughput(config: EngineConfig, options: ThroughputOptions) -> int:
    path = writable(options.output_json)
    from qengine.bench import figures, throughput

    found = throughput.measure(config, options, say)
    print("\n".join(throughput.lines(found, options)))
    if path is not None:
        figures.write_json(path, found)
    return 0


def _serve(options: ServeOptions) -> int:
    if options.save_result:
        writable(str(Path(options.result_dir or ".") / (options.result_filename or "result.json")))
    from qengine.bench import serve

    found = serve.measure(options)
    print("\n".join(serve.lines(found, options)))
    if options.save_result:
        say(f"Written to {serve.save(found, options)}")
    return 0


def _kernels(options: KernelOptions) -> int:
    path = writable(options.output_json)
    from qengine.bench import figures, kernels

    found = kernels.measure(options, say)
    print("\n".join(kernels.lines(found)))
    if path is not None:
        figures.write_json(path, found)
    return 0


def writable(name: str | None) -> Path | None:
    """The path of a file to be written at the end: its folder is looked at now. Raises ConfigError."""
    if name is None:
        return None
    path = Path(name)
    if not path.parent.is_dir():
        raise ConfigError("the folder of the output file is not there", have=str(path.parent))
    return path
