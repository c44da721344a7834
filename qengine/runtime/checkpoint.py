"""A model folder before any data is read: which files count, which tensors they hold, what config.json says.

Files that lie beside and do not count are named in the notes. This module knows no weight format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo
from qengine.runtime.accounting import first_names
from qengine.runtime.quant_config import QuantConfig, find_quant_config
from qengine.runtime.safetensors_file import FileHeader, read_header, read_tensor, read_tensor_rows, tensor_bytes
from qengine.runtime.weight_files import PICKLED, SAFETENSORS, UNFINISHED, balance_index, read_json, weight_files

FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass
class Checkpoint:
    """An opened model folder.

    `tensors` lists what the counting files hold, by name; `notes` are lines for the start-up report, those about files
    and tensors that do not count also in `stale`; `raw_config` is config.json as written; `quant` is the quantisation
    config, wherever it was found, or None.
    """

    folder: Path
    raw_config: dict[str, Any]
    quant: QuantConfig | None
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    _home: dict[str, FileHeader] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and the headers of the weight files.

        Raises CheckpointError when the folder is no model folder, holds only pickled weights (see
        `qengine.runtime.pickled`), lacks shards, or when index, headers and file sizes disagree; the message lists the
        missing names.
        """
        folder = Path(folder)
        raw = read_config(folder)
        quant, notes = find_quant_config(folder, raw)
        found = weight_files(folder, SAFETENSORS)
        if found is None:
            raise _no_weights(folder)
        headers = [read_header(path) for path in found.files]
        stale = [*found.stray, *_pickles(folder)]
        if found.listed is not None:
            by_file = {header.path.name: header for header in headers}
            stray = balance_index(found.listed, {file: header.tensors for file, header in by_file.items()})
            home = {name: by_file[file] for name, file in found.listed.items()}
            if stray:
                stale.append(f"{len(stray)} tensor(s) lie elsewhere than the index says, ignored: {first_names(stray)}")
        else:
            home = _homes(headers)
        tensors = {name: header.tensors[name] for name, header in home.items()}
        return cls(folder, raw, quant, tensors, [*notes, *stale], stale, home)

    @classmethod
    def config_only(cls, folder: str | Path) -> Checkpoint:
        """A model folder without its weights, for dummy ones: config.json and the quantisation config."""
        raw = read_config(Path(folder))
        quant, notes = find_quant_config(Path(folder), raw)
        return cls(Path(folder), raw, quant, {}, notes)

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, as stored."""
        return read_tensor(self._home[name], name)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Some rows of a matrix on the CPU, as stored, in the order given; nothing else of it is read."""
        return read_tensor_rows(self._home[name], name, rows)

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
        text = self.raw_config.get("text_config")
        inner = text.get("dtype") if isinstance(text, dict) else None
        for value in (self.raw_config.get("dtype"), self.raw_config.get("torch_dtype"), inner):
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
    return read_json(path)


def _homes(headers: Sequence[FileHeader]) -> dict[str, FileHeader]:
    home: dict[str, FileHeader] = {}
    twice: list[str] = []
    for header in headers:
        for name in header.tensors:
            if name in home:
                twice.append(f"{name} (in {home[name].path.name} and in {header.path.name})")
            home[name] = header
    if twice:
        raise CheckpointError(f"{len(twice)} tensor(s) are there twice and no index chooses: {first_names(twice)}")
    return home


def _pickles(folder: Path) -> list[str]:
    """Notes on pickled weights that lie beside safetensors."""
    names = PICKLED.names(p.name for p in folder.iterdir())
    return [f"{name} is ignored: the safetensors files count (--load-format pt takes it instead)" for name in names]


def _no_weights(folder: Path) -> CheckpointError:
    pickles = PICKLED.names(p.name for p in folder.iterdir())
    if pickles:
        return CheckpointError(
            f"{folder} holds only pickled weights, which could run any code if they were simply opened",
            have=first_names(pickles), need="*.safetensors",
            hint="`qengine pull FOLDER`, or serving with --load-format auto: torch's safe unpickler then makes a "
            "safetensors copy in the cache",
        )
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    hint = "a safetensors copy of the model; GGUF files are not read" if ggufs else UNFINISHED
    return CheckpointError(f"{folder} holds no *.safetensors file", have=first_names(ggufs) or None, hint=hint)
