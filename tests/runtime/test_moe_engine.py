"""Mixtures of experts with AWQ experts, and through the real engine on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_reference import TOLERANCE, random_sequences, reference_logits, worst
from load_model import load_folder, plan_folder
from qengine.errors import CheckpointError
from qengine.layers.moe import ExpertLinear, Router
from qengine.runtime.loader import load
from qengine_awq.backend import AwqScheme
from qengine_awq.quantizer import AwqQuantizer
from qengine_calibration.quantize import quantize_checkpoint
from torch_kv import PagedRun
from toy_engine import request, run, toy_engine
from toy_models import write_json
from toy_moe import FAMILIES, make_moe

SEQUENCES = random_sequences((9, 4))
GROUP = 32


def make_awq_moe(folder: Path, family: str, **options: object) -> PreTrainedModel:
    """A toy with AWQ linears, written to folder/"awq"; returns the model that its weights mean."""
    model = make_moe(folder / "16-bit", family, **options)  # type: ignore[arg-type]
    quantize_checkpoint(folder / "16-bit", folder / "awq", AwqQuantizer(GROUP))
    stored = load_file(folder / "awq" / "model.safetensors")
    scheme = AwqScheme(GROUP, True)

    def meaning(module: str) -> torch.Tensor:
        leaves = {leaf: stored[f"{module}.{leaf}"] for leaf in ("qweight", "qzeros", "scales")}
        return scheme.dequantize(None, leaves)  # type: ignore[arg-type]

    block, (gate, up, down) = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    }.get(family, ("mlp", ("gate_proj", "up_proj", "down_proj")))
    with torch.no_grad():
        for name, p in model.named_parameters():
            module = name.removesuffix(".weight")
            if f"{module}.qweight" in stored:
                p.copy_(meaning(module))
            elif ".experts." in name:
                experts = name.rpartition(".")[0].replace(".mlp.", f".{block}.")
                leaves = (down,) if name.endswith("down_proj") else (gate, up)
                for e in range(len(p)):
                    p[e].copy_(torch.cat([meaning(f"{experts}.{e}.{leaf}") for leaf in leaves]))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_awq_experts_mean_their_dequantised_weights(family: str, tmp_path: Path) -> None:
    reference = make_awq_moe(tmp_path, family)
    want = reference_logits(reference, SEQUENCES)
    model, plan, _ = plan_folder(tmp_path / "awq")
    experts = [leaf for leaf in model.leaves if isinstance(leaf, ExpertLinear)]
    assert len(experts) == 2 * 4 * 2
    assert {plan.schemes[spec.name] for leaf in experts for spec in leaf.specs} == {"awq 4-bit g32"}
    routers = [leaf for leaf in model.leaves if isinstance(leaf, Router)]
    assert [plan.schemes[leaf.name] for leaf in routers] == ["16-bit"] * 2
    report = load(plan)
    assert report.total_bytes == plan.total_bytes
    for chunk in (None, 3, 1):
        assert worst(PagedRun(model, SEQUENCES).run(chunk), want) < TOLERANCE
    wrong = experts[0].ops[0]
    wrong.linear.dense.weight = wrong.linear.dense.weight.roll(1, 0)  # type: ignore[attr-defined]
    assert worst(PagedRun(model, SEQUENCES).run(), want) > 100 * TOLERANCE


def test_int4_experts_on_a_cpu_keep_no_dense_copy(tmp_path: Path) -> None:
    reference = make_awq_moe(tmp_path, "mixtral", num_experts_per_tok=4)
    model, plan, _ = plan_folder(tmp_path / "awq", dtype=torch.bfloat16)
    report = load(plan)
    assert report.kernels["int4 for every M (no dense copy kept)"] == 16
    assert abs(report.total_bytes - plan.total_bytes) <= 0.01 * plan.total_bytes
    got, want = PagedRun(model, SEQUENCES).run(), reference_logits(reference, SEQUENCES)
    assert all(torch.cosine_similarity(g, w, dim=-1).min() > 0.99 for g, w in zip(got, want, strict=True))


def test_the_quantised_copy_names_its_routers(tmp_path: Path) -> None:
    make_moe(tmp_path / "16-bit", "qwen2_moe", in_memory_layout=True)
    quantize_checkpoint(tmp_path / "16-bit", tmp_path / "awq", AwqQuantizer(GROUP))
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    skipped = config["quantization_config"]["modules_to_not_convert"]
    gates = [f"model.layers.{i}.mlp.{leaf}" for i in range(2) for leaf in ("gate", "shared_expert_gate")]
    assert set(gates) <= set(skipped)
    stored = load_file(tmp_path / "awq" / "model.safetensors")
    assert all(f"{gate}.weight" in stored for gate in gates)
    assert "model.layers.1.mlp.experts.3.down_proj.qweight" in stored


def test_experts_in_different_formats_load(tmp_path: Path) -> None:
    """One expert is left 16-bit, as recipes that spare sensitive modules do."""

    class Sparing(AwqQuantizer):
        def accepts(self, spec: object) -> str | None:
            return "spared" if ".experts.1.w1" in spec.name else super().accepts(spec)  # type: ignore[attr-defined, arg-type]

    make_moe(tmp_path / "16-bit")
    quantize_checkpoint(tmp_path / "16-bit", tmp_path / "mixed", Sparing(GROUP))
    model, plan, _ = plan_folder(tmp_path / "mixed")
    assert plan.schemes["model.layers.0.block_sparse_moe.experts.1.w1"] == "16-bit"
    assert plan.schemes["model.layers.0.block_sparse_moe.experts.1.w3"] == "awq 4-bit g32"
    assert any("2 fused modules run in parts" in note for note in plan.notes)
    load(plan)
    uniform = tmp_path / "uniform"
    quantize_checkpoint(tmp_path / "16-bit", uniform, AwqQuantizer(GROUP))
    mixed, whole = PagedRun(model, SEQUENCES).run(), PagedRun(load_folder(uniform), SEQUENCES).run()
    assert 1e-3 < worst(mixed, whole) < 5


def test_a_quantised_expert_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    make_moe(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"intermediate_size": 80})
    with pytest.raises(CheckpointError, match=r"24 tensor\(s\) do not fit.*experts\.0\.w1\.weight: have F32 96x64"):
        plan_folder(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_serves_it(family: str, tmp_path: Path) -> None:
    """Greedy text equals transformers', whole or in chunks, alone or together; the report counts the experts."""
    reference = make_moe(tmp_path, family, tokenizer=True)
    prompts = [[(11 * i + 3 * n) % 250 for i in range(n)] for n in (3, 20, 33)]
    want = {}
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            ids = list(prompt)
            for _ in range(8):
                ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            want[str(i)] = ids[len(prompt) :]
    requests = [request(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)]
    engine = toy_engine(tmp_path)
    assert run(engine, requests).ids == want
    assert run(toy_engine(tmp_path, max_num_batched_tokens=7), requests).ids == want
    lines = engine.facts.report
    assert any(line.startswith("Linear kernel: float32 GEMM") for line in lines)
    assert not any("WARNING" in line for line in lines), lines


