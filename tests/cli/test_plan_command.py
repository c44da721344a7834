"""`qengine plan`: the text that serving refuses with, JSON, the chart, what it reads and what it does not."""

from __future__ import annotations

import importlib.util
import json
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from published_models import write_config
from qengine.cli.main import main
from qengine.config import EngineConfig
from qengine.errors import UserError
from qengine.runtime import device
from qengine.runtime.engine import Engine
from qengine.runtime.machine import this_machine
from qengine.runtime.pickled import with_safetensors
from toy_models import make_tiny, make_tiny_awq

POOL = "1M"
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), dtype="bfloat16", max_position_embeddings=131072)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


@pytest.mark.parametrize(("kv", "tokens"), [("auto", 1024), ("fp8", 2048)])
def test_capacity_doubles_as_it_does_when_served(
    tiny: Path, kv: str, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """CASES C16: what plan says is what the engine has."""
    flags = ["--device", "cpu", "--kv-dtype", kv, "--kv-cache-memory-bytes", POOL]
    code, found = planned(capsys, str(tiny), *flags)
    assert code == 0 and found["fits"] and found["memory"]["max_model_len"] == tokens
    assert found["memory"]["token_bytes"] == 2**20 / tokens
    engine = Engine.from_config(
        EngineConfig(model=str(tiny), device="cpu", kv_cache_dtype=kv, kv_cache_memory_bytes=2**20)
    )
    assert engine.facts.max_model_len == tokens and engine.facts.kv_tokens == found["memory"]["kv_tokens"]
    kept = sum(size for name, size in found["memory"]["lines"] if name.startswith(("weights", "KV cache", "null")))
    line = next(line for line in engine.facts.report if "Weights and KV cache: planned" in line)
    assert "WARNING" not in line and "(0.0% apart)" in line
    real = sum(t.nbytes for leaf in engine.runner.model.leaves for t in leaf.buffers().values())
    assert abs(real + engine.runner.cache.nbytes - kept) <= 0.02 * kept


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_memory_bytes": 2**20, "max_model_len": 4096},
        {"kv_cache_memory_bytes": 2**20, "max_model_len": 4096, "kv_cache_dtype": "fp8"},
        {"dtype": "float16"},
        {"quantization": "awq_of_another_kind"},
    ],
)
def test_refuses_with_the_words_of_serving(
    tiny: Path, flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as served:
        Engine.from_config(EngineConfig(model=str(tiny), device="cpu", **flags))
    words = [word for k, v in flags.items() for word in ("--" + k.replace("_", "-"), str(v))]
    if "quantization" in flags:
        assert main(["plan", str(tiny), "--device", "cpu", *words]) == 2
        assert "awq_of_another_kind" in capsys.readouterr().err
        return
    code, found = planned(capsys, str(tiny), "--device", "cpu", *words)
    assert code == 1 and not found["fits"]
    assert found["refused"] == " ".join(str(served.value).split())
    if found["would_work"]:
        again, _ = planned(capsys, str(tiny), "--device", "cpu", *words, *found["would_work"].split())
        assert again == 0, found["would_work"]


def test_c16_numbers_are_in_the_refusal(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(
        capsys, str(tiny), "--device", "cpu", "--kv-cache-memory-bytes", POOL, "--max-model-len", "4096"
    )
    for part in ("1024 tokens", "1048576 bytes", "4096 tokens", "4194304 bytes", "fp8 holds only 2048 tokens"):
        assert code == 1 and part in found["refused"]


def test_nothing_of_a_tensor_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sparse file of 13 GB with real headers and no data: planned in no time, with the bytes of its headers."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    tensors, offset = {}, 0

    def add(name: str, *shape: int) -> None:
        nonlocal offset
        size = 2
        for n in shape:
            size *= n
        tensors[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size

    add("model.embed_tokens.weight", 128256, 4096)
    add("lm_head.weight", 128256, 4096)
    add("model.norm.weight", 4096)
    for i in range(32):
        layer = f"model.layers.{i}"
        for name, out, width in (("q", 4096, 4096), ("k", 1024, 4096), ("v", 1024, 4096), ("o", 4096, 4096)):
            add(f"{layer}.self_attn.{name}_proj.weight", out, width)
        for name, out, width in (("gate", 14336, 4096), ("up", 14336, 4096), ("down", 4096, 14336)):
            add(f"{layer}.mlp.{name}_proj.weight", out, width)
        add(f"{layer}.input_layernorm.weight", 4096)
        add(f"{layer}.post_attention_layernorm.weight", 4096)
    header = json.dumps(tensors).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        f.truncate(8 + len(header) + offset)
    flags = ["--gpu", "4090", "--max-num-batched-tokens", "2048"]
    code, found = planned(capsys, str(folder), *flags)
    alone, described = planned(capsys, str(write_config(tmp_path / "alone", "Llama-3.1-8B")), *flags)
    assert code == alone == 0
    assert found["memory"] == described["memory"], "headers and config tell the same"
    assert any("no safetensors headers" in note for note in described["notes"])
    assert not any("no safetensors headers" in note for note in found["notes"])


def test_a_copy_that_serving_would_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--quant awq on 16-bit weights: a quarter of the bytes, and a note; fp8 converts as it loads, half of them."""
    folder = write_config(tmp_path, "Qwen2.5-7B")
    sizes = {}
    for flag in ("dense", "fp8", "awq", "gptq"):
        code, found = planned(capsys, str(folder), "--gpu", "a100-80", "--quant", flag)
        assert code == 0
        sizes[flag] = sum(s for n, s in found["memory"]["lines"] if n.startswith("weights "))
        assert any("makes a copy" in note for note in found["notes"]) is (flag in ("awq", "gptq"))
    head = 2 * 152064 * 3584 * 2
    dense = sizes["dense"] - head
    assert (sizes["fp8"] - head) / dense == pytest.approx(0.5, abs=0.01)
    assert (sizes["awq"] - head) / dense == pytest.approx(4.19 / 16, abs=0.01)
    assert (sizes["gptq"] - head) / dense == pytest.approx(4.19 / 16, abs=0.01)


def test_a_refused_dtype_names_what_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, "Qwen2.5-7B", "awq"))
    code, found = planned(capsys, folder, "--gpu", "t4", "--dtype", "bfloat16", "--max-num-batched-tokens", "2048")
    assert code == 1 and "T4 has no bfloat16" in found["refused"] and found["would_work"] == "--dtype auto"
    again, works = planned(capsys, folder, "--gpu", "t4", "--dtype", "auto", "--max-num-batched-tokens", "2048")
    assert again == 0 and works["choices"]["compute dtype"].startswith("float16 (sm_75 has no bfloat16; float32 acc")


@pytest.mark.parametrize("flags", [["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--max-model-len", "200000"]])
@pytest.mark.parametrize("quantised", ["16-bit", "awq"])
def test_what_works_instead_of_a_refused_dtype_also_fits(
    quantised: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_config(tmp_path, "Llama-3.1-8B", quantised))
    code, found = planned(capsys, folder, "--gpu", "t4", *flags)
    assert code == 1 and "T4 has no bfloat16" in found["refused"] and "--dtype auto" in found["would_work"]
    assert planned(capsys, folder, "--gpu", "t4", *flags, *found["would_work"].split())[0] == 0, found["would_work"]


@pytest.mark.parametrize("flags", [["--cpu-offload-gb", "1"], ["--cpu-offload-gb", "auto"]])
def test_patterns_that_leave_too_little_to_offload(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(write_config(tmp_path, "Llama-3.1-8B", "16-bit")), "--gpu", "t4", *flags]
    code, found = planned(capsys, *asked, "--offload-layers", "model.layers.0")
    assert code == 1 and "what would work: --offload-layers '*'" in found["refused"]
    assert planned(capsys, *asked, *shlex.split(found["would_work"]))[0] == 0, found["would_work"]


def test_host_memory_of_another_machine_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(write_config(tmp_path, "Qwen2.5-7B", "awq")), "--gpu", "t4", "--max-num-batched-tokens", "2048"]
    said = "whether that machine has the host memory that is pinned is not known here"
    notes = [planned(capsys, *asked, "--swap-space", size)[1]["notes"] for size in ("0", "100000")]
    assert [said in each for each in notes] == [False, True]


def test_a_refused_plan_has_no_chart_and_its_own_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, chart = str(write_config(tmp_path, "Llama-3.1-8B", "16-bit")), tmp_path / "chart.png"
    code, found = planned(capsys, folder, "--gpu", "t4", "--png", str(chart))
    assert code == 1 and "--cpu-offload-gb" in found["would_work"] and not chart.exists()
    assert found["notes"][-1].startswith("WARNING: --png: there is nothing to draw")


def test_fit_prints_flags_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, "Qwen2.5-14B", "awq"))
    flags = ["--gpu", "t4", "--max-model-len", "16384"]
    code, found = planned(capsys, folder, *flags, "--fit", "context")
    assert code == 0 and found["refused"] and found["fit"]["changes"]["kv_cache_dtype"] == "fp8"
    assert planned(capsys, folder, *flags)[0] == 1, "as asked it is refused"
    again, _ = planned(capsys, folder, *flags, *found["fit"]["flags"].split())
    assert again == 0
    assert main(["plan", folder, *flags, "--fit"]) == 0
    out = capsys.readouterr().out
    for part in ("Refused: ", "--fit context: ", "KV cache holds", "planned in all", "Ceiling: at most"):
        assert part in out
    code, found = planned(capsys, folder, "--gpu", "t4", "--fit", "streams")
    assert found["fit"]["memory"]["max_model_len"] == 4096 and found["fit"]["streams"] > 4


def test_offload_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    flags = ["--gpu", "t4", "--cpu-offload-gb", "auto", "--max-num-batched-tokens", "2048"]
    code, found = planned(capsys, folder, *flags)
    assert code == 0 and found["memory"]["offloaded_bytes"] > 0 and found["memory"]["offload_ceiling"] < 12
    moved = len(found["memory"]["offloaded_layers"])
    assert any(f"--cpu-offload-gb auto: {moved} of 32 decoder layers" in note for note in found["notes"])
    code, experts = planned(capsys, folder, *flags, "--offload-layers", "*.mlp, model.layers.3?.self_attn.q_proj")
    assert code == 0 and len(experts["memory"]["offloaded_layers"]) > moved, "less of each layer"
    code, found = planned(capsys, folder, *flags, "--offload-layers", "*.mlp,*.experts")
    assert code == 1 and "names no linear of a decoder layer; have: *.experts" in found["refused"]
    assert main(["plan", folder, "--gpu", "t4", "--offload-layers", "*.mlp"]) == 2
    assert "--offload-layers chooses what --cpu-offload-gb may move" in capsys.readouterr().err
    assert main(["plan", folder, "--cpu-offload-gb", "-1"]) == 2
    code, found = planned(capsys, folder, "--device", "cpu", "--cpu-offload-gb", "4")
    assert code == 1 and "from a GPU to host memory" in found["refused"]


def test_flags_of_the_server_change_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(tiny), "--device", "cpu", "--kv-cache-memory-bytes", POOL]
    assert planned(capsys, *flags)[1]["memory"]["kv_tokens"] == 1024
    assert planned(capsys, *flags, "--port", "1234", "--host", "0.0.0.0")[1]["memory"]["kv_tokens"] == 1024
    assert main(["plan", *flags, "--port", "70000"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "plan needs a model"),
        (["--gpu", "gtx 1650"], "--gpu gtx 1650: not known; need: auto | t4"),
        (["--gpu", "V100"], "--gpu V100 is too old; have: sm_70; need: sm_75 or newer"),
        (["--cpu-offload-gb", "4G"], "not a number: '4G'; need: one without a unit, such as 4 or 0.5, or auto"),
        (["--gpu", "t4", "--device", "cpu"], "--gpu t4 and --device cpu contradict each other"),
        (["--kv-dtype", "int9"], "no plugin named 'int9'"),
        (["--tokenizer", "/no/such"], "--tokenizer: no such folder: /no/such"),
        (["--tokenizer", "."], "holds no tokenizer"),
        (["--chat-template", "no.jinja"], "--chat-template is neither a readable file nor a template"),
        (["--kv-scales", ".", "--load-format", "dummy"], "--kv-scales were measured with a model's own weights"),
        (["--fit", "speed"], "unknown goal 'speed'"),
        (["--png", "chart.jpg"], "a name that ends in .png"),
        (["--png", "/no/such/folder/chart.png"], "there is no such folder"),
    ],
)
def test_wrong_flags_are_said_in_one_line(
    tiny: Path, arguments: list[str], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = [str(tiny)] if arguments else []
    assert main(["plan", *model, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_load_formats_are_those_of_serving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pt needs pickled weights, safetensors such files; what is not opened is said, a copy made before is read."""
    from safetensors.torch import load_file

    monkeypatch.setenv("QENGINE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny(tmp_path / "model", dtype="bfloat16")
    flags = [str(folder), "--device", "cpu", "--kv-cache-memory-bytes", POOL]
    for load_format in ("pt", "npcache"):
        code, found = planned(capsys, *flags, "--load-format", load_format)
        assert code == 1 and "holds no pickled weights" in found["refused"]
    code, whole = planned(capsys, *flags, "--load-format", "safetensors")
    assert code == 0
    tensors = folder / "model.safetensors"
    torch.save(load_file(tensors), folder / "pytorch_model.bin")
    code, found = planned(capsys, *flags, "--load-format", "pt")
    assert code == 0 and any("pickled weights are not opened" in note for note in found["notes"])
    tensors.unlink()
    code, found = planned(capsys, *flags, "--load-format", "safetensors")
    assert code == 1 and "holds only pickled weights" in found["refused"]
    with_safetensors(folder, "auto")
    code, found = planned(capsys, *flags)
    assert code == 0 and any("copy made before" in note for note in found["notes"])
    assert found["memory"]["lines"][5:] == whole["memory"]["lines"][5:]


def test_kv_scales_that_are_not_there_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where there are no weights to compare them with."""
    folder = str(write_config(tmp_path / "model", "Qwen2.5-7B"))
    flags = [folder, "--gpu", "a100-80", "--kv-dtype", "fp8", "--kv-scales"]
    code, found = planned(capsys, *flags, "/no/such")
    assert code == 1 and found["refused"].startswith("--kv-scales /no/such; have: no such path")
    code, found = planned(capsys, *flags, str(tmp_path))
    assert code == 1 and "holds no kv_scales.safetensors" in found["refused"]
    for name in ("kv_scales.safetensors", "kv_scales.json"):
        (tmp_path / name).touch()
    code, found = planned(capsys, *flags, str(tmp_path))
    assert code == 0 and any("--kv-scales are not opened" in note for note in found["notes"])


def test_dummy_weights_are_no_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Serving makes them in the format at once, with what its quantiser would leave in 16 bits quantised too."""
    folder = str(write_config(tmp_path, "Qwen2.5-7B"))
    for flags, copied in ((["--load-format", "dummy"], False), ([], True)):
        code, found = planned(capsys, folder, "--gpu", "a100-80", "--quant", "awq", *flags)
        assert code == 0 and any("makes a copy" in note for note in found["notes"]) is copied
        assert found["choices"]["weights"].startswith("awq")


def test_remote_code_is_said_loudly(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(tiny), "--device", "cpu", "--kv-cache-memory-bytes", POOL]
    assert not any("trust-remote-code" in note for note in planned(capsys, *flags)[1]["notes"])
    found = planned(capsys, *flags, "--trust-remote-code")[1]
    assert any(note.startswith("WARNING: --trust-remote-code is on") for note in found["notes"])


def test_the_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_config(tmp_path, "Qwen2.5-7B", "awq"))
    chart = tmp_path / "chart.png"
    assert main(["plan", folder, "--gpu", "t4", "--max-num-batched-tokens", "2048", "--png", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["plan", folder, "--png", str(chart)]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_the_chart_adds_up(tmp_path: Path) -> None:
    from qengine.runtime.plan_chart import segments
    from qengine.runtime.plan_report import plan_report

    folder = write_config(tmp_path, "Llama-3.1-8B")
    config = EngineConfig(model=str(folder), cpu_offload_gb=8.0, max_num_batched_tokens=2048)
    memory = plan_report(config, "t4").memory
    assert memory is not None
    parts = segments(memory)
    assert sum(size for _, size in parts) == dict(memory.lines)["device total"]
    assert min(size for _, size in parts) > 0


def test_this_machine_is_planned_for_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES C19: 15 GiB in all, 6 free, and another process that holds the rest."""
    from qengine.runtime.plan_report import plan_report

    folder, _ = make_tiny_awq(tmp_path)
    monkeypatch.setattr(device, "memory", lambda d: device.DeviceMemory(15 * GIB, 6 * GIB))
    monkeypatch.setattr(device, "neighbours", lambda d: ["trainer (pid 4711) 9.00 GiB"])
    fits = plan_report(EngineConfig(model=str(folder), device="cpu", gpu_memory_utilization=0.9))
    assert fits.refused is None and fits.memory is not None
    assert dict(fits.memory.lines)["budget"] == 6 * GIB - 512 * 2**20
    assert this_machine("cpu").memory.free == 6 * GIB
    claim = plan_report(EngineConfig(model=str(folder), device="cpu", kv_cache_memory_bytes=8 * GIB))
    assert claim.refused is not None and claim.would_work.startswith("--kv-cache-memory-bytes ")
    for part in ("total 15.00 GiB", "free 6.00 GiB", "asked for a KV cache of 8.00 GiB", "trainer (pid 4711) 9.00 GiB"):
        assert part in claim.refused
