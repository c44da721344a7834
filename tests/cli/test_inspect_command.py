"""`qengine inspect` on toy checkpoints: what it prints, its exit code, and that it reads headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from awq_files import make_awq
from load_model import plan_folder
from qengine.cli.main import main
from qengine.errors import CheckpointError
from qengine.runtime import checkpoint, safetensors_file
from qengine.runtime.model_texts import ModelTexts
from toy_models import awq_config, llama_config, make_bytetok, make_tiny, make_tiny_awq, write_json

KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("inspect read a tensor")

    monkeypatch.setattr(safetensors_file, "read_tensor", refuse)
    monkeypatch.setattr(checkpoint, "read_tensor", refuse)


def inspect(capsys: Capture, *argv: str, code: int = 0) -> dict[str, list[str]]:
    """The printed sections by title; lines outside of any under ""."""
    assert main(["inspect", *argv]) == code
    sections: dict[str, list[str]] = {"": []}
    title = ""
    for line in capsys.readouterr().out.splitlines():
        if not line:
            title = ""
        elif line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
            sections[title] = []
        else:
            sections[title].append(line.strip())
    return sections


def as_json(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["inspect", "--json", *argv]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["servable"] == (code == 0)
    return found


def edit(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in change.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_dense_model_and_its_plan(tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    args = (str(tmp_path), "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "1M")
    found = inspect(capsys, *args)
    assert found[""][0] == f"Model: {tmp_path}" and found[""][-1] == "It can be served."
    # 2 layers, K and V, 2 heads of 64 values, 4 bytes each.
    assert {"KV cache: auto", "KV cache bytes for one token: 2,048"} <= set(found["On this machine"])
    fp8 = inspect(capsys, *args, "--kv-dtype", "fp8")["On this machine"]
    assert {"KV cache: fp8_e4m3", "KV cache bytes for one token: 512"} <= set(fp8)
    for start in ("Memory plan: ", "KV cache size: "):
        assert any(line.startswith(start) for line in found["On this machine"])
    assert not {"Problems", "Missing", "Stale files and tensors", "Config against tensors"} & found.keys()


def test_modules_and_bytes_by_scheme(tmp_path: Path, capsys: Capture) -> None:
    make_tiny_awq(tmp_path, num_hidden_layers=4)
    name = "model.layers.2.mlp.up_proj"
    edit(tmp_path, {f"{name}.{leaf}": None for leaf in ("qweight", "qzeros", "scales")})
    edit(tmp_path, {f"{name}.weight": torch.zeros(512, 256).half()})
    found = as_json(capsys, str(tmp_path), "--device", "cpu")
    groups = {(g["scheme"], g["modules"], g["numbers"]): g["count"] for g in found["modules"]}
    up = "model.layers.*.mlp.up_proj"
    assert groups["awq 4-bit g64", up, "0-1,3"] == 3 and groups["16-bit", up, "2"] == 1
    assert sum(groups.values()) == 4 * 7 + 1 and groups["16-bit", "lm_head", ""] == 1
    sizes = found["bytes"]
    assert sum(s["file"] for s in sizes.values()) == found["file_bytes"]
    stored = load_file(tmp_path / "model.safetensors")
    own = sum(t.nbytes for n, t in stored.items() if n.endswith(("qweight", "qzeros", "scales")))
    assert sizes["awq 4-bit g64"]["file"] == own
    # Zeros are kept as bytes on a GPU; a CPU keeps a dense copy too.
    assert 0.9 * own < sizes["awq 4-bit g64"]["gpu"] < 1.1 * own < sizes["awq 4-bit g64"]["cpu"]
    assert [line.split()[0] for line in inspect(capsys, str(tmp_path))["Bytes by scheme"][-1:]] == ["total"]


def test_kernels_of_every_generation(tmp_path: Path, capsys: Capture) -> None:
    make_tiny_awq(tmp_path, dtype="bfloat16")
    found = as_json(capsys, str(tmp_path), "--device", "cpu")
    awq = {a["device"]: (a["dtype"], a["kind"]) for a in found["kernels"]["awq 4-bit g64"]}
    assert awq == {"sm_75": ("float16", "native"), "cpu": ("bfloat16", "native")} | {
        f"sm_{sm}": ("bfloat16", "native") for sm in (80, 86, 89, 90, 100, 120)
    }
    fp8 = {a["device"]: a["kind"] for a in found["kv_kernels"]["fp8_e4m3"]}
    assert [d for d, kind in fp8.items() if kind == "native"] == ["sm_89", "sm_90", "sm_100", "sm_120"]
    assert set(found["kv_kernels"]) == {"auto", "fp8_e4m3", "fp8_e5m2"}
    text = inspect(capsys, str(tmp_path), "--dtype", "bfloat16", "--device", "cpu")["Kernels by device: weights"]
    assert any(line.startswith("sm_75: refused: ") and "no bfloat16" in line for line in text)


def test_everything_that_is_wrong_at_once(tmp_path: Path, capsys: Capture) -> None:
    make_tiny_awq(tmp_path)
    edit(
        tmp_path,
        {
            "model.layers.1.mlp.down_proj.qzeros": None,
            "model.layers.0.self_attn.q_proj.qweight": torch.zeros(3, 3, dtype=torch.int32),
            "model.norm.weight": torch.zeros(7).half(),
            "model.layers.0.mystery.weight": torch.ones(3),
        },
    )
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    found = inspect(capsys, str(tmp_path), code=1)
    assert found["Missing"] == ["model.layers.1.mlp.down_proj.qzeros"]
    assert found["Wrong shape or dtype"][0].startswith("model.norm.weight: have F16 7")
    assert found["In the file and not used"] == ["model.layers.0.mystery.weight"]
    assert "consolidated.safetensors is ignored" in found["Stale files and tensors"][0]
    assert len(found["Problems"]) == 2 and "no layout of AWQ" in found["Problems"][0]
    assert found[""][-1] == "It could not be served: 2 problem(s)." and "On this machine" not in found
    assert any(line.startswith("refused") and "q_proj" in line for line in found["Modules"])


def test_contradictions_are_no_problem(tmp_path: Path, capsys: Capture) -> None:
    make_awq(tmp_path, "gemv", quant={"version": "gemm"})
    write_json(tmp_path / "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "gemv"})
    found = inspect(capsys, str(tmp_path), "--device", "cpu")["Config against tensors"]
    assert any("group_size is 128 in config.json" in line for line in found)
    assert any("'gemm' in the config" in line and "14 modules" in line for line in found)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_kv_scales_with_their_source(value: float, tmp_path: Path, capsys: Capture) -> None:
    """Values are not read: the report says so."""
    make_tiny(tmp_path)
    names = [f"model.layers.{i}.self_attn.{p}_proj.{p}_scale" for i in range(2) for p in "kv"]
    edit(tmp_path, {name: torch.tensor(value) for name in names})
    found = inspect(capsys, str(tmp_path), "--device", "cpu")
    assert found["KV scales"] == ["checkpoint k_proj.k_scale, v_proj.v_scale: 2 layer(s)"]
    assert found["Not checked, because it needs data"][0].startswith("values of 4 KV scales")
    assert found[""][-1] == "It can be served, as far as headers tell."
    edit(tmp_path, {"model.layers.1.self_attn.v_proj.v_scale": None})
    partial = inspect(capsys, str(tmp_path), "--device", "cpu")
    assert "fp8_e4m3 is refused" in partial["KV scales"][-1] and "only one of K and V" in partial["KV scales"][-1]
    assert "only one of K and V" in inspect(capsys, str(tmp_path), "--kv-dtype", "fp8", code=1)["Problems"][0]


def test_what_serving_would_make_or_refuse(tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    assert not inspect(capsys, str(tmp_path), "--quant", "dense").get("Problems")
    assert "makes a copy with awq" in inspect(capsys, str(tmp_path), "--quant", "awq")["Notes"][0]
    found = inspect(capsys, str(tmp_path), "--quant", "compressed-tensors", code=1)
    assert "compressed-tensors weights cannot be made from this 16-bit checkpoint" in found["Problems"][0]


@pytest.mark.parametrize("text", ["{bad", '{"temperature": -1}', '{"eos_token_id": "x"}'])
def test_another_tokenizer_does_not_mend_generation_config(text: str, tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    for more in ([], ["--tokenizer", str(tmp_path)]):
        found = inspect(capsys, str(tmp_path), *more, "--device", "cpu", code=1)
        assert len(found["Problems"]) == 1 and found[""][-1] == "It could not be served: 1 problem(s)."
    with pytest.raises(CheckpointError) as e:  # what serving says
        ModelTexts.read(tmp_path)
    assert found["Problems"] == [str(e.value)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_config_that_cannot_be_meant_is_told(tied: bool, tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    fine = llama_config(tie_word_embeddings=tied)
    write_json(tmp_path / "config.json", fine)
    told = "WARNING: config.json's architectures says BananaForCausalLM, which is no llama (LlamaForCausalLM): read as"
    ends = "WARNING: eos_token_id 1000000000 (config.json, generation_config.json) is no token of this model"
    notes = "\n".join(inspect(capsys, str(tmp_path), "--device", "cpu").get("Notes", []))
    assert "WARNING" not in notes
    write_json(tmp_path / "config.json", fine | {"architectures": ["BananaForCausalLM"], "eos_token_id": 10**9})
    notes = "\n".join(inspect(capsys, str(tmp_path), "--device", "cpu")["Notes"])
    assert notes.count(told) == 1 and notes.count(ends) == 1 and "ids 0..319" in notes


def test_a_layer_that_config_json_does_not_count(tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    write_json(tmp_path / "config.json", llama_config(num_hidden_layers=1))
    found = inspect(capsys, str(tmp_path), "--device", "cpu", code=1)
    assert len(found["In the file and not used"]) == 9
    assert "have: num_hidden_layers 1, the file has model.layers.0..1" in found["Problems"][0]


FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CT_KV: dict[str, object] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}


@pytest.mark.parametrize("quant", [awq_config(64), FP8], ids=["awq", "fp8"])
def test_plain_weights_under_a_quantisation_config(
    quant: dict[str, object], tmp_path: Path, capsys: Capture
) -> None:
    make_tiny(tmp_path, quantization_config=quant)
    found = inspect(capsys, str(tmp_path), "--device", "cpu")
    method = quant["quant_method"]
    (line,) = found["Config against tensors"]
    assert line.startswith(f"config.json quantization_config says {method}, but the file holds plain 16-bit weights in")
    assert f"all {2 * 7} linears" in line and found[""][1].startswith("Type: llama; weights: 16-bit, against what the")
    plan = plan_folder(tmp_path)[1]
    assert plan.warnings == [line] and plan.unquantised


@pytest.mark.parametrize(
    "quant", [{**awq_config(64), "modules_to_not_convert": ["model.layers"]}, CT_KV], ids=["all left out", "KV alone"]
)
def test_a_config_that_leaves_all_in_16_bits_is_none(
    quant: dict[str, object], tmp_path: Path, capsys: Capture
) -> None:
    make_tiny(tmp_path, quantization_config=quant)
    found = inspect(capsys, str(tmp_path), "--device", "cpu")
    assert "Config against tensors" not in found and "16-bit" not in found[""][1]


def test_a_model_without_tokenizer_is_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "texts").mkdir()
    make_tiny(tmp_path)
    told = "serving would refuse its texts"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert any(told in note for note in inspect(capsys, str(tmp_path))["Notes"])
    tokenizer = str(make_bytetok(tmp_path / "texts"))
    assert not any(told in note for note in inspect(capsys, str(tmp_path), "--tokenizer", tokenizer).get("Notes", []))


def test_what_needs_data_is_said(tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path)
    write_json(tmp_path / "config.json", llama_config(tie_word_embeddings=True))
    edit(tmp_path, {"model.layers.0.self_attn.q_proj.bias": torch.ones(256)})
    found = inspect(capsys, str(tmp_path), "--device", "cpu")["Not checked, because it needs data"]
    assert found == [
        "whether lm_head.weight and model.embed_tokens.weight are equal: assumed, as config.json says",
        "whether 1 biases that the model does not have are all zero",
    ]


def test_missing_shard(tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "unfinished download" in inspect(capsys, str(tmp_path), code=1)["Problems"][0]


@pytest.mark.parametrize(
    "quant, words",
    [
        ({"quant_method": "quark"}, "no installed plugin reads"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"bits": 4}, "names no quant_method"),
    ],
)
def test_configs_that_are_refused(quant: dict[str, object], words: str, tmp_path: Path, capsys: Capture) -> None:
    make_tiny(tmp_path, quantization_config=quant)
    assert words in as_json(capsys, str(tmp_path), code=1)["problems"][0]


def test_pickled_weights_have_no_headers(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny(tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder)]) == 2
    assert "qengine pull" in capsys.readouterr().err
    assert main(["pull", str(folder)]) == 0
    copy = capsys.readouterr().out.strip()
    assert inspect(capsys, str(folder), "--device", "cpu")[""][0] == f"Model: {copy}"


@pytest.mark.parametrize("argv", [[], ["no/such/folder/here"], [".", "--load-format", "dummy"]])
def test_nothing_to_inspect(argv: list[str], capsys: Capture) -> None:
    assert main(["inspect", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("qengine: error: ")
