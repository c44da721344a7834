"""A model folder before any data is read: which files count, which tensors they hold, what config.json says.

Nothing is globbed together: the index decides, or one file. Files that lie beside and do not count are named in the
notes. This module knows no weight format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo
from qengine.runtime.quant_config import QuantConfig, find_quant_config
from qengine.runtime.safetensors_file import FileHeader, read_header, read_tensor, tensor_bytes

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
UNFINISHED = "this looks like an unfinished download; fetch the model again"
FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass
class Checkpoint:
    """An opened model folder.

    `tensors` lists what the counting files hold, by name; `notes` are lines for the start-up report; `raw_config` is
    config.json as written; `quant` is the quantisation config, wherever it was found, or None.
    """

    folder: Path
    raw_config: dict[str, Any]
    quant: QuantConfig | None
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)
    _home: dict[str, FileHeader] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and the headers of the weight files.

        Raises CheckpointError when the folder is no model folder, holds only pickled weights, lacks shards, or when
        index, headers and file sizes disagree; the message lists the missing names.
        """
        folder = Path(folder)
        raw = read_config(folder)
        quant, notes = find_quant_config(folder, raw)
        files, listed, more = _weight_files(folder)
        headers = [read_header(path) for path in files]
        home: dict[str, FileHeader] = {}
        for header in headers:
            for name in header.tensors:
                if name in home:
                    raise CheckpointError(f"tensor {name} is in {home[name].path.name} and in {header.path.name}")
                home[name] = header
        if listed is not None:
            home, stray = _balance_index(listed, headers, home)
            more += stray
        tensors = {name: header.tensors[name] for name, header in home.items()}
        return cls(folder, raw, quant, tensors, [*notes, *more], home)

    @classmethod
    def config_only(cls, folder: str | Path) -> Checkpoint:
        """A model folder without its weights, for dummy ones: config.json and the quantisation config."""
        raw = read_config(Path(folder))
        quant, notes = find_quant_config(Path(folder), raw)
        return cls(Path(folder), raw, quant, {}, notes)

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, as stored."""
        return read_tensor(self._home[name], name)

    def file_position(self, name: str) -> tuple[str, int]:
        """(file name, byte offset): sorting by it reads the disk in order."""
        header = self._home[name]
        return header.path.name, header.spans[name][0]

    def split(self, name: str, pieces: Sequence[TensorInfo]) -> None:
        """Show tensor `name` as `pieces` instead, which lie in it one after the other and make up all of it; one piece
        of the same shape renames it. No data is read. Raises CheckpointError when a piece's name is taken."""
        header = self._home[name]
        start, length = header.spans[name]
        if sum(tensor_bytes(piece) for piece in pieces) != length:
            raise ValueError(f"the pieces of {name} do not make up its {length} bytes")
        for piece in pieces:
            if piece.name in self.tensors:
                raise CheckpointError(f"{header.path.name} holds {piece.name} twice: under this name and in {name}")
            size = tensor_bytes(piece)
            header.tensors[piece.name], header.spans[piece.name] = piece, (start, size)
            self.tensors[piece.name], self._home[piece.name] = piece, header
            start += size
        del self.tensors[name], self._home[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor_bytes(info) for info in self.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The model's own float dtype: what config.json states, else that of most of the stored float values."""
        text = self.raw_config.get("text_config") or {}
        for value in (self.raw_config.get("dtype"), self.raw_config.get("torch_dtype"), text.get("dtype")):
            stated = getattr(torch, str(value).removeprefix("torch."), None)
            if isinstance(stated, torch.dtype) and stated.is_floating_point:
                return stated
        return _commonest_dtype(self.tensors)

    def is_dense(self) -> bool:
        """True when nothing says that the weights are quantised: no config for it and only float tensors."""
        return self.quant is None and all(t.dtype in FLOATS for t in self.tensors.values() if len(t.shape) > 1)


def _commonest_dtype(tensors: dict[str, TensorInfo]) -> torch.dtype:
    sizes = dict.fromkeys(FLOATS, 0)
    for info in tensors.values():
        if info.dtype in sizes:
            sizes[info.dtype] += tensor_bytes(info)
    best = max(sizes, key=lambda code: sizes[code])
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(best, torch.float32)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as written. Raises CheckpointError when there is no folder, no file or no JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", hint="a model folder with config.json, or a hub name")
    path = folder / "config.json"
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:8]
        raise CheckpointError(
            f"{folder} holds no config.json", have=", ".join(found) or "an empty folder",
            hint="a Hugging Face model folder",
        )
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path.name} cannot be read: {e}", hint=UNFINISHED) from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return value


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None, list[str]]:
    """(files that count, the index's weight map or None, notes about files that do not count)."""
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    index = _index_file(folder)
    if index is not None:
        listed = _read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{index.name} has no weight_map", hint=UNFINISHED)
        files = sorted(set(listed.values()))
        gone = [file for file in files if not (folder / file).is_file() or Path(file).name != file]
        if gone:
            names = [name for name, file in listed.items() if file in gone]
            raise CheckpointError(
                f"{index.name} names {len(gone)} file(s) that are not there: {_first(gone)}; "
                f"missing tensors: {_first(names)}",
                hint=UNFINISHED,
            )
        why = f"{index.name} does not list it"
    else:
        files, listed, why = _without_index(folder, found), None, "the weights are in {files}"
    why = why.format(files=_first(files))
    stray = [f"{name} is ignored: {why}" for name in found if name not in files]
    stray += [
        f"{p.name} is ignored: pickled weights are never loaded"
        for p in sorted(folder.iterdir()) if p.suffix in PICKLES and p.name != "training_args.bin"
    ]
    return [folder / name for name in files], listed, stray


