"""Makes a quantised copy of a checkpoint: module by module, the same bytes every time, all or nothing.

The copy is an ordinary checkpoint of the format: config.json with its quantization_config, safetensors, tokenizer,
chat template and generation config. This module knows no format; a plugin's quantizer makes the tensors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from qengine.errors import CheckpointError, ConfigError
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.models.registry import NATIVE, build_model
from qengine.plugin import DeviceInfo, LinearSpec, Quantizer
from qengine.runtime.cache_dir import building
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import CheckpointWriter, write_json
from qengine.runtime.model_config import load_config

VERSION = 2
"""Changes when the same source would give another copy; part of the fingerprint."""

GROUP_SIZES = (128, 64, 32)
"""Tried in this order: fewer scales first."""

MAX_WORKERS = 8
"""Modules in flight at once: bounds memory."""

COPIED = (".json", ".jinja", ".txt", ".model")
COPIED_NAMES = ("LICENSE", "NOTICE")
NOT_COPIED = (
    "config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "kv_scales.json",
    "calibration.json", "kv_calibration.json",
)  # fmt: skip

Tick = Callable[[int, int], None]
"""Called after each tensor with (tensors done, tensors in all)."""


def quantize_checkpoint(source: Path, target: Path, quantizer: Quantizer, tick: Tick | None = None) -> None:
    """Write `target`, a copy of `source` whose linears are quantised where the quantizer accepts them.

    Tensors are read, quantised and written in file order, a few at a time; everything else is copied as stored. The
    embedding and a tied head stay as they are. `target` appears when it is complete, and not at all otherwise.
    """
    checkpoint = Checkpoint.open(source)
    if not checkpoint.is_dense():
        method = checkpoint.quant.method if checkpoint.quant else "integer tensors"
        raise CheckpointError(f"{source} is quantised already", have=method, need="a 16-bit checkpoint")
    specs, dense = linear_specs(checkpoint)
    skipped = [*dense, *left_out(specs.values(), quantizer)]
    with building(target) as partial:
        if partial is None:
            return
        writer = CheckpointWriter(partial)
        names = sorted(checkpoint.tensors, key=checkpoint.file_position)
        chosen = {name: spec for name, spec in specs.items() if spec.name not in skipped}
        for done, tensors in enumerate(_converted(checkpoint, names, chosen, quantizer), 1):
            for name, tensor in tensors.items():
                writer.put(name, tensor)
            if tick is not None:
                tick(done, len(names))
        writer.finish()
        write_json(partial / "config.json", checkpoint.raw_config | {"quantization_config": quantizer.config(skipped)})
        for path in copied_files(source):
            shutil.copyfile(path, partial / path.name)


def _converted(
    checkpoint: Checkpoint, names: list[str], specs: Mapping[str, LinearSpec], quantizer: Quantizer
) -> Iterator[dict[str, torch.Tensor]]:
    """What becomes of each tensor, in order. Modules are worked on in parallel, one thread each: quantizers take many
    small steps, which torch's own threads would only wait for each other in."""

    def convert(name: str) -> dict[str, torch.Tensor]:
        spec, tensor = specs.get(name), checkpoint.read(name)
        if spec is None:
            return {name: tensor}
        try:
            made = quantizer.quantize(spec, tensor)
        except ValueError as e:
            raise CheckpointError(f"{checkpoint.folder} cannot be quantised: {e}") from e
        return {f"{spec.name}.{leaf}": part for leaf, part in made.items()}

    threads = torch.get_num_threads()
    workers = min(threads, MAX_WORKERS)
    pool = ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(1))
    try:
        waiting: deque[Future[dict[str, torch.Tensor]]] = deque()
        for name in names:
            waiting.append(pool.submit(convert, name))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


def linear_specs(checkpoint: Checkpoint) -> tuple[dict[str, LinearSpec], list[str]]:
    """Weight tensor name -> spec of every linear that may be quantised and has a weight of its own (a tied head has
    none), and the names of those that stay as they are (routers). Raises CheckpointError for a model without any."""
    config = load_config(checkpoint)
    ctx = ModelContext(
        config, torch.device("cpu"), DeviceInfo("cpu"), torch.float32, torch.float32, max_model_len=1
    )
    leaves = build_model(ctx).leaves
    shared = {name for leaf in leaves if not isinstance(leaf, Linear) for name, _ in leaf.needs()}
    linears = [leaf for leaf in leaves if isinstance(leaf, Linear)]
    specs = [spec for leaf in linears if leaf.quantizable for spec in leaf.specs]
    dense = [spec.name for leaf in linears if not leaf.quantizable for spec in leaf.specs]
    if not specs:
        raise CheckpointError(
            f"{checkpoint.folder} has no linears that can be quantised here", have=getattr(config, "model_type", None),
            need=" | ".join(NATIVE),
        )  # fmt: skip
    return {f"{s.name}.weight": s for s in specs if f"{s.name}.weight" not in shared}, dense


def left_out(specs: Collection[LinearSpec], quantizer: Quantizer) -> dict[str, str]:
    """Names of the linears that the quantizer does not take, and why not. Raises ConfigError when it takes none."""
    reasons = {spec.name: reason for spec in specs if (reason := quantizer.accepts(spec)) is not None}
    if specs and len(reasons) == len(specs):
        why = " | ".join(f"{reason} ({count} linears)" for reason, count in Counter(reasons.values()).most_common(3))
        raise ConfigError(f"no linear of this model can be quantised like that: {why}")
    return reasons


def group_size(specs: list[LinearSpec]) -> int:
    """The largest usual group size that divides the inputs of every linear, else of most of them."""
    counts = {g: sum(s.in_features % g == 0 for s in specs) for g in GROUP_SIZES}
    best = max(counts, key=lambda g: (counts[g], g))
    if not counts[best]:
        widths = sorted({s.in_features for s in specs})
        raise ConfigError("no group size divides this model's linears", have=f"inputs {widths}", need=GROUP_SIZES)
    return best


def copied_files(folder: Path) -> list[Path]:
    """Tokenizer, template, generation config and licence files of a model folder."""
    return [
        p
        for p in sorted(folder.iterdir())
        if p.is_file()
        and (p.suffix in COPIED or p.name.startswith(COPIED_NAMES))
        and p.name not in NOT_COPIED
        and not p.name.endswith(".safetensors.index.json")
    ]


def fingerprint(checkpoint: Checkpoint) -> str:
    """Twelve hex digits that change with the config, the copied files, or any weight file's size, time or header."""
    digest = hashlib.sha256(f"{VERSION} {json.dumps(checkpoint.raw_config, sort_keys=True)}".encode())
    for path in copied_files(checkpoint.folder):
        digest.update(path.name.encode() + path.read_bytes())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {checkpoint.file_position(name)}".encode())
    for file in sorted({checkpoint.file_position(name)[0] for name in checkpoint.tensors}):
        stat = (checkpoint.folder / file).stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]
