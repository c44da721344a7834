"""Opening model folders: which files count, damaged ones, pickles, and where the quantisation config lies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qengine.errors import CheckpointError
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.model_config import load_config
from qengine.runtime.safetensors_file import DTYPES, read_header, read_tensor
from toy_models import awq_config, llama_config, llama_tensors, make_tiny, make_tiny_awq, write_json

INDEX = "model.safetensors.index.json"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny", shards=2, tokenizer=False)


def test_values_equal_the_safetensors_library(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    expected = load_file(sharded / SHARD_1) | load_file(sharded / SHARD_2)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
    assert checkpoint.dtype is torch.float32
    assert checkpoint.notes == []


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(tmp_path: Path, code: str) -> None:
    dtype = DTYPES[code]
    raw = (torch.arange(3 * 5 * dtype.itemsize, dtype=torch.int64) * 37 % 2 + 56).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(3, 5)
    path = tmp_path / "one.safetensors"
    if code == "F8_E8M0":  # not every safetensors release writes it
        header = json.dumps({"t": {"dtype": code, "shape": [3, 5], "data_offsets": [0, 15]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw.numpy().tobytes())
    else:
        save_file({"t": tensor, "empty": torch.empty(0, 2), "scalar": torch.tensor(1.5)}, path)
    header = read_header(path)
    read = read_tensor(header, "t")
    assert read.dtype is dtype and header.tensors["t"].dtype == code
    assert torch.equal(read.view(torch.uint8).flatten(), raw)


@pytest.mark.parametrize("name", [SHARD_1, "config.json", INDEX])
def test_a_git_lfs_pointer_is_called_one(sharded: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4370000000\n"
    (sharded / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=rf"^{name} is a Git LFS pointer.*git lfs pull"):
        Checkpoint.open(sharded)
    (sharded / name).write_text(pointer[1:])  # control: not every text is one
    with pytest.raises(CheckpointError, match=f"^{name} (is damaged|cannot be read)"):
        Checkpoint.open(sharded)


def test_missing_shard(sharded: Path) -> None:
    """C11 (a)."""
    gone = list(load_file(sharded / SHARD_2))
    (sharded / SHARD_2).unlink()
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(sharded)
    text = str(e.value)
    assert SHARD_2 in text and "unfinished download" in text
    assert sum(name in text for name in gone) == 10
    assert len(gone) == 11 and "and 1 more" in text


def test_index_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    """C11 (b)."""
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.0.self_attn.ghost.weight"] = SHARD_1
    write_json(sharded / INDEX, index)
    with pytest.raises(CheckpointError, match=r"self_attn\.ghost\.weight.*unfinished download"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("change", [-1, 1], ids=["truncated", "longer"])
def test_a_byte_too_few_or_too_many(sharded: Path, change: int) -> None:
    """C11 (f)."""
    data = (sharded / SHARD_1).read_bytes()
    (sharded / SHARD_1).write_bytes(data[:-1] if change < 0 else data + b"\0")
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(sharded)
    assert SHARD_1 in str(e.value) and str(len(data)) in str(e.value) and "download" in str(e.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "header"),
        (b"\xff" * 8 + b"{}", "header"),
        ((5).to_bytes(8, "little") + b"{bad}", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    ],
    ids=["empty", "huge-header", "bad-json", "list"],
)
def test_damaged_headers(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        read_header(path)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "spans 4 bytes"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "unknown dtype; have: F4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "starts at byte 8"),
        ({"dtype": "F32", "shape": [2]}, "malformed"),
    ],
    ids=["short", "dtype", "gap", "no-offsets"],
)
def test_headers_that_contradict_themselves(tmp_path: Path, entry: dict[str, object], problem: str) -> None:
    header = json.dumps({"t": entry}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=problem):
        read_header(path)


def test_stray_consolidated_file_is_named_and_ignored(sharded: Path) -> None:
    """C11 (g): the index wins; reading the stray file instead would change every value."""
    tensors = load_file(sharded / SHARD_1) | load_file(sharded / SHARD_2)
    save_file({n: t + 1 for n, t in tensors.items()}, sharded / "consolidated.safetensors")
    checkpoint = Checkpoint.open(sharded)
    assert any("consolidated.safetensors is ignored" in note for note in checkpoint.notes)
    assert all(torch.equal(checkpoint.read(n), t) for n, t in tensors.items())


def test_tensors_outside_the_index_are_ignored_and_named(sharded: Path) -> None:
    extra = load_file(sharded / SHARD_2) | {"stale.weight": torch.ones(2)}
    save_file(extra, sharded / SHARD_2)
    checkpoint = Checkpoint.open(sharded)
    assert "stale.weight" not in checkpoint.tensors
    assert any("stale.weight" in note for note in checkpoint.notes)


def single(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", llama_config())
    save_file({"t": torch.full((2,), float(len(name)))}, folder / name)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "reference.safetensors"], "model.safetensors"),
        (["gptq_model-4bit-128g.safetensors", "reference.safetensors"], "gptq_model-4bit-128g.safetensors"),
        (["weights.safetensors"], "weights.safetensors"),
    ],
    ids=["model", "autogptq", "single"],
)
def test_without_an_index_one_file_counts(tmp_path: Path, names: list[str], chosen: str) -> None:
    for name in names:
        single(tmp_path, name)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("t")[0] == len(chosen)
    assert len(checkpoint.notes) == len(names) - 1 and all("reference" in note for note in checkpoint.notes)


def test_two_candidates_are_refused_by_name(tmp_path: Path) -> None:
    single(tmp_path, "a.safetensors")
    single(tmp_path, "b.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors"):
        Checkpoint.open(tmp_path)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert len(Checkpoint.open(sharded).tensors) == 21
    (sharded / SHARD_2).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 2 shards are not there: {SHARD_2}"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "config.json", llama_config())
    torch.save({"t": torch.ones(1)}, tmp_path / name)
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(tmp_path)
    assert name in str(e.value) and "run any code" in str(e.value)


def test_a_pickle_beside_safetensors_is_named_and_ignored(tmp_path: Path) -> None:
    make_tiny(tmp_path, tokenizer=False, num_hidden_layers=1)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    (note,) = Checkpoint.open(tmp_path).notes
    assert note.startswith("pytorch_model.bin is ignored: the safetensors files count")


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        Checkpoint.open(tmp_path)
    write_json(tmp_path / "config.json", llama_config())
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Checkpoint.open(tmp_path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    """A link to nothing is what a cleaned hub cache leaves; a pipe must not be waited for."""
    path = make_tiny(tmp_path) / "model.safetensors"
    for make, words in (
        (lambda: path.symlink_to("/nowhere"), r"model\.safetensors: a link to nothing.*unfinished download"),
        (lambda: path.mkdir(), r"model\.safetensors: no file"),
        (lambda: os.mkfifo(path), r"model\.safetensors: no file"),
    ):
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission denied"):
        read_header(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 65}, ["model_type 'llama'", "65"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "int"]),
        ({"model_type": "nope"}, ["nope", "a model type that the installed transformers knows"]),
    ],
    ids=str,
)
def test_the_whole_reason_of_a_config_that_is_not_understood(
    tmp_path: Path, fields: dict[str, object], words: list[str]
) -> None:
    folder = make_tiny(tmp_path)
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **fields})
    with pytest.raises(CheckpointError) as e:
        load_config(Checkpoint.open(folder))
    assert all(w in str(e.value) for w in words), str(e.value)
    assert ("installed transformers" in str(e.value)) == (fields.get("model_type") == "nope")


OLD_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize("home", ["config.json", "text_config", "quant_config.json", "quantize_config.json"])
def test_quantisation_config_is_found_in_all_its_homes(tmp_path: Path, home: str) -> None:
    """C08's places (1) to (3), and the file that GPTQ tools write."""
    config = llama_config()
    if home == "config.json":
        config["quantization_config"] = awq_config(64)
    elif home == "text_config":
        config["text_config"] = {"quantization_config": awq_config(64)}
    else:
        write_json(tmp_path / home, OLD_AWQ)
    write_json(tmp_path / "config.json", config)
    save_file(llama_tensors(config), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.quant is not None
    assert checkpoint.quant.method == ("gptq" if home == "quantize_config.json" else "awq")
    assert home in checkpoint.quant.source
    assert not checkpoint.is_dense()


def test_no_quantisation_config(tmp_path: Path) -> None:
    """C08's place (4): the tensors alone still tell a quantised checkpoint from a 16-bit one."""
    dense = make_tiny(tmp_path / "dense", tokenizer=False)
    assert Checkpoint.open(dense).quant is None and Checkpoint.open(dense).is_dense()
    awq, _ = make_tiny_awq(tmp_path / "awq", tokenizer=False, quantization_config=None)
    assert Checkpoint.open(awq).quant is None and not Checkpoint.open(awq).is_dense()


def test_homes_that_disagree_are_noted(tmp_path: Path) -> None:
    folder, _ = make_tiny_awq(tmp_path, tokenizer=False)
    write_json(folder / "quant_config.json", OLD_AWQ | {"q_group_size": 128})
    assert Checkpoint.open(folder).notes == [
        "group_size is 64 in config.json quantization_config and 128 in quant_config.json: the former counts"
    ]


def test_what_one_home_does_not_say_another_does(tmp_path: Path) -> None:
    """The zero convention of asymmetric weights cannot be told from their data; a null says nothing."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "dynamic": None}
    folder = make_tiny(tmp_path, tokenizer=False, quantization_config=gptq)
    more = {"wbits": 4, "sym": True, "format": "gptq_v2", "dynamic": {"-:.*o_proj": {}}, "damp_percent": 0.1}
    write_json(folder / "quantize_config.json", more)
    write_json(folder / "quant_config.json", {"version": "gemm"})  # another method's
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quant is not None
    assert checkpoint.quant.config == gptq | {"format": "gptq_v2", "dynamic": {"-:.*o_proj": {}}}
    notes = "\n".join(checkpoint.notes)
    for field in ("checkpoint_format", "dynamic"):
        assert f"config.json quantization_config says nothing of {field}: quantize_config.json counts" in notes
    assert "sym is False in config.json quantization_config and True in quantize_config.json" in notes


def test_a_config_without_a_method_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tokenizer=False, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="names no quant_method"):
        Checkpoint.open(folder)
    # llm-compressor's first key says which method it is, and held the config one level down.
    config = llama_config(compression_config={"quantization_config": {"format": "dense"}, "sparsity_config": {}})
    write_json(folder / "config.json", config)
    found = Checkpoint.open(folder).quant
    assert found is not None and found.method == "compressed-tensors"
