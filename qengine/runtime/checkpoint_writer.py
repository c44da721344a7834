"""Writes a model's tensors as safetensors, in shards of bounded size, so that no more than one shard is in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qengine.runtime.safetensors_file import CODES

SHARD_BYTES = 2 << 30


class CheckpointWriter:
    """Collects tensors in the order they come; the same tensors in the same order give the same bytes.

    One shard becomes model.safetensors; several become model-0000i-of-0000N.safetensors with an index.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add one CPU tensor; it is written at the latest by `finish`."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        path = self.folder / f"part-{len(self._shards)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it readable by its owner alone
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        """Write what is left, give the shards their names and write the index if there is more than one."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{i}.safetensors").rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to one file, one after the other, so that no more than one is copied at a time. Tensors that
    share memory are each written out."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, t in tensors.items():
        start, end = end, end + t.numel() * t.element_size()
        header[name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for t in tensors.values():
            f.write(t.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
