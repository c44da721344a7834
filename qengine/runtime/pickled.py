"""PyTorch's .bin and .pt weights: converted once to safetensors in the user's cache.

Unpickling can run any code, so the files are opened with torch's weights_only unpickler alone, which builds tensors and
plain containers; what it does not take is refused. Files in torch's zip format are mapped rather than read, so that the
peak is about one shard.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.runtime.accounting import first_names
from qengine.runtime.cache_dir import building, cache_root, short_name
from qengine.runtime.checkpoint import read_config
from qengine.runtime.checkpoint_writer import write_json, write_safetensors
from qengine.runtime.safetensors_file import CODES
from qengine.runtime.weight_files import (
    PICKLED,
    SAFETENSORS,
    UNFINISHED,
    WeightFiles,
    balance_index,
    weight_files,
)

VERSION = 1
"""Changes when the same files would give another copy; part of the fingerprint."""

WRAPPERS = ("state_dict", "model", "module")
"""Keys under which training code keeps a model's tensors."""

OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".npz", ".data")
MOST_COPIED = 64 << 20
"""Bytes of a file beside the weights (tokenizer, config, code) that is still copied."""

Say = Callable[[str], None]


def with_safetensors(folder: Path, load_format: str, say: Say = lambda line: None) -> Path:
    """`folder`, or its safetensors copy where `load_format` (auto, safetensors, pt, npcache) makes pickles count.

    auto takes pickled weights where there are no others, pt and npcache (the name that other engines give to such a
    cache) always. Raises CheckpointError when there are none, and for files that cannot be read safely.
    """
    return safetensors_copy(folder, say) if pickles_count(folder, load_format) else folder


def pickles_count(folder: Path, load_format: str) -> bool:
    """Whether `load_format` means the pickled weights of `folder`."""
    if load_format != "auto":
        return load_format in ("pt", "npcache")
    names = [p.name for p in folder.iterdir()]
    return bool(PICKLED.names(names)) and not SAFETENSORS.names(names)


def safetensors_copy(folder: Path, say: Say = lambda line: None) -> Path:
    """The copy of a folder of pickled weights in the user's cache, made when it is not there yet.

    Each file becomes one safetensors file; everything else but weights of other kinds is copied along. The copy's name
    holds a fingerprint of names, sizes and times: changed weights or configs get a new copy.
    """
    read_config(folder)
    found = pickled_files(folder)
    target = _target(folder, found)
    if target.is_dir():
        say(f"using the safetensors copy made before: {target}")
        return target
    say(f"{folder} holds pickled weights: making a safetensors copy (once): {target}")
    with building(target, say) as partial:
        if partial is not None:
            convert(found, partial, say)
            for path in companions(folder):
                shutil.copyfile(path, partial / path.name)
    return target


def pickled_files(folder: Path) -> WeightFiles:
    """The pickled weights that count. Raises CheckpointError when there are none, or when some of them are missing."""
    found = weight_files(folder, PICKLED)
    if found is None:
        raise CheckpointError(
            f"{folder} holds no pickled weights", need=" | ".join(f"*{s}" for s in PICKLED.suffixes),
            hint="--load-format auto",
        )
    return found


def made_before(folder: Path) -> Path | None:
    """The safetensors copy of `folder` where there is one; nothing is converted."""
    found = weight_files(folder, PICKLED)
    target = None if found is None else _target(folder, found)
    return target if target is not None and target.is_dir() else None


def _target(folder: Path, found: WeightFiles) -> Path:
    return cache_root() / "converted" / f"{short_name(folder)}-{fingerprint(folder, found)}"


def fingerprint(folder: Path, found: WeightFiles) -> str:
    """Twelve hex digits that change with the weight files' names, sizes or times and with what lies beside them."""
    digest = hashlib.sha256(str(VERSION).encode())
    for path in [*found.files, *companions(folder)]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def companions(folder: Path) -> list[Path]:
    """What belongs to a model beside its weights."""
    names = {p.name: p for p in sorted(folder.iterdir()) if p.is_file()}
    weights = {
        name for name in names
        if name.endswith((*PICKLED.suffixes, *SAFETENSORS.suffixes, *OTHER_WEIGHTS, ".index.json"))
    }  # fmt: skip
    return [p for name, p in names.items() if name not in weights and p.stat().st_size <= MOST_COPIED]


