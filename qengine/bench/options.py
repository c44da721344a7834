"""Options of `qengine bench`, once each. Names, meanings and defaults follow vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from qengine.config import option
from qengine.errors import ConfigError

WORK, RUN, OUTPUT, SERVER = "workload", "measurement", "output", "server"
DATASETS = ("random", "sharegpt-like")
PERCENTILES = "50,90,99"


def percentiles_of(text: str) -> list[float]:
    """Numbers between 0 and 100. Raises ConfigError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= v <= 100 for v in values):
        raise ConfigError("--metric-percentiles is a list of numbers", have=text, need="such as 50,90,99")
    return values


def at_least(options: object, low: float, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is set and below `low`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is too small", have=value, need=f">= {low}")


@dataclass(frozen=True)
class LatencyOptions:
    """`qengine bench latency`: one batch, again and again."""

    input_len: int = option(32, "Tokens of each prompt", group=WORK)
    output_len: int = option(128, "Tokens to generate for each", group=WORK)
    batch_size: int = option(8, "Prompts at once", group=WORK)
    num_iters_warmup: int = option(3, "Runs before the measured ones", group=RUN)
    num_iters: int = option(10, "Measured runs", group=RUN)
    disable_detokenize: bool = option(
        False, "Token ids only: no tokenizer is read, no text is made", group=RUN
    )
    output_json: str | None = option(None, "Write the figures to this file", group=OUTPUT, metavar="FILE")

    def __post_init__(self) -> None:
        at_least(self, 1, "input_len", "output_len", "batch_size", "num_iters")
        at_least(self, 0, "num_iters_warmup")


@dataclass(frozen=True)
class ThroughputOptions:
    """`qengine bench throughput`: all prompts at once, as fast as it goes."""

    dataset_name: str = option("random", "Lengths: fixed, or spread as in chats", group=WORK, choices=DATASETS)
    input_len: int = option(512, "Tokens of each prompt (random)", group=WORK, flags=("--random-input-len",))
    output_len: int = option(128, "Tokens to generate for each (random)", group=WORK, flags=("--random-output-len",))
    random_range_ratio: float = option(0.0, "Lengths vary by this share up and down (random)", group=WORK)
    random_prefix_len: int = option(0, "Tokens in front that all prompts share (random)", group=WORK)
    num_prompts: int = option(256, "Prompts in all", group=WORK)
    num_warmups: int = option(1, "Short runs before the measured one", group=RUN)
    disable_detokenize: bool = option(
        False, "Token ids only: no tokenizer is read, no text is made", group=RUN
    )
    metric_percentiles: str = option(PERCENTILES, "Percentiles to show, with commas", group=OUTPUT, metavar="LIST")
    output_json: str | None = option(None, "Write the figures to this file", group=OUTPUT, metavar="FILE")

    def __post_init__(self) -> None:
        at_least(self, 1, "input_len", "output_len", "num_prompts")
        at_least(self, 0, "random_range_ratio", "random_prefix_len", "num_warmups")
        percentiles_of(self.metric_percentiles)


@dataclass(frozen=True)
class ServeOptions:
    """`qengine bench serve`: streamed requests to a server that runs already."""

    backend: str = option(
        "openai", "Which API is asked: completions, or chat", group=SERVER, choices=("openai", "openai-chat")
    )
    base_url: str | None = option(None, "Such as http://host:8000 (default: from --host and --port)", group=SERVER)
    host: str = option("127.0.0.1", "Address of the server", group=SERVER)
    port: int = option(8000, "Port of the server", group=SERVER)
    endpoint: str | None = option(None, "Path (default: /v1/completions or /v1/chat/completions)", group=SERVER)
    model: str | None = option(None, "Name in the API (default: the first that the server lists)", group=SERVER)
    api_key: str | None = option(None, "Sent as `Authorization: Bearer KEY`", group=SERVER, metavar="KEY")
    dataset_name: str = option("random", "Lengths: fixed, or spread as in chats", group=WORK, choices=DATASETS)
    random_input_len: int = option(1024, "Tokens of each prompt, about", group=WORK, flags=("--input-len",))
    random_output_len: int = option(128, "Tokens to generate for each", group=WORK, flags=("--output-len",))
    random_range_ratio: float = option(0.0, "Lengths vary by this share up and down (random)", group=WORK)
    random_prefix_len: int = option(0, "Tokens in front that all prompts share (random)", group=WORK)
    num_prompts: int = option(100, "Requests in all", group=WORK)
    tokenizer: str | None = option(
        None, "Folder of a tokenizer: prompts then have the lengths asked for; without one, as many words", group=WORK
    )
    ignore_eos: bool = option(False, "Ask the server to generate all tokens, whatever they are", group=WORK)
    temperature: float = option(0.0, "Of every request", group=WORK)
    seed: int = option(0, "Of prompts, lengths and arrivals", group=WORK)
    request_rate: float = option(
        float("inf"), "Requests a second; inf (default): all at once", group=RUN, metavar="X|inf"
    )
    burstiness: float = option(1.0, "Shape of the gaps between arrivals: 1 is a Poisson process", group=RUN)
    max_concurrency: int | None = option(None, "Most requests in flight", group=RUN)
    num_warmups: int = option(1, "Requests before the measured ones, one after the other", group=RUN)
    timeout: float = option(600.0, "Seconds after which a request counts as failed", group=RUN)
    percentile_metrics: str = option("ttft,tpot,itl,e2el", "Which figures to show", group=OUTPUT, metavar="LIST")
    metric_percentiles: str = option(PERCENTILES, "Percentiles to show, with commas", group=OUTPUT, metavar="LIST")
    save_result: bool = option(False, "Write the figures to a JSON file", group=OUTPUT)
    save_detailed: bool = option(False, "With each request's own times", group=OUTPUT)
    result_dir: str | None = option(None, "Folder of that file (default: the current one)", group=OUTPUT)
    result_filename: str | None = option(None, "Its name (default: made of rate, model and time)", group=OUTPUT)

    def __post_init__(self) -> None:
        at_least(self, 1, "random_input_len", "random_output_len", "num_prompts", "max_concurrency")
        at_least(self, 0, "random_range_ratio", "random_prefix_len", "num_warmups", "temperature")
        for name in ("request_rate", "burstiness", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive", have=getattr(self, name), need="> 0")
        percentiles_of(self.metric_percentiles)
        unknown = set(self.percentile_metrics.split(",")) - {"ttft", "tpot", "itl", "e2el"}
        if unknown:
            raise ConfigError(
                "--percentile-metrics: unknown value", have=", ".join(sorted(unknown)), need="ttft, tpot, itl, e2el"
            )


@dataclass(frozen=True)
class TuneOptions:
    """`qengine tune`: tiles of 4-bit linears."""

    shapes: str | None = option(
        None, "Outputs x inputs of linears, such as 6144x4096,4096x14336; default: those of MODEL", group=WORK
    )
    group_size: int = option(128, "Inputs that share a scale", group=WORK)
    rows: str = option("8,16,32,64,128,256,512,1024,2048,4096", "Up to how many rows each entry serves", group=WORK)
    processes: int | None = option(None, "Processes that compile; default: one for each core, at most 16", group=RUN)
    output: str | None = option(
        None, "Write the table there instead of where starts look for it", group=OUTPUT, metavar="FILE"
    )

    def __post_init__(self) -> None:
        at_least(self, 16, "group_size")
        at_least(self, 1, "processes")
        pairs_of(self.shapes)
        numbers_of("--rows", self.rows)


@dataclass(frozen=True)
class KernelOptions:
    """`qengine bench kernels`: microseconds of linears and of attention."""

    shapes: str | None = option(
        "6144x4096,4096x4096,28672x4096,4096x14336",
        "Outputs x inputs of linears (4-bit and FP8 beside 16-bit); none: no linears",
        group=WORK,
    )
    rows: str = option("1,16,64,256,2048", "Rows of x for each", group=WORK)
    group_size: int = option(128, "Inputs that share a scale of a 4-bit linear", group=WORK)
    decodes: str | None = option(
        "1x8192,16x8192,64x1024,64x8192,256x640",
        "Sequences x cached tokens of decode attention; none: no attention",
        group=WORK,
    )
    heads: str = option("32x8x128", "Query heads x KV heads x head_dim", group=WORK)
    kv_dtypes: str = option("auto,fp8", "KV dtypes of attention", group=WORK)
    output_json: str | None = option(None, "Write the figures to this file", group=OUTPUT, metavar="FILE")

    def __post_init__(self) -> None:
        at_least(self, 16, "group_size")
        pairs_of(self.shapes)
        pairs_of(self.decodes, "--decodes", "64x8192,256x640")
        numbers_of("--rows", self.rows)
        heads_of(self.heads)


def numbers_of(flag: str, text: str) -> list[int]:
    """Positive whole numbers with commas between. Raises ConfigError."""
    if (found := _numbers(text, ",")) is None:
        raise ConfigError(f"{flag} is a list of positive numbers, without units", have=text, need="such as 1,2,4,8")
    return found


def heads_of(text: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim. Raises ConfigError."""
    found = _numbers(text, "x")
    if found is None or len(found) != 3:
        raise ConfigError("--heads is three positive numbers", have=text, need="such as 32x8x128")
    return found[0], found[1], found[2]


def _numbers(text: str, between: str) -> list[int] | None:
    parts = text.split(between)
    digits = all(part.strip().isdecimal() and len(part) < 16 for part in parts)
    return [int(part) for part in parts] if digits and all(int(part) for part in parts) else None


def pairs_of(text: str | None, flag: str = "--shapes", example: str = "6144x4096,4096x14336") -> list[tuple[int, int]]:
    """Pairs with commas between, such as the example; none for None and "none". Raises ConfigError."""
    if text is None or text == "none":
        return []
    found = [_numbers(part, "x") for part in text.split(",")]
    pairs = [(pair[0], pair[1]) for pair in found if pair is not None and len(pair) == 2]
    if len(pairs) != len(found):
        raise ConfigError(f"{flag} is a list of pairs of positive numbers", have=text, need=f"such as {example}")
    return pairs
