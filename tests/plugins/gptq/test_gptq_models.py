"""Whole GPTQ checkpoints written by the test: cases C01, C04 and C06, dynamic rules, quantised heads, act-order, and
bad files, each with a wrong reading."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint_logits import meets_reference
from gptq_files import Style, make_tiny_gptq
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.layers.linear import Linear
from qengine.runtime.loader import load
from torch_kv import PagedRun
from toy_models import llama_config

IDS = [72, 101, 108, 108, 111, 256, 3, 200]
Edit = Callable[[dict[str, torch.Tensor]], None]


def run(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """Logits of IDS [1, tokens, vocab] and the warnings of plan and load."""
    model, plan, _ = plan_folder(folder)
    report = load(plan)
    return torch.stack(PagedRun(model, [IDS]).run()), [*plan.warnings, *report.warnings]


def reference(meaning: dict[str, torch.Tensor], **overrides: object) -> torch.Tensor:
    """Plain float32 transformers over the dense weights."""
    fields = {k: v for k, v in llama_config(**overrides).items() if k not in ("architectures", "dtype")}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    missing, extra = model.load_state_dict(meaning, strict=False)
    assert not missing and not extra
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits


def check(folder: Path, style: Style, **overrides: object) -> list[str]:
    """The checkpoint meets its reference, and misses that of weights one scale step off; returns the warnings."""
    folder, meaning = make_tiny_gptq(folder, style, **overrides)
    shape = {k: v for k, v in overrides.items() if k in ("intermediate_size", "hidden_size", "attention_bias")}
    got, warnings = run(folder)
    assert meets_reference(got, reference(meaning, **shape), 0.99999) is None
    other = {n: t.roll(1, 0) if n.endswith("up_proj.weight") else t for n, t in meaning.items()}
    assert meets_reference(got, reference(other, **shape)) is not None
    return warnings


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_bits_and_conventions(bits: int, stored: str, tmp_path: Path) -> None:
    """C01 and C06 as whole models, symmetric and not."""
    assert check(tmp_path / "sym", Style(bits, 64, True, stored)) == []
    by_word = stored == "gptq" and bits != 3
    assert check(tmp_path / "asym", Style(bits, 64, False, stored, by_word=by_word)) == []


@pytest.mark.parametrize(
    ("group", "shape"),
    [(-1, {}), (64, {"intermediate_size": 96}), (32, {"intermediate_size": 200}), (128, {"hidden_size": 64})],
    ids=str,
)
def test_ragged_and_odd_groups(group: int, shape: dict[str, int], tmp_path: Path) -> None:
    """C04: one group; 96 = 64 + 32; 200 = 6 * 32 + 8; fewer inputs than a group."""
    assert check(tmp_path, Style(4, group), **shape) == []


def drop(leaf: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(leaf)]:
            del tensors[name]

    return edit


def set_to(leaf: str, value: float) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(leaf)]:
            tensors[name].fill_(value)

    return edit


def test_g_idx_missing_or_all_zero(tmp_path: Path) -> None:
    """C04: absent is the plain map; all zeros is taken as not filled in, and said."""
    assert check(tmp_path / "absent", Style(4, 32), edit=drop("g_idx")) == []
    (warning,) = check(tmp_path / "zeros", Style(4, 32), edit=set_to("g_idx", 0))
    assert "g_idx is all zeros" in warning and "(14 modules: model.layers.0." in warning


def test_g_idx_is_needed_with_act_order(tmp_path: Path) -> None:
    folder, _ = make_tiny_gptq(tmp_path / "absent", Style(4, 32, shuffle=1), edit=drop("g_idx"))
    with pytest.raises(CheckpointError, match=r"14 tensor\(s\).*not in the checkpoint.*g_idx"):
        plan_folder(folder)
    folder, _ = make_tiny_gptq(tmp_path / "zeros", Style(4, 32, shuffle=1), edit=set_to("g_idx", 0))
    with pytest.raises(CheckpointError, match=r"\d+ module\(s\) hold data.*1.mlp.down_proj: g_idx is all zeros, but"):
        load(plan_folder(folder)[1])


def test_zero_biases_that_the_config_denies(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("q_proj.scales")]:
            tensors[name.replace("scales", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)

    assert check(tmp_path, Style(4, 32), edit=add) == []
    assert any("2 all-zero bias" in note for note in plan_folder(tmp_path)[1].notes)


def test_biases_are_added(tmp_path: Path) -> None:
    assert check(tmp_path, Style(4, 32), attention_bias=True) == []


def seed_of(module: str) -> int:
    return sum(map(ord, module))


@pytest.mark.parametrize("bits", [3, 4])
def test_act_order_with_a_map_for_each_module(bits: int, tmp_path: Path) -> None:
    """q, k and v share their input and not their maps: fused in one op, each shard keeps its own."""
    style = Style(bits, 64, shuffle=0)

    def own(module: str) -> Style | None:
        return dataclasses.replace(style, shuffle=seed_of(module)) if module != "lm_head" else None

    folder, meaning = make_tiny_gptq(tmp_path, style, style_of=own)
    got, warnings = run(folder)
    assert warnings == []
    assert meets_reference(got, reference(meaning), 0.99999) is None
    plain, _ = make_tiny_gptq(tmp_path / "plain", style, style_of=own, edit=drop("g_idx"), quant={"desc_act": False})
    wrong, _ = run(plain)
    assert meets_reference(wrong, reference(meaning)) is not None


def test_mixed_modules_by_dynamic_rules(tmp_path: Path) -> None:
    """Different bits in q, k and v, another group in up than in gate, one module dense, the head quantised."""
    base = Style(4, 64)
    styles = {
        "model.layers.0.self_attn.k_proj": Style(8, 32),
        "model.layers.1.self_attn.v_proj": None,
        "model.layers.1.mlp.up_proj": Style(4, 32),
        "lm_head": Style(8, 32),
    }
    dynamic = {
        r"-:.*\.1\.self_attn\.v_proj": {},
        r"+:.*\.0\.self_attn\.k_proj": {"bits": 8, "group_size": 32},
        r".*\.1\.mlp\.up_proj": {"group_size": 32},
        "lm_head": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "mse": 2.4},
    }
    folder, meaning = make_tiny_gptq(
        tmp_path, base, style_of=lambda m: styles.get(m, base), quant={"dynamic": dynamic, "lm_head": True}
    )
    got, warnings = run(folder)
    assert warnings == []
    assert meets_reference(got, reference(meaning), 0.99999) is None
    model, plan, _ = plan_folder(folder)
    assert any("run in parts" in note for note in plan.notes)
    runs = {leaf.name: len(leaf.runs()) for leaf in model.leaves if isinstance(leaf, Linear)}
    assert runs["model.layers.0.self_attn.q_proj"] == 3 and runs["model.layers.1.self_attn.q_proj"] == 2
    assert runs["model.layers.1.mlp.gate_proj"] == 2 and runs["model.layers.0.mlp.gate_proj"] == 1
    assert plan.schemes["lm_head"] == "gptq 8-bit g32"


def test_the_optimum_trap(tmp_path: Path) -> None:
    """Symmetric v1 zeros under the name gptq_v2: read as v1, with one warning; as stated it would be wrong."""
    (warning,) = check(tmp_path, Style(4, 64), quant={"checkpoint_format": "gptq_v2"})
    assert "checkpoint_format is gptq_v2, but every stored zero is 7" in warning and "14 modules" in warning


def test_autogptqs_file_name(tmp_path: Path) -> None:
    folder, meaning = make_tiny_gptq(tmp_path, Style(4, 64, scale_dtype=torch.float32))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    config = (folder / "config.json").read_text()
    assert meets_reference(run(folder)[0], reference(meaning), 0.99999) is None
    # The config in quantize_config.json alone, as AutoGPTQ before 0.4 left it.
    raw = json.loads(config)
    own = raw.pop("quantization_config")
    del own["quant_method"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "quantize_config.json").write_text(json.dumps(own))
    assert meets_reference(run(folder)[0], reference(meaning), 0.99999) is None


def bad(folder: Path, edit: Edit, message: str) -> None:
    folder, _ = make_tiny_gptq(folder, Style(4, 64), edit=edit)
    with pytest.raises(CheckpointError, match=message):
        load(plan_folder(folder)[1])


def test_bad_files_are_refused_by_name(tmp_path: Path) -> None:
    def missing(t: dict[str, torch.Tensor]) -> None:
        del t["model.layers.1.mlp.down_proj.qzeros"]

    def short(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.0.self_attn.k_proj.scales"] = t["model.layers.0.self_attn.k_proj.scales"][:, :-8]

    def wide(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.0.mlp.up_proj.qweight"] = t["model.layers.0.mlp.up_proj.qweight"].long()

    def rows(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.0.self_attn.k_proj.scales"] = t["model.layers.0.self_attn.k_proj.scales"][:-1]

    def nans(t: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            t[f"model.layers.{i}.mlp.gate_proj.scales"][0, i] = float("nan")

    bad(tmp_path / "1", missing, r"1 tensor\(s\).*1\.mlp\.down_proj\.qzeros")
    bad(tmp_path / "2", short, r"k_proj\.scales: have F16 4x120, need F16 or BF16 or F32 4x128")
    bad(tmp_path / "3", wide, r"up_proj\.qweight: have I64 32x512, need I32")
    bad(tmp_path / "4", rows, r"k_proj: group_size 64 means 4 rows of scales for 256 inputs, the file has 3")
    bad(tmp_path / "5", nans, r"2 module\(s\).*0\.mlp\.gate_proj\.scales: 1 of.*1\.mlp\.gate_proj\.scales: 1 of")


def test_refused_configs_name_their_place(tmp_path: Path) -> None:
    folder, _ = make_tiny_gptq(tmp_path, Style(4, 64), quant={"checkpoint_format": "gptq_p"})
    with pytest.raises(CheckpointError, match=r"config\.json quantization_config: checkpoint_format 'gptq_p'"):
        plan_folder(folder)
