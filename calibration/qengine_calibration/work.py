"""What a calibration run has finished so far, on disk: layer by layer, so that a killed run can go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from qengine.runtime.checkpoint_writer import write_json, write_safetensors
from qengine.runtime.safetensors_file import FileHeader, read_header, read_tensor
from qengine_calibration.hidden import HiddenFile

STATE = "run.json"


class WorkFolder:
    """`done` layers are finished: each has its tensors and its facts, and the hidden states behind the last of them
    are there. A layer counts once its JSON file has its name, which is the last thing that happens to it."""

    def __init__(self, path: Path, key: str, hidden_size: int, resume: bool) -> None:
        """`key` names everything that the result depends on. Without `resume`, or for another key, what is there is
        thrown away; `lost` counts the layers that `resume` was asked for and another key stood in the way of."""
        self.path = path
        self.hidden_size = hidden_size
        self.lost = 0
        if not (resume and self._key() == key):
            self.lost = self._count() if resume else 0
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            self._write(STATE, {"key": key})
        self.done = self._count()

    def _count(self) -> int:
        done = 0
        while self._facts_file(done).is_file():
            done += 1
        return done

    def _key(self) -> str | None:
        try:
            state = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return state.get("key") if isinstance(state, dict) else None

    def hidden(self, layer: int) -> HiddenFile:
        """The hidden states in front of a layer."""
        return HiddenFile(self.path / f"hidden-{layer}.f32", self.hidden_size)

    def fresh_hidden(self, layer: int) -> HiddenFile:
        """The same, emptied."""
        (self.path / f"hidden-{layer}.f32").unlink(missing_ok=True)
        return self.hidden(layer)

    def save(self, layer: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Finish a layer. Its hidden states of before are no longer needed."""
        write_safetensors(self._tensor_file(layer), tensors)
        self._write(self._facts_file(layer).name, facts)
        self.done = layer + 1
        self.hidden(layer).path.unlink(missing_ok=True)

    def facts(self, layer: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._facts_file(layer).read_text(encoding="utf-8"))
        return value

    def tensors(self, layer: int) -> FileHeader:
        return read_header(self._tensor_file(layer))

    def read(self, header: FileHeader, name: str) -> torch.Tensor:
        return read_tensor(header, name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _tensor_file(self, layer: int) -> Path:
        return self.path / f"layer-{layer}.safetensors"

    def _facts_file(self, layer: int) -> Path:
        return self.path / f"layer-{layer}.json"

    def _write(self, name: str, value: Any) -> None:
        partial = self.path / (name + ".partial")
        write_json(partial, value)
        partial.rename(self.path / name)
