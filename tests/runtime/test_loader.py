"""Planning and loading whole models: case C11 at the loader, tied heads, mixed modules, memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from load_model import CPU, load_folder, plan_folder
from qengine.errors import CapabilityError, CheckpointError
from qengine.layers.linear import Linear
from qengine.models.model import Model
from qengine.plugin import DeviceInfo
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.loader import load, resolve
from qengine.runtime.model_config import load_config, settle_tied
from qengine.runtime.quant_select import select_quant
from torch_kv import PagedRun
from toy_models import (
    llama_config,
    llama_tensors,
    make_tiny,
    make_tiny_awq,
    write_json,
    write_model,
)

IDS = [72, 101, 108, 108, 111, 256, 3, 200]


def logits(model: Model) -> torch.Tensor:
    run = PagedRun(model, [IDS])
    run.step([len(IDS)])
    return run.logits[0][0]


def expected(folder: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return reference(torch.tensor([IDS])).logits[0]


def edit(folder: Path, change: dict[str, torch.Tensor | None], file: str = "model.safetensors") -> None:
    """Add, replace or (None) drop tensors of one file."""
    tensors = load_file(folder / file)
    for name, value in change.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | changes)


def test_loaded_model_equals_transformers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, shards=2, tokenizer=False)
    have, want = logits(load_folder(folder)), expected(folder)
    assert torch.allclose(have, want, atol=1e-4)
    # Wrong control: one swapped pair of equal shapes must show.
    one, two = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    model, plan, checkpoint = plan_folder(folder)
    read = checkpoint.read
    checkpoint.read = lambda n: read({one: two, two: one}.get(n, n))  # type: ignore[method-assign]
    load(plan)
    assert not torch.allclose(logits(model), want, atol=1e-2)


def test_report_agrees_with_the_plan(tmp_path: Path) -> None:
    _, plan, checkpoint = plan_folder(make_tiny(tmp_path, tokenizer=False))
    seen: list[tuple[int, int, str]] = []
    report = load(plan, lambda *step: seen.append(step))
    assert report.bytes_by_format == plan.bytes_by_format and not report.warnings
    assert report.total_bytes == checkpoint.nbytes
    assert sum(report.kernels.values()) == 2 * 4 + 1
    assert [s[0] for s in seen] == list(range(1, len(plan.order) + 1)) and seen[-1][1] == len(plan.order)
    positions = [checkpoint.file_position(names[0]) for _, names in plan.order]
    assert positions == sorted(positions)


def test_quantised_tensors_that_are_missing(tmp_path: Path) -> None:
    """C11 (c)."""
    folder, _ = make_tiny_awq(tmp_path, tokenizer=False)
    plan_folder(folder)
    edit(folder, {"model.layers.1.mlp.down_proj.qzeros": None})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj(\.|: ).*qzeros"):
        plan_folder(folder)


@pytest.mark.parametrize("kind", ["dense", "awq"])
def test_config_with_a_layer_too_many(tmp_path: Path, kind: str) -> None:
    """C11 (d)."""
    if kind == "dense":
        folder = make_tiny(tmp_path, tokenizer=False)
    else:
        folder, _ = make_tiny_awq(tmp_path, tokenizer=False)
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError) as e:
        plan_folder(folder)
    text = str(e.value)
    assert "9 tensor(s)" in text and len(set(re.findall(r"model\.layers\.2\.[a-z_.]+", text))) == 9
    assert "unfinished download" in text


def test_unknown_tensor_is_a_warning_with_its_name(tmp_path: Path) -> None:
    """C11 (e)."""
    folder = make_tiny(tmp_path, tokenizer=False)
    edit(folder, {"model.layers.0.mystery.weight": torch.ones(3)})
    _, plan, _ = plan_folder(folder)
    assert plan.warnings == [
        "1 tensor(s) in the checkpoint that this model does not use: model.layers.0.mystery.weight"
    ]


def test_stray_file_changes_nothing(tmp_path: Path) -> None:
    """C11 (g), down to the logits."""
    folder = make_tiny(tmp_path, shards=2, tokenizer=False)
    want = logits(load_folder(folder))
    other = llama_tensors(llama_config(), seed=8)
    save_file(other, folder / "consolidated.safetensors")
    model, plan, checkpoint = plan_folder(folder)
    load(plan)
    assert any("consolidated.safetensors" in note for note in checkpoint.notes)
    assert torch.equal(logits(model), want)
    assert not torch.allclose(logits(load_folder(write_model(tmp_path / "o", llama_config(), other))), want, atol=0.1)


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tokenizer=False)
    edit_config(folder, intermediate_size=640)
    with pytest.raises(CheckpointError) as e:
        plan_folder(folder)
    assert "model.layers.0.mlp.gate_proj.weight: have F32 512x256" in str(e.value) and "640x256" in str(e.value)


def test_zero_biases_of_a_model_without_biases(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tokenizer=False)
    name = "model.layers.0.self_attn.o_proj.bias"
    edit(folder, {name: torch.zeros(256)})
    _, plan, _ = plan_folder(folder)
    assert plan.warnings == [] and any("1 all-zero bias" in note for note in plan.notes)
    edit(folder, {name: torch.ones(256)})
    with pytest.raises(CheckpointError, match=f"{name} is not zero"):
        plan_folder(folder)


def tied_folder(folder: Path, head: torch.Tensor | None, flag: bool | None) -> Path:
    config = llama_config(tie_word_embeddings=True, num_hidden_layers=1)
    tensors = llama_tensors(config)
    if head is not None:
        tensors["lm_head.weight"] = head
    if flag is None:
        config.pop("tie_word_embeddings")
    else:
        config["tie_word_embeddings"] = flag
    return write_model(folder, config, tensors)


def test_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    folder = tied_folder(tmp_path, None, True)
    model, plan, _ = plan_folder(folder)
    load(plan)
    assert model.tied and not plan.warnings
    assert torch.allclose(logits(model), expected(folder), atol=1e-4)


def test_a_head_in_the_file_wins_over_the_flag(tmp_path: Path) -> None:
    head = torch.randn(320, 256) * 0.05
    folder = tied_folder(tmp_path, head, True)
    model, plan, checkpoint = plan_folder(folder)
    load(plan)
    assert not model.tied
    assert any("differs from the embedding" in note for note in checkpoint.notes)
    edit_config(folder, tie_word_embeddings=False)
    assert torch.allclose(logits(model), expected(folder), atol=1e-4)


def test_an_equal_head_is_kept_once(tmp_path: Path) -> None:
    table = llama_tensors(llama_config(num_hidden_layers=1))["model.embed_tokens.weight"]
    model, plan, checkpoint = plan_folder(tied_folder(tmp_path, table, True))
    assert model.tied and any("kept once" in note for note in checkpoint.notes)
    assert plan.warnings == []


def test_no_head_and_no_flag_means_tied_but_an_explicit_no_is_missing(tmp_path: Path) -> None:
    model, _, checkpoint = plan_folder(tied_folder(tmp_path / "silent", None, None))
    assert model.tied and any("says nothing" in note for note in checkpoint.notes)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        plan_folder(tied_folder(tmp_path / "untied", None, False))


def test_settled_flag_reaches_a_nested_text_config() -> None:
    class Config:
        tie_word_embeddings = True
        text_config: Config | None = None

    config, config.text_config = (c := Config()), Config()
    head = Checkpoint(Path(), {}, None, {"language_model.lm_head.weight": None})  # type: ignore[dict-item]
    settle_tied(config, head)
    assert c.tie_word_embeddings is False and config.text_config.tie_word_embeddings is False


def test_mixed_fused_module_runs_in_parts(tmp_path: Path) -> None:
    """v_proj left 16-bit in an AWQ checkpoint: decided by its tensors, q and k stay quantised."""
    folder, meaning = make_tiny_awq(
        tmp_path / "mixed", tokenizer=False, hidden_size=256
    )
    name = "model.layers.0.self_attn.v_proj"
    change: dict[str, torch.Tensor | None] = {f"{name}.{leaf}": None for leaf in ("qweight", "qzeros", "scales")}
    edit(folder, change | {f"{name}.weight": meaning[f"{name}.weight"].half()})
    model, plan, _ = plan_folder(folder)
    assert plan.schemes[name] == "16-bit" and plan.schemes[name.replace("v_proj", "q_proj")].startswith("awq")
    assert any("run in parts" in note for note in plan.notes)
    load(plan)
    meaning[f"{name}.weight"] = meaning[f"{name}.weight"].half().float()
    dense = write_model(tmp_path / "dense", llama_config(), meaning)
    have, want = logits(model)[-1], expected(dense)[-1]
    assert torch.nn.functional.cosine_similarity(have, want, dim=0) > 0.999
    assert have.argmax() == want.argmax()


def test_awq_without_any_config_needs_only_the_flag(tmp_path: Path) -> None:
    """C08's place (4)."""
    folder, _ = make_tiny_awq(tmp_path, tokenizer=False, quantization_config=None)
    _, plan, _ = plan_folder(folder, flag="awq")
    assert sum(f.startswith("awq") for f in plan.schemes.values()) == 14
    with pytest.raises(CheckpointError, match="--quantization"):
        plan_folder(folder)