def _index_file(folder: Path) -> Path | None:
    if (folder / INDEX).is_file():
        return folder / INDEX
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise CheckpointError("more than one weight index", have=_first([p.name for p in others]), need=INDEX)
    return others[0] if others else None


def _without_index(folder: Path, found: list[str]) -> list[str]:
    """The files that count when there is no index: model.safetensors, AutoGPTQ's gptq_model-*.safetensors, complete
    numbered shards, or the only file there is."""
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if not found:
        raise _no_weights(folder)
    shards: dict[tuple[str, int], list[str]] = {}
    for name in found:
        if m := SHARD.fullmatch(name):
            shards.setdefault((m["stem"], int(m["n"])), []).append(name)
    single = [name for name in found if not SHARD.fullmatch(name)]
    named = [name for name in single if name.startswith("gptq_model-")]
    sets = [[name] for name in named or ([] if shards else single)]
    for (stem, n), names in shards.items():
        gone = [name for i in range(1, n + 1) if (name := f"{stem}-{i:05d}-of-{n:05d}.safetensors") not in names]
        if gone:
            raise CheckpointError(f"{len(gone)} of {n} shards are not there: {_first(gone)}", hint=UNFINISHED)
        sets.append(names)
    if len(sets) != 1:
        raise CheckpointError(
            "more than one set of weights and no index to choose", have=_first([s[0] for s in sets]),
            hint="keep one of them in this folder, or name it model.safetensors",
        )
    return sets[0]


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        return CheckpointError(
            f"{folder} holds only pickled weights, which can run any code when they are opened",
            have=_first(pickles), need="*.safetensors", hint="a safetensors copy of the model",
        )
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    hint = "a safetensors copy of the model; GGUF files are not read" if ggufs else UNFINISHED
    return CheckpointError(f"{folder} holds no *.safetensors file", have=_first(ggufs) or None, hint=hint)


def _balance_index(
    listed: dict[str, str], headers: list[FileHeader], home: dict[str, FileHeader]
) -> tuple[dict[str, FileHeader], list[str]]:
    """What the index and the headers agree on, and notes about tensors that only a header names."""
    by_file = {header.path.name: header for header in headers}
    gone = [f"{name} ({file})" for name, file in listed.items() if name not in by_file[file].tensors]
    if gone:
        raise CheckpointError(
            f"the index names {len(gone)} tensor(s) that their files do not hold: {_first(gone)}", hint=UNFINISHED
        )
    stray = [name for name in home if name not in listed]
    notes = [f"{len(stray)} tensor(s) are in the files and not in the index, ignored: {_first(stray)}"] if stray else []
    return {name: by_file[file] for name, file in listed.items()}, notes


def _first(names: list[str], limit: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