def convert(found: WeightFiles, target: Path, say: Say = lambda line: None) -> None:
    """Write one safetensors file for each pickled one, and an index where there are several."""
    count = len(found.files)
    held: dict[str, list[str]] = {}
    weight_map: dict[str, str] = {}
    for i, path in enumerate(found.files, 1):
        file = "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        tensors = read_pickled(path, say)
        held[path.name] = list(tensors)
        if found.listed is not None:
            tensors = {name: t for name, t in tensors.items() if found.listed.get(name) == path.name}
        if twice := [name for name in tensors if name in weight_map]:
            raise CheckpointError(f"{len(twice)} tensor(s) are in two files: {first_names(twice)}")
        weight_map.update(dict.fromkeys(tensors, file))
        write_safetensors(target / file, tensors)
        say(f"{path.name}: {len(tensors)} tensors")
        tensors.clear()  # before the next file is opened
    if found.listed is not None and (stray := balance_index(found.listed, held)):
        say(f"{len(stray)} tensor(s) lie elsewhere than the index says, left out: {first_names(stray)}")
    if count > 1:
        write_json(target / SAFETENSORS.index, {"metadata": {}, "weight_map": weight_map})


def read_pickled(path: Path, say: Say = lambda line: None) -> dict[str, torch.Tensor]:
    """The tensors of one file by name, mapped where the format allows it. Raises CheckpointError for a damaged file and
    for anything but a dict of plain tensors."""
    mapped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files use storages that torch deprecates
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # a damaged file makes torch raise anything from EOFError to RuntimeError
        if isinstance(e, pickle.UnpicklingError) or "TorchScript" in str(e):
            raise CheckpointError(
                f"{path.name} is refused: {_reason(e)}", need="tensors and plain containers only",
                hint="a safetensors copy of the model, made by somebody who trusts this file",
            ) from e
        raise CheckpointError(f"{path.name} cannot be read: {_reason(e)}", hint=UNFINISHED) from e
    tensors = _tensors(path, state, say)
    if bad := [f"{name}: {why}" for name, t in tensors.items() if (why := _unusable(t))]:
        raise CheckpointError(f"{path.name} holds {len(bad)} tensor(s) that are not read: {first_names(bad)}")
    return {name: t.detach() for name, t in tensors.items()}


def _tensors(path: Path, state: Any, say: Say) -> dict[str, torch.Tensor]:
    for key in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path.name} holds a {type(state).__name__}", need="a dict of tensors")
    tensors = {name: t for name, t in state.items() if isinstance(name, str) and isinstance(t, torch.Tensor)}
    others = [str(name) for name in state if name not in tensors]
    if not tensors:
        raise CheckpointError(f"{path.name} holds no tensors", have=first_names(others) or "an empty dict")
    if others:
        say(f"{path.name}: {len(others)} entries are no tensors, left out: {first_names(others)}")
    return tensors


def _unusable(t: torch.Tensor) -> str | None:
    if t.layout is not torch.strided or t.is_quantized or t.device.type != "cpu":
        return f"a {t.layout} tensor of {t.dtype} on {t.device}"
    if t.dtype not in CODES:
        return f"dtype {t.dtype}"
    if t.numel() * t.element_size() > t.untyped_storage().nbytes():
        return f"{list(t.shape)} out of {t.untyped_storage().nbytes()} stored bytes"
    return None


def _reason(e: Exception) -> str:
    """What the unpickler met, without torch's advice on how to run the file all the same."""
    text = str(e).strip()
    met = r"Unsupported global: GLOBAL \S+|Unsupported operand \d+|Trying to load unsupported [^\n]*"
    found = re.search(met, text)
    first = (text.splitlines() or [type(e).__name__])[0]
    return (found[0] if found else first.split(" In PyTorch")[0])[:200].strip()
