"""The calibration file: KV scales that `qengine calibrate` measured, beside a model or anywhere else.

Two files: kv_scales.safetensors holds "<attention layer>.k_scale" and ".v_scale" (float32, one value or one per KV
head), kv_scales.json says what they are for: the KV dtype (one name, or {"<attention layer>": name}, or {"<attention
layer>": {"k": name, "v": name}} where K and V differ), what they were measured for, in the same form (layers that it
would damage too much have another KV dtype), the method, the text, figures, and the fingerprint of the model that they
were measured on. The JSON is written last and names the other file's hash, so that a pair is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError, ConfigError
from qengine.plugin import KVDtype, TensorInfo
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import write_json, write_safetensors
from qengine.runtime.safetensors_file import FileHeader, read_header, read_tensor

TENSORS, FACTS = "kv_scales.safetensors", "kv_scales.json"
PAIR = f"{TENSORS} and {FACTS}"
FORMAT = "qengine kv scales 1"
SAMPLES, SAMPLE_BYTES = 64, 1024
"""Of each weight file, so much is hashed at evenly spread places."""
IGNORED_CONFIG = ("_name_or_path", "transformers_version", "quantization_config")
AGAIN = "qengine calibrate for this model, or no kv_scales files beside it"


@dataclass
class KVSidecar:
    """`facts` is kv_scales.json. A source of tensors, like a checkpoint."""

    path: Path
    facts: Mapping[str, Any]
    header: FileHeader
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor:
        return read_tensor(self.header, name)

    def file_position(self, name: str) -> tuple[str, int]:
        return self.path.name, self.header.spans[name][0]

    def dtype_of(self, layer: str, side: str) -> str | None:
        """The KV dtype that the scales of a layer's side are for, or that the file says it is to have; None when it
        says nothing of the layer."""
        return _said_of(self.facts.get("kv_dtype"), layer, side)

    @property
    def kv_dtypes(self) -> list[str]:
        """Every KV dtype in it, first what it was measured for."""
        return list(dict.fromkeys(_names(self.facts.get("measured_for")) + _names(self.facts.get("kv_dtype"))))

    def measured(self, side: str) -> set[str]:
        """The KV dtypes that scales of this side of some layer were measured for."""
        said = self.facts.get("measured_for", self.facts.get("kv_dtype"))
        return set(_names(said, side))

    def is_about(self, plugin: type[KVDtype]) -> bool:
        """Whether the file may name exceptions to this KV dtype. One that does not say what it was measured for is
        about those that take scales."""
        return plugin.max_value is not None or "measured_for" in self.facts

    def exception(self, layer: str, side: str, kv_dtype: str) -> str | None:
        """The other KV dtype that the file names for a layer's side, where it is about `kv_dtype` there."""
        own, first = self.dtype_of(layer, side), self.facts.get("measured_for")
        about = kv_dtype in self.kv_dtypes if first is None else _said_of(first, layer, side) == kv_dtype
        return own if about and own != kv_dtype else None

    @property
    def source(self) -> str:
        """For the start-up report."""
        text = self.facts.get("text") or {}
        return (
            f"calibration file {self.path} ({self.facts.get('method')}, per {self.facts.get('granularity')}, "
            f"{text.get('tokens')} tokens)"
        )


def _is_spelled(said: Any) -> bool:
    """Whether it is one of the forms in which a file says KV dtypes."""
    layers = said.values() if isinstance(said, dict) else [said]
    sides = [own.get(side) if isinstance(own, dict) else own for own in layers for side in ("k", "v")]
    return bool(sides) and all(isinstance(name, str) for name in sides)


def _said_of(said: Any, layer: str, side: str) -> str | None:
    own = said.get(layer) if isinstance(said, Mapping) else said
    return own.get(side) if isinstance(own, Mapping) else own


def _names(said: Any, side: str | None = None) -> list[str]:
    """All names, or those of one side, in what a file says about KV dtypes."""
    out: list[str] = []
    for own in said.values() if isinstance(said, Mapping) else [said]:
        sides = own if isinstance(own, Mapping) else {"k": own, "v": own}
        out += [name for which, name in sides.items() if name is not None and side in (None, which)]
    return list(dict.fromkeys(out))


