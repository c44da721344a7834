"""Written shards read back whole, in order and byte for byte the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.checkpoint_writer import CheckpointWriter
from toy_models import llama_config, write_json


def write(folder: Path, limit: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_json(folder / "config.json", llama_config())
    gen = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(8, 16, generator=gen).half() for i in range(7)}
    writer = CheckpointWriter(folder, limit)
    for name, tensor in tensors.items():
        writer.put(name, tensor.t() if name == "t3" else tensor)
    writer.finish()
    return tensors


@pytest.mark.parametrize(("limit", "files"), [(1 << 20, 1), (600, 4), (1, 7)], ids=["one", "pairs", "single"])
def test_shards(tmp_path: Path, limit: int, files: int) -> None:
    tensors = write(tmp_path / "a", limit)
    checkpoint = Checkpoint.open(tmp_path / "a")
    assert checkpoint.notes == [] and set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor.t() if name == "t3" else tensor)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == files
    write(tmp_path / "b", limit)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
