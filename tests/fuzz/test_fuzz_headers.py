"""Headers and indexes that lie or are garbage: one CheckpointError, no crash, no hang, no memory taken for a claim."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from qengine.errors import CheckpointError
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.safetensors_file import DTYPES, read_header, read_tensor
from qengine.runtime.weight_files import read_index
from toy_models import llama_config, write_json

FUZZ = settings(max_examples=300)
MOST = 8 << 20
"""Bytes of Python memory that reading a small file's header may take, whatever it claims."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SHAPES = st.lists(st.integers(-2, 1 << 62) | st.integers(0, 4), max_size=4) | JSON
OFFSETS = st.lists(st.integers(-8, 64) | st.integers(0, 1 << 64), min_size=2, max_size=2) | JSON
ENTRIES = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from([*DTYPES, "F4"]) | JSON, "shape": SHAPES, "data_offsets": OFFSETS, "x": JSON}
)
HEADERS = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), ENTRIES | JSON, max_size=4)


def written(folder: Path, length: int, body: bytes) -> Path:
    path = folder / "w.safetensors"
    path.write_bytes((length % (1 << 64)).to_bytes(8, "little") + body)
    return path


def reads_or_refuses(path: Path) -> bool:
    """True when the header is accepted; then every tensor must be readable as it says."""
    tracemalloc.start()
    try:
        header = read_header(path)
        for name, info in header.tensors.items():
            tensor = read_tensor(header, name)
            assert tuple(tensor.shape) == info.shape and tensor.dtype is DTYPES[info.dtype]
        return True
    except CheckpointError as e:
        assert "\n" not in str(e) and len(str(e)) < 2000
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] < MOST
        tracemalloc.stop()


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(body)
    reads_or_refuses(path)


@FUZZ
@given(HEADERS | JSON, st.binary(max_size=64), st.integers(-9, 9) | st.integers(0, 1 << 64))
def test_any_header(tmp_path: Path, header: Any, data: bytes, off: int) -> None:
    raw = json.dumps(header).encode()
    reads_or_refuses(written(tmp_path, len(raw), raw + data))
    reads_or_refuses(written(tmp_path, len(raw) + off, raw + data))


TABLE = torch.arange(6.0).reshape(2, 3)
GOOD = save({"a.weight": TABLE, "b": torch.zeros(0, 2), "c": torch.tensor(1, dtype=torch.int8)})


@FUZZ
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.booleans())
def test_one_byte_changed_or_the_rest_cut_off(tmp_path: Path, at: int, value: int, cut: bool) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(GOOD[:at] if cut else GOOD[:at] + bytes([value]) + GOOD[at + 1 :])
    accepted = reads_or_refuses(path)
    assert not (cut and accepted)


def test_the_unchanged_file_is_read(tmp_path: Path) -> None:
    """Control: the fuzzed checks would pass if everything were refused."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(GOOD)
    assert reads_or_refuses(path) and torch.equal(read_tensor(read_header(path), "a.weight"), TABLE)


@pytest.mark.parametrize(
    "header, words",
    [
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
         "names 'a' twice"),
        ('{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "names 'dtype' twice"),
        ("[" * 100_000, "not JSON"),
        ('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', "malformed"),
        ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "malformed"),
        ('{"a":{"dtype":"U8","shape":[' + "1," * 64 + '1],"data_offsets":[0,1]}}', "malformed"),
        ('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}', "spans 0 bytes"),
        ('{"__metadata__":[1]}', "__metadata__"),
    ],
    ids=["name-twice", "key-twice", "deep", "float", "bool", "dims", "overflow", "metadata"],
)  # fmt: skip
def test_known_tricks(header: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(written(tmp_path, len(header), header.encode() + b"\0"))


FILES = st.sampled_from(["model.safetensors", "x.safetensors", "../x.safetensors", ".", "", "a" * 300, "\0", "é" * 200])


@FUZZ
@given(st.dictionaries(st.text(max_size=5), FILES | JSON, max_size=4) | JSON)
def test_any_index(tmp_path: Path, weight_map: Any) -> None:
    write_json(tmp_path / "config.json", llama_config())
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    try:
        listed = read_index(index)
        assert all("/" not in file for file in listed.values())
        assert set(Checkpoint.open(tmp_path).tensors) == set(listed)
    except CheckpointError as e:
        assert "\n" not in str(e)
