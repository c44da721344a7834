"""Pickled weights: converted once and exactly, or refused with the reason; nothing in them ever runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qengine.config import EngineConfig
from qengine.errors import CheckpointError
from qengine.prepare import prepare_model
from qengine.runtime.cache_dir import VARIABLE
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.pickled import read_pickled, safetensors_copy, with_safetensors
from toy_models import llama_config, llama_tensors, make_bytetok, make_tiny, write_json

Tensors = dict[str, torch.Tensor]
CONFIG = llama_config(num_hidden_layers=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def pickled(folder: Path, shards: int = 1, index: bool = True, zipped: bool = True, **extra: Any) -> Tensors:
    """A folder as transformers used to save it; `extra` goes into the last shard."""
    folder.mkdir(parents=True)
    tensors = llama_tensors(CONFIG)
    write_json(folder / "config.json", CONFIG)
    make_bytetok(folder)
    names, weight_map = list(tensors), {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        state = {n: tensors[n] for n in part} | (extra if i == shards - 1 else {})
        torch.save(state, folder / file, _use_new_zipfile_serialization=zipped)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1 and index:
        write_json(folder / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})
    return tensors


@pytest.mark.parametrize("shards, index", [(1, False), (3, True), (3, False)], ids=["one", "indexed", "numbered"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_values_and_companions_are_the_same(shards: int, index: bool, zipped: bool, tmp_path: Path) -> None:
    source = tmp_path / "model"
    want = pickled(source, shards, index, zipped)
    copy = safetensors_copy(source)
    checkpoint = Checkpoint.open(copy)
    assert set(checkpoint.tensors) == set(want) and checkpoint.notes == []
    assert all(torch.equal(checkpoint.read(name), t) for name, t in want.items())
    files = sorted(copy.glob("*.safetensors"))
    assert len(files) == shards
    assert set().union(*(load_file(f) for f in files)) == set(want)  # the library reads them too
    assert (copy / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not list(copy.glob("*.bin*"))


def test_the_copy_is_made_once_and_again_when_something_changes(tmp_path: Path) -> None:
    source = tmp_path / "model"
    tensors = pickled(source)
    said: list[str] = []
    copy = safetensors_copy(source, said.append)
    assert "making a safetensors copy (once)" in said[0]
    assert safetensors_copy(source, said.append) == copy and "made before" in said[-1]
    torch.save({n: t + 1 for n, t in tensors.items()}, source / "pytorch_model.bin")
    os.utime(source / "pytorch_model.bin", ns=(1, 1))
    other = safetensors_copy(source)
    assert other != copy
    name = "model.norm.weight"
    assert torch.equal(Checkpoint.open(other).read(name), tensors[name] + 1)
    write_json(source / "generation_config.json", {"eos_token_id": 7})
    assert safetensors_copy(source) not in (copy, other)


def test_tied_and_overlapping_tensors_are_each_written_out(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    table = torch.arange(12.0).reshape(4, 3)
    torch.save({"embed": table, "head": table, "row": table[1], "param": torch.nn.Parameter(table)}, path)
    got = read_pickled(path)
    assert torch.equal(got["head"], table) and torch.equal(got["row"], table[1])
    assert type(got["param"]) is torch.Tensor and not got["param"].requires_grad
    folder = tmp_path / "model"
    pickled(folder, embed=table, head=table, row=table[1], turned=table.t())
    stored = load_file(safetensors_copy(folder) / "model.safetensors")
    for name, want in {"embed": table, "head": table, "row": table[1], "turned": table.t()}.items():
        assert torch.equal(stored[name], want)


class Evil:
    """Creates a file when it is unpickled by plain pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_what_the_safe_unpickler_refuses_never_runs(zipped: bool, tmp_path: Path, cache: Path) -> None:
    trace = tmp_path / "trace"
    source = tmp_path / "model"
    pickled(source, zipped=zipped, evil=Evil(trace))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is refused: .*mkdir.*tensors and plain containers"):
        safetensors_copy(source)
    assert not trace.exists() and not list((cache / "converted").iterdir())
    # Control: the file would have run it.
    torch.load(source / "pytorch_model.bin", weights_only=False)
    assert trace.is_dir()


