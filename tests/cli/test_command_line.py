"""The command line: flags from config fields, one line and exit code 2 for what is wrong, help in groups."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from qengine.cli.commands import build_parser
from qengine.cli.main import main
from qengine.cli.options import Parser, add_options, as_typed, config_from, dashed, number
from qengine.config import EngineConfig, option, options
from qengine.errors import ConfigError
from qengine.server.config import ServerConfig


def engine_config(*argv: str) -> EngineConfig:
    args, unknown = build_parser()[0].parse_known_args(["serve", *dashed(argv)])
    assert unknown == []
    return config_from(EngineConfig, args)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that must fail with exit code 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qengine: error: ") and err.count("\n") == 1
    return err


def test_no_flag_means_the_config_defaults() -> None:
    assert engine_config() == EngineConfig()


def test_every_option_has_a_flag() -> None:
    serve = build_parser()[1]["serve"]
    flags = {s for action in serve._actions for s in action.option_strings}
    for config in (EngineConfig, ServerConfig):
        for field, opt in options(config):
            assert {"--" + field.name.replace("_", "-"), *opt.flags} <= flags


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--quant awq", "quantization", "awq"),
        ("-q awq", "quantization", "awq"),
        ("--quantization awq", "quantization", "awq"),
        ("--kv-dtype fp8", "kv_cache_dtype", "fp8"),
        ("--kv-cache-dtype fp8", "kv_cache_dtype", "fp8"),
        ("--kv_cache_dtype=fp8_e5m2", "kv_cache_dtype", "fp8_e5m2"),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len 4096", "max_model_len", 4096),
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max-model-len 32K", "max_model_len", 32_768),
        ("--kv-cache-memory-bytes 4G", "kv_cache_memory_bytes", 4 << 30),
        ("--kv-cache-memory-bytes 1.5M", "kv_cache_memory_bytes", 3 << 19),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enforce-eager", "enforce_eager", True),
        ("--gpu-memory-utilization .5", "gpu_memory_utilization", 0.5),
        ("--seed -3", "seed", -3),
    ],
)
def test_flag_sets_its_field(argv: str, field: str, value: object) -> None:
    assert getattr(engine_config(*argv.split()), field) == value


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("serve --tensor-parallel-size 2", ["--tensor-parallel-size is not built yet", "have: 2", "need: 1"]),
        ("serve -tp 2", ["--tensor-parallel-size is not built yet"]),
        ("serve --pipeline-parallel-size 2", ["--pipeline-parallel-size is not built yet"]),
        ("serve --swap-space -1", ["--swap-space is out of range", "have: -1"]),
        ("serve --swap-policy swap", ["--swap-policy swap needs host memory", "--swap-space GIB"]),
        ("serve --offload-layers *.mlp", ["--offload-layers chooses what --cpu-offload-gb may move"]),
        ("serve --speculative-config {}", ["--speculative-config is not built yet"]),
        ("serve --enable-lora", ["--enable-lora is not built yet"]),
        ("serve --kv-dtyp fp8", ["unknown flag --kv-dtyp", "--kv-dtype"]),
        ("serve --max-model-length=4", ["unknown flag --max-model-length", "--max-model-len"]),
        ("serve --zzzzzz", ["unknown flag --zzzzzz", "qengine serve --help"]),
        ("serve one two", ["unexpected argument 'two'"]),
        ("serve one --model two", ["two models", "one", "two"]),
        ("serve --dtype int3", ["--dtype", "'int3'", "bfloat16"]),
        ("serve --block-size x", ["--block-size", "'x'", "4096"]),
        ("serve --block-size 24", ["--block-size", "power of two", "24"]),
        ("serve --max-model-len 1.5", ["--max-model-len", "'1.5'"]),
        ("serve --gpu-memory-utilization 1.5", ["--gpu-memory-utilization", "1.5"]),
        ("serve --port 99999", ["--port", "99999", "65535"]),
        ("serve --quant nope", ["--quant", "'nope'", "awq |", "dense"]),
        ("serve --kv-dtype fp9", ["--kv-dtype:", "'fp9'", "fp8_e4m3", "--kv-dtype fp8"]),
        ("serve --seed", ["--seed", "expected one argument"]),
        ("serve --frob 1", ["unknown flag --frob"]),
        ("serve --kv-cache-memory-bytes -4G", ["--kv-cache-memory-bytes is too small", "have: -4294967296"]),
        ("serve --max-model-len 1", ["--max-model-len is too small", "need: >= 2"]),
        ("serve --enforce-eager true", ["'true' would be the MODEL", "switches take no value"]),
        ("serve --access-log yes some/model", ["'yes' would be the MODEL"]),
        ("serve --served-model-name mine some/model", ["--served-model-name took 'some/model'", "--model"]),
        ("serve --api-key .", ["--api-key took '.'"]),
        ("serve --revision main", ["--revision is for hub models"]),
        ("pull demo --revision main", ["--revision is for hub models"]),
        ("serve --tokenizer=", ["--tokenizer is empty"]),
        ("serve --swap-space 1e20", ["--swap-space is out of range", "need: 0 <= GiB < 1073741824"]),
        ("serve --cpu-offload-gb 1e20", ["--cpu-offload-gb is out of range", "GiB < 1073741824, or auto"]),
        ("serve --expert-slots 9999999999", ["--expert-slots is out of range", "0 to 2147483647 experts, or auto"]),
        ("serve --shutdown-timeout inf", ["--shutdown-timeout is out of range", "have: inf", "below infinity"]),
        ("serve --health-timeout inf", ["--health-timeout is out of range", "have: inf", "below infinity"]),
        ("serve --trust-remote-code=1", ["--trust-remote-code takes no value", "'1'", "--no-trust-remote-code"]),
        ("plan --json=yes", ["--json takes no value; have: 'yes'; what would work: --json"]),
        ("serve --kv-cache-dtype-skip-layers 2.5", ["--kv-cache-dtype-skip-layers 2.5", "0,29"]),
        ("serve --kv-cache-dtype-skip-layers v", ["--kv-cache-dtype-skip-layers v", "'v' names no layers", "0,29"]),
        ("serve --kv-cache-dtype-skip-layers ,", ["--kv-cache-dtype-skip-layers ','", "0,29"]),
        ("plan m --kv-dtype int9", ["no plugin named 'int9'", "--kv-dtype: "]),
        ("serve --model=", ["--model is empty"]),
        ("frobnicate", ["invalid choice", "frobnicate", "serve"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    argv: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(capsys, *argv.split())
    assert [p for p in parts if p not in line] == []


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--kv-cache-dtype-skip-layers", "--tokenizer"])
def test_blank_texts_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag} " in error_line(capsys, "serve", flag, "  ")


def test_errors_name_the_flag_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    typed, config = error_line(capsys, "serve", "--kv-dtype", "fp7"), ("serve", "--kv-cache-dtype=fp7")
    assert "--kv-cache-dtype" not in typed and "--kv-dtype" in typed
    assert "--kv-cache-dtype" in error_line(capsys, *config)
    message = "--quantization awq with --model-len and --kv-cache-dtype; --quant/-q/--quantization: one value"
    assert as_typed(message, ["serve", "--quant=awq"], EngineConfig) == message.replace("--quantization a", "--quant a")


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("QENGINE_DEBUG", "1")
    argv = ["serve", "--swap-space", "-1"] + ["--debug"] * (how == "flag")
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("qengine: error: --swap-space")


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve", "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    groups = ["\nmodel:", "\nmemory:", "\nscheduling:", "\nexecution:", "\nserver:", "\nnot built yet:"]
    assert [g for g in groups if g not in text] == []
    assert max(text.index(g) for g in groups) == text.index("\nnot built yet:")
    assert "--quant, -q, --quantization NAME" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text
    assert "{auto,safetensors,pt,npcache,dummy}" in text


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = [sys.executable, "-m", "qengine.cli.main", "plugins"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # long before the child has imported anything
        err = process.stderr.read()
        assert (process.wait(60), err) == (141, b"")


INTERRUPTED_AT = """
import atexit, os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
atexit.register(lambda: sys.argv[-1] == "the end" and os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["qengine", *sys.argv[1:]]
from qengine.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["plugins", "qengine.config"], 130, "qengine: interrupted\n"),
        (["eval", "m", "torch"], 130, "qengine: interrupted\n"),
        (["--version", "the end"], -signal.SIGINT, ""),  # the shell makes 130 of it
    ],
    ids=["imports of the command line", "imports of a command", "the interpreter's end"],
)
def test_ctrl_c_is_no_traceback(argv: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_AT, *argv], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert [c for c in ("serve", "pull", "plugins") if c not in out] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from qengine import __version__

    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"qengine {__version__}\n"


@pytest.mark.parametrize("text", ["", "k", "4x", "1.3", "0.0001k", "0x10", "nan", "infG", "MiB", "4iB", "4kiB"])
def test_number_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        number(text)


def test_number_units() -> None:
    texts = ("512", "32k", "32K", "1.5G", "256MiB", "1.5GiB")
    assert [number(t) for t in texts] == [512, 32000, 32768, 3 << 29, 256 << 20, 3 << 29]


@dataclass(frozen=True)
class Several:
    names: tuple[str, ...] = option((), "Names", group="a")
    share: float = option(0.5, "100 % of it", group="a")


def test_option_with_several_values() -> None:
    parser = Parser(prog="x")
    add_options(parser, Several)
    args = parser.parse_args(["--names", "a", "b", "--names", "c"])
    assert config_from(Several, args) == Several(names=("a", "b", "c"))
    assert "100 % of it (default: 0.5)" in parser.format_help()
    with pytest.raises(ConfigError, match="--share: not a number: 'y'"):
        parser.parse_args(["--share", "y"])