def test_a_refused_device_is_named(tmp_path: Path) -> None:
    model, _, checkpoint = plan_folder(make_tiny(tmp_path, tokenizer=False))
    volta = DeviceInfo("cuda", "Tesla V100", (7, 0))
    choice = select_quant(None, None)
    with pytest.raises(CapabilityError, match=r"Tesla V100.*7\.5"):
        resolve(model.leaves, checkpoint, None, choice.dense, volta, torch.float16)


def test_unreadable_configs(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tokenizer=False)
    edit_config(folder, model_type="no-such-model")
    with pytest.raises(CheckpointError, match="no-such-model"):
        load_config(Checkpoint.open(folder))


MEASURE = """
import ctypes, sys, psutil, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from load_model import plan_folder
from qengine.runtime.loader import load
torch.set_num_threads(1)
model, plan, checkpoint = plan_folder(Path(sys.argv[1]))
ctypes.CDLL(None).malloc_trim(0)
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
report = load(plan)
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(before, peak, report.peak_host_bytes, plan.total_bytes)
"""


def test_peak_memory_is_the_model_plus_one_module(tmp_path: Path) -> None:
    """A checkpoint of float16 tensors loaded as float32: the file's copy and the model's must not both stay."""
    folder = make_tiny(
        tmp_path, dtype="float16", tokenizer=False, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=2048,
    )  # fmt: skip
    support = str(Path(__file__).parents[1] / "support")
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), support], capture_output=True, text=True, check=True
    )
    before, peak, reported, model_bytes = map(int, out.stdout.split())
    largest = 4096 * 1024 * 6  # gate and up: float16 from the file and float32 in the model
    slack = 24 << 20
    assert model_bytes > 150e6
    assert peak - before < model_bytes + largest + slack
    assert peak - before > model_bytes * 0.9  # the measurement sees the model at all
    assert abs(reported - peak) < 2 * largest


def test_linear_leaves_hold_only_their_buffers(tmp_path: Path) -> None:
    model = load_folder(make_tiny(tmp_path, tokenizer=False, num_hidden_layers=1))
    linears = [leaf for leaf in model.leaves if isinstance(leaf, Linear)]
    assert all(sum(op.nbytes for op in leaf.ops) == sum(leaf.resident_bytes(CPU).values()) for leaf in linears)
