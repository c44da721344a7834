"""Reads safetensors files: headers without data, and single tensors without mapping the file.

Format: 8 bytes little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, which the
offsets cover exactly (https://github.com/huggingface/safetensors, "Format"). A file that is a byte too short or too
long does not match its header and is refused.

Tensors are read into memory of their own rather than mapped: mapped pages would stay resident beside the repacked
copy, and loading promises a peak of the model plus one module.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo
from qengine.runtime.weight_files import LFS_POINTER, not_fetched

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors dtype codes. Any other code in a file is refused by name."""

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Makes anonymous pages this process's own; Windows knows no other kind."""

MAX_DIMS = 64
"""Dimensions that torch gives a tensor at most."""

MAX_HEADER = 100_000_000
"""Bytes; the same limit as the safetensors library."""


@dataclass(frozen=True)
class FileHeader:
    """What one file holds: tensors in file order, and where each one's bytes lie (absolute start, length)."""

    path: Path
    tensors: dict[str, TensorInfo]
    spans: dict[str, tuple[int, int]]
    metadata: dict[str, str]


def tensor_bytes(info: TensorInfo) -> int:
    """Size of a tensor in the file."""
    return math.prod(info.shape) * DTYPES[info.dtype].itemsize


def read_header(path: Path) -> FileHeader:
    """Read and check one file's header; no data is read. Raises CheckpointError naming the file and the numbers."""
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            if f.read(len(LFS_POINTER)) == LFS_POINTER:
                raise not_fetched(path)
            f.seek(0)
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise _damaged(path, f"its header of {length} bytes does not fit into {size} bytes")
            raw = f.read(length)
    except OSError as e:
        raise CheckpointError(f"{path.name} cannot be read: {e.strerror or e}") from e
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except _TwiceError as e:
        raise _damaged(path, f"its header names {str(e)!r} twice") from e
    except (ValueError, RecursionError) as e:
        raise _damaged(path, f"its header is not JSON ({str(e)[:200]})") from e
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise _damaged(path, "its __metadata__ is not a JSON object")
    placed = sorted(((name, *_entry(path, name, e)) for name, e in entries.items()), key=lambda t: (t[2], t[3]))
    data, end = 8 + length, 0
    for name, _, start, stop in placed:
        if start != end:
            raise _damaged(path, f"tensor {name} starts at byte {start} where {end} was expected")
        end = stop
    if data + end != size:
        raise _damaged(path, f"it holds {size} bytes and its header describes {data + end}")
    return FileHeader(
        path,
        {name: info for name, info, _, _ in placed},
        {name: (data + start, stop - start) for name, _, start, stop in placed},
        metadata,
    )


class _TwiceError(ValueError):
    """A name comes twice in one JSON object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different: of equal ones, which json drops, none can be trusted."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _TwiceError(name)
            seen.add(name)
    return out


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    if not name.isprintable():
        raise _damaged(path, f"its header names a tensor {name!r}")
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        fine = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMS
        if not fine or any(type(n) is not int or n >= 1 << 63 for n in (start, stop, *shape)):
            raise ValueError
    except (TypeError, KeyError, ValueError) as e:
        raise _damaged(path, f"the header entry of tensor {name} is malformed") from e
    info = TensorInfo(name, dtype, tuple(shape))
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{path.name}: tensor {name} has an unknown dtype", have=info.dtype, need=" | ".join(DTYPES)
        )
    if min(info.shape, default=0) < 0 or stop - start != tensor_bytes(info):
        raise _damaged(path, f"tensor {name} {info.dtype} {list(info.shape)} spans {stop - start} bytes")
    return info, start, stop


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is damaged: {what}",
        hint="this looks like an unfinished or broken download; fetch the file again",
    )


def read_tensor(header: FileHeader, name: str) -> torch.Tensor:
    """One tensor on the CPU, as stored, in memory of its own."""
    info, (start, length) = header.tensors[name], header.spans[name]
    if not length:
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    # Anonymous pages rather than the heap: they go back to the system the moment the tensor is freed, where the heap
    # would keep holes of the size of whole modules.
    memory = mmap.mmap(-1, length, **PRIVATE)
    with header.path.open("rb", buffering=0) as f:
        f.seek(start)
        view, done = memoryview(memory), 0
        while done < length:
            count = f.readinto(view[done:])
            if not count:
                raise _damaged(header.path, f"it ended while tensor {name} was read")
            done += count
    return torch.frombuffer(memory, dtype=DTYPES[info.dtype]).reshape(info.shape)


def read_tensor_rows(header: FileHeader, name: str, rows: Sequence[int]) -> torch.Tensor:
    """[len(rows), columns] of a tensor [any, columns], on the CPU, as stored."""
    info, (start, _) = header.tensors[name], header.spans[name]
    columns = info.shape[1]
    out = torch.empty((len(rows), columns), dtype=DTYPES[info.dtype])
    size = columns * out.element_size()
    view = memoryview(out.view(torch.uint8).numpy().data).cast("B")
    with header.path.open("rb") as f:
        for i, row in enumerate(rows):
            f.seek(start + row * size)
            if f.readinto(view[i * size : (i + 1) * size]) != size:
                raise _damaged(header.path, f"it ended while tensor {name} was read")
    return out
