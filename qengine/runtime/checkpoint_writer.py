"""Writes a model's tensors as safetensors, in shards of bounded size, so that no more than one shard is in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