def test_the_engine_serves_awq_experts(tmp_path: Path) -> None:
    make_awq_moe(tmp_path, "qwen3_moe", tokenizer=True)
    engine = toy_engine(tmp_path / "awq", dtype="bfloat16")
    out = run(engine, [request("a", list(range(40)), max_tokens=8, ignore_eos=True)])
    assert len(out.ids["a"]) == 8
    lines = engine.facts.report
    assert "Linear kernel: int4 for every M (no dense copy kept) (16 modules)" in lines
    assert any(line.startswith("Weights by scheme: ") and "awq 4-bit g32" in line for line in lines)


def test_dummy_weights(tmp_path: Path) -> None:
    make_awq_moe(tmp_path, "qwen2_moe", tokenizer=True)
    (tmp_path / "awq" / "model.safetensors").unlink()
    engine = toy_engine(tmp_path / "awq", load_format="dummy")
    assert len(run(engine, [request("a", [1, 2, 3], max_tokens=4, ignore_eos=True)]).ids["a"]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_grouped_experts_on_a_gpu(quantised: bool, tmp_path: Path) -> None:
    """Every token takes all experts, so that rounding cannot pick others; prefill, then decodes."""
    reference = make_awq_moe(tmp_path, "mixtral", tokenizer=True, num_experts_per_tok=4)
    folder = tmp_path / ("awq" if quantised else "16-bit")
    if not quantised:
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [(7 * i) % 250 for i in range(40)]
    engine = toy_engine(folder, device="cuda", dtype="float16")
    out = run(engine, [request("a", prompt, max_tokens=12, ignore_eos=True, logprobs=1)])
    ids = prompt + out.ids["a"]
    with torch.inference_mode():
        want = reference(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    for i, token in enumerate(out.ids["a"], len(prompt) - 1):
        assert want[i].max() - want[i, token] < 0.05, "not (nearly) the reference's choice"
    kernel = "Triton W4A16" if quantised else "float16 Triton"
    assert any(f"Linear kernel: {kernel}, all experts at once" in line for line in engine.facts.report)