def read_sidecar(place: str | Path | None, checkpoint: Checkpoint) -> KVSidecar | None:
    """The calibration file in `place` (a folder, or one of the two files), or beside the model where `place` is None;
    None when there is none beside it.

    Raises ConfigError when `place` is no such place, CheckpointError when one of the files is missing, when the pair is
    damaged, or when it was made for another model.
    """
    if place is None and not (checkpoint.folder / TENSORS).is_file():
        return None
    path, about = sidecar_files(checkpoint.folder if place is None else _named_folder(Path(place)))
    try:
        facts = json.loads(about.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{about} cannot be read: {e}", hint=AGAIN) from e
    known = isinstance(facts, dict) and facts.get("format") == FORMAT
    if not known or not all(_is_spelled(facts.get(key, facts.get("kv_dtype"))) for key in ("kv_dtype", "measured_for")):
        raise CheckpointError(f"{about} is no calibration file that this version reads", need=FORMAT, hint=AGAIN)
    if facts.get("sha256") != file_hash(path):
        raise CheckpointError(f"{path} is not the file that {FACTS} describes", hint=AGAIN)
    if facts.get("model") != model_fingerprint(checkpoint):
        raise CheckpointError(
            f"{path} was made for another model, or the model has changed since", have=facts.get("model"),
            need=model_fingerprint(checkpoint), hint=AGAIN,
        )  # fmt: skip
    header = read_header(path)
    return KVSidecar(path, facts, header, header.tensors)


def check_place(place: str | Path) -> None:
    """Raise what `read_sidecar` raises where --kv-scales `place` holds no calibration file; none is opened."""
    sidecar_files(_named_folder(Path(place)))


def sidecar_files(folder: Path) -> tuple[Path, Path]:
    """Both files of a folder. Raises CheckpointError when one of them is missing."""
    path, about = folder / TENSORS, folder / FACTS
    if gone := [p.name for p in (path, about) if not p.is_file()]:
        raise CheckpointError(f"KV scales: {folder} holds no {gone[0]}", need=PAIR, hint=AGAIN)
    return path, about


def _named_folder(place: Path) -> Path:
    """The folder that --kv-scales names, itself or by one of the two files. Raises ConfigError where it is neither."""
    folder = place.parent if place.name in (TENSORS, FACTS) else place
    if not folder.exists() or (folder == place and not place.is_dir()):
        have = "a file of another name" if place.exists() else "no such path"
        raise ConfigError(
            f"--kv-scales {place}", have=have, need=f"a folder with {PAIR}, or one of these files",
            hint="the folder that `qengine calibrate MODEL --kv-dtype fp8 --out FOLDER` wrote, or no --kv-scales",
        )  # fmt: skip
    return folder


def write_sidecar(
    folder: Path, model: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> Path:
    """Write both files, each renamed into its place when complete. `model` is the fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    path, about = folder / TENSORS, folder / FACTS
    about.unlink(missing_ok=True)
    partial = folder / f".{TENSORS}.partial"
    write_safetensors(partial, tensors)
    digest = file_hash(partial)
    partial.rename(path)
    partial = folder / f".{FACTS}.partial"
    write_json(partial, {"format": FORMAT, "model": model, "sha256": digest, **facts})
    partial.rename(about)
    return path


def file_hash(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def model_fingerprint(checkpoint: Checkpoint) -> str:
    """Names a model by what it is, not by where it lies: its config, and every weight file's size, header and samples
    of its data. A copy has the same, a fine-tuned or requantised one another."""
    config = {k: v for k, v in checkpoint.raw_config.items() if k not in IGNORED_CONFIG}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted({checkpoint.file_position(name)[0] for name in checkpoint.tensors}):
        path = checkpoint.folder / file
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            digest.update(f"{size} {length}".encode() + f.read(length))
            first = 8 + length
            for i in range(SAMPLES):
                f.seek(first + (size - first) * i // SAMPLES)
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