def write(path: Path, what: Any) -> Path:
    torch.save(what, path)
    return path


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: write(p, torch.nn.Linear(2, 2)), "is refused: Unsupported global.*Linear"),
        (lambda p: write(p, [torch.ones(1)]), "holds a list; need: a dict of tensors"),
        (lambda p: write(p, {"a": 1}), "holds no tensors; have: a"),
        (lambda p: write(p, {"a": torch.ones(2, dtype=torch.complex64)}), r"1 tensor\(s\).*a: dtype torch.complex64"),
        (lambda p: write(p, {"a": torch.eye(2).to_sparse()}), "a: a torch.sparse_coo tensor"),
        (lambda p: write(p, {"a": torch.ones(1).expand(10**6, 10**7)}), r"a: \[1000000, 10000000\] out of 4 stored"),
        (lambda p: (p.write_bytes(b"") and p) or p, "cannot be read"),
        (lambda p: p.write_bytes(b"hello") and p, "cannot be read"),
        (lambda p: p.write_bytes(pickle.dumps({"a": 1})) and p, "is refused"),
        (lambda p: p.write_bytes(write(p, {"a": torch.ones(99)}).read_bytes()[:-60]) and p, "cannot be read"),
    ],
    ids=["module", "list", "no-tensor", "complex", "sparse", "expanded", "empty", "junk", "pickle", "truncated"],
)  # fmt: skip
def test_files_that_are_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as e:
        read_pickled(make(tmp_path / "w.bin"))
    assert "\n" not in str(e.value) and "weights_only" not in str(e.value)


def test_wrapped_states_and_other_entries(tmp_path: Path) -> None:
    said: list[str] = []
    state = {"epoch": 3, "state_dict": {"a": torch.ones(1), "step": 5}}
    got = read_pickled(write(tmp_path / "w.pt", state), said.append)
    assert list(got) == ["a"] and said == ["w.pt: 1 entries are no tensors, left out: step"]


def test_shards_that_lack_or_repeat_tensors(tmp_path: Path) -> None:
    source = tmp_path / "gone"
    pickled(source, 3)
    (source / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.bin; missing tensors: model\.layers.*unfinished"):
        safetensors_copy(source)
    twice = tmp_path / "twice"
    pickled(twice, 3, False, **{"model.embed_tokens.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are in two files: model\.embed_tokens\.weight"):
        safetensors_copy(twice)
    lacking = tmp_path / "lacking"
    pickled(lacking, 3)
    torch.save({"x": torch.ones(1)}, lacking / "pytorch_model-00003-of-00003.bin")
    with pytest.raises(CheckpointError, match=r"index names \d+ tensor\(s\) that their files do not hold"):
        safetensors_copy(lacking)


def test_load_formats(tmp_path: Path) -> None:
    only = tmp_path / "only"
    pickled(only)
    for name in ("auto", "pt", "npcache"):
        assert with_safetensors(only, name) == safetensors_copy(only)
    assert with_safetensors(only, "safetensors") == only
    with pytest.raises(CheckpointError, match=r"only pickled weights.*pytorch_model\.bin.*--load-format auto"):
        Checkpoint.open(only)
    beside = make_tiny(tmp_path / "both", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="holds no pickled weights"):
        with_safetensors(beside, "pt")
    torch.save({"x": torch.ones(1)}, beside / "pytorch_model.bin")
    assert with_safetensors(beside, "auto") == beside
    assert Checkpoint.open(beside).stale == [
        "pytorch_model.bin is ignored: the safetensors files count (--load-format pt takes it instead)"
    ]
    assert list(Checkpoint.open(with_safetensors(beside, "npcache")).tensors) == ["x"]


def test_prepared_models_are_converted(tmp_path: Path) -> None:
    source = tmp_path / "model"
    want = pickled(source, 2)
    said: list[str] = []
    for name in ("auto", "npcache"):
        prepared = prepare_model(EngineConfig(model=str(source), load_format=name), said.append)
        assert prepared.model is not None
        assert set(Checkpoint.open(prepared.model).tensors) == set(want)
    assert sum("making a safetensors copy" in line for line in said) == 1


MEASURE = """
import sys, torch
from pathlib import Path
from qengine.runtime.pickled import safetensors_copy
Path("/proc/self/clear_refs").write_text("5")
status = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
before = status()
safetensors_copy(Path(sys.argv[1]))
print(status() - before)
"""


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_the_peak_is_about_one_shard(zipped: bool, tmp_path: Path) -> None:
    source, size = tmp_path / "model", 32 << 20
    source.mkdir()
    write_json(source / "config.json", CONFIG)
    for i in range(1, 4):
        parts = {f"t{i}.{j}": torch.full((size // 16,), float(j)) for j in range(4)}
        torch.save(parts, source / f"w-{i:05d}-of-00003.bin", _use_new_zipfile_serialization=zipped)
    out = subprocess.run([sys.executable, "-c", MEASURE, str(source)], capture_output=True, text=True, check=True)
    assert size * 0.2 < int(out.stdout) < size * 1.9  # first use of torch.load takes some megabytes of its own
