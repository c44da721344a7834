"""Which files of a model folder hold its weights: those that an index lists, or one set that needs no index.

Nothing is globbed together. Files that lie beside and do not count are returned by name. The same rules hold for
safetensors and for PyTorch's pickled files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qengine.errors import CheckpointError
from qengine.runtime.accounting import first_names

UNFINISHED = "this looks like an unfinished download; fetch the model again"
LONGEST_NAME = 255
LFS_POINTER = b"version https://git-lfs"
"""What a file begins with that Git LFS has not fetched yet (https://github.com/git-lfs/git-lfs, docs/spec.md)."""
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<i>\d{5})-of-(?P<n>\d{5})(?P<suffix>\.\w+)")


@dataclass(frozen=True)
class Kind:
    """One way of storing weights: file suffixes, the usual names of an index and of a single file, and names of other
    files that end like weights and are none."""

    suffixes: tuple[str, ...]
    index: str
    single: str
    preferred: str = ""
    no_weights: re.Pattern[str] = re.compile(r"(?!)")

    def names(self, files: Iterable[str]) -> list[str]:
        """Those of `files` that could be weights of this kind."""
        return sorted(f for f in files if f.endswith(self.suffixes) and not self.no_weights.fullmatch(f))


SAFETENSORS = Kind(
    (".safetensors",),
    "model.safetensors.index.json",
    "model.safetensors",
    "gptq_model-",
    no_weights=re.compile(r"kv_scales\.safetensors"),
)
PICKLED = Kind(
    (".bin", ".pt", ".pth", ".ckpt"),
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    no_weights=re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*|trainer_state)\.(bin|pt|pth)"),
)


@dataclass
class WeightFiles:
    """`files` in order; `listed` is the index's weight map, None without one; `stray` says of other files of the same
    kind why they do not count."""

    files: list[Path]
    listed: dict[str, str] | None = None
    stray: list[str] = field(default_factory=list)


def weight_files(folder: Path, kind: Kind) -> WeightFiles | None:
    """The files of this kind that count; None when there are none. Raises CheckpointError for lacking shards (with the
    names of the tensors, where an index knows them), a malformed index and more than one set of weights."""
    found = kind.names(p.name for p in folder.iterdir())
    index = _index_file(folder, kind)
    if index is not None:
        listed = read_index(index)
        files = sorted(set(listed.values()))
        gone = [file for file in files if not (folder / file).is_file()]
        if gone:
            names = [name for name, file in listed.items() if file in gone]
            raise CheckpointError(
                f"{index.name} names {len(gone)} file(s) that are not there: {first_names(gone)}; "
                f"missing tensors: {first_names(names)}",
                hint=UNFINISHED,
            )
        why = f"{index.name} does not list it"
    elif found:
        files, listed, why = _without_index(found, kind), None, "the weights are in {files}"
    else:
        return None
    if odd := [name for name in files if not (folder / name).is_file()]:
        link = (folder / odd[0]).is_symlink()
        raise CheckpointError(
            f"{first_names(odd)}: " + ("a link to nothing" if link else "no file"), hint=UNFINISHED if link else None
        )
    why = why.format(files=first_names(files))
    stray = [f"{name} is ignored: {why}" for name in found if name not in files]
    return WeightFiles([folder / name for name in files], listed, stray)


def read_index(path: Path) -> dict[str, str]:
    """An index's map from tensor to file. Raises CheckpointError for one that is no such map, and for names that would
    lead out of the folder."""
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path.name} has no weight_map", hint=UNFINISHED)
    if garbled := [name for name in listed if not name.isprintable()]:
        raise CheckpointError(f"{path.name} names a tensor {garbled[0]!r}", hint=UNFINISHED)
    odd = [name for name, file in listed.items() if not _is_file_name(file)]
    if odd:
        raise CheckpointError(
            f"{path.name} names no file of this folder for {len(odd)} tensor(s): {first_names(odd)}",
            have=repr(listed[odd[0]])[:80],
        )
    return listed


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= LONGEST_NAME:
        return False
    return value not in (".", "..") and value.isprintable() and not set(value) & set("/\\")


def not_fetched(path: Path) -> CheckpointError:
    """For a file that begins with `LFS_POINTER`."""
    return CheckpointError(
        f"{path.name} is a Git LFS pointer, a few lines of text that stand for the file",
        have=f"{path.stat().st_size} bytes",
        hint="`git lfs pull` in the folder, or a download of the file itself",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError for a file that cannot be read or holds anything else."""
    try:
        raw = path.read_bytes()
        if raw.startswith(LFS_POINTER):
            raise not_fetched(path)
        value = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path.name} cannot be read: {str(e)[:200]}", hint=UNFINISHED) from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return value


def _index_file(folder: Path, kind: Kind) -> Path | None:
    if (folder / kind.index).is_file():
        return folder / kind.index
    others = sorted(p for suffix in kind.suffixes for p in folder.glob(f"*{suffix}.index.json"))
    if len(others) > 1:
        raise CheckpointError(
            "more than one weight index", have=first_names([p.name for p in others]), need=kind.index
        )
    return others[0] if others else None


def _without_index(found: list[str], kind: Kind) -> list[str]:
    """The files that count when there is no index: the usual single name, complete numbered shards, or the only file
    there is."""
    if kind.single in found:
        return [kind.single]
    shards: dict[tuple[str, int, str], list[str]] = {}
    for name in found:
        if m := NUMBERED.fullmatch(name):
            shards.setdefault((m["stem"], int(m["n"]), m["suffix"]), []).append(name)
    single = [name for name in found if not NUMBERED.fullmatch(name)]
    named = [name for name in single if kind.preferred and name.startswith(kind.preferred)]
    sets = [[name] for name in named or ([] if shards else single)]
    for (stem, n, suffix), names in shards.items():
        wanted = [f"{stem}-{i:05d}-of-{n:05d}{suffix}" for i in range(1, n + 1)]
        gone = [name for name in wanted if name not in names]
        if gone:
            raise CheckpointError(f"{len(gone)} of {n} shards are not there: {first_names(gone)}", hint=UNFINISHED)
        sets.append(names)
    if len(sets) != 1:
        raise CheckpointError(
            "more than one set of weights and no index to choose", have=first_names([s[0] for s in sets]),
            hint=f"keep one of them in this folder, or name it {kind.single}",
        )
    return sets[0]


def balance_index(listed: Mapping[str, str], held: Mapping[str, Iterable[str]]) -> list[str]:
    """`held` are the tensors that each file holds, by file name. Returns those that lie elsewhere than the index says,
    with their file; raises CheckpointError for those that only the index names."""
    gone = [f"{name} ({file})" for name, file in listed.items() if name not in held[file]]
    if gone:
        raise CheckpointError(
            f"the index names {len(gone)} tensor(s) that their files do not hold: {first_names(gone)}",
            hint=UNFINISHED,
        )
    return [f"{name} ({file})" for file, names in held.items() for name in names if listed.get(name) != file]
