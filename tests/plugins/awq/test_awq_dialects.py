"""AWQ's layouts: each means what an independent writer wrote, as tensors and as whole models; the wrong ones don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from awq_files import make_awq, write_linear
from checkpoint_logits import meets_reference
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.plugin import DeviceInfo, LinearShard, LinearSpec, TensorInfo
from qengine.runtime.loader import load
from qengine.runtime.safetensors_file import CODES
from qengine_awq.backend import AwqQuant, AwqScheme
from qengine_awq.layouts import gemv, gemv_fast, marlin, padded
from torch_kv import PagedRun
from toy_models import llama_config, make_tiny

IDS = [[72, 101, 108, 108, 111, 256, 3, 200]]
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def scheme_of(spec: LinearSpec, tensors: Tensors, **config: object) -> AwqScheme:
    headers = {leaf: TensorInfo(f"m.{leaf}", CODES[t.dtype], tuple(t.shape)) for leaf, t in tensors.items()}
    scheme = AwqQuant.parse(config or None).scheme_for(spec, headers)
    assert isinstance(scheme, AwqScheme)
    assert {n.leaf: n.shape for n in scheme.tensors(spec)} == {leaf: h.shape for leaf, h in headers.items()}
    return scheme


CASES = [
    (version, group, zeros)
    for version in ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin")
    for group in (32, 64, 128, -1)
    for zeros in (True, False)
    if not (version == "marlin" and zeros)
]


@pytest.mark.parametrize("version, group, zeros", CASES)
def test_dequantize(version: str, group: int, zeros: bool) -> None:
    torch.manual_seed(2)
    spec = LinearSpec("m", 384, 64)
    tensors, meaning = write_linear(torch.randn(64, 384) * 0.05, version, group, zeros)
    got = scheme_of(spec, tensors, group_size=group).dequantize(spec, tensors)
    torch.testing.assert_close(got, meaning, rtol=0, atol=1e-8)


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "llm-awq", "marlin"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_group_size_without_a_config(version: str, group: int) -> None:
    spec = LinearSpec("m", 256, 64)
    tensors, _ = write_linear(torch.randn(64, 256), version, group)
    assert scheme_of(spec, tensors).group_size == group


def expected(folder: Path, meaning: Tensors) -> torch.Tensor:
    fields = {k: v for k, v in llama_config().items() if k != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    model.load_state_dict(meaning)
    with torch.inference_mode():
        return model(torch.tensor(IDS)).logits


def logits(folder: Path) -> torch.Tensor:
    model, plan, _ = plan_folder(folder)
    assert load(plan).warnings == plan.warnings == []
    return torch.stack(PagedRun(model, IDS).run())


def swapped_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gemv_fast, "RUN", list(range(32)))
    patch.setattr(marlin, "PLACES", list(range(1024)))
    right = gemv.in_order
    patch.setattr(gemv, "in_order", lambda w: right(w).unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))


def shifted_zeros(patch: pytest.MonkeyPatch) -> None:
    """GPTQ's convention: the stored zero plus one."""
    right = AwqScheme._bind_cpu

    def wrong(self, qweight, qzeros, scales, bias, dtype):  # type: ignore[no-untyped-def]
        return right(self, qweight, None if qzeros is None else qzeros + 0x11111111, scales, bias, dtype)

    patch.setattr(AwqScheme, "_bind_cpu", wrong)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "llm-awq", "marlin"])
def test_whole_models(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, meaning = make_awq(tmp_path, version)
    want = expected(tmp_path, meaning)
    assert meets_reference(logits(folder), want, 0.99999) is None
    wrong: list[Callable[[pytest.MonkeyPatch], None]] = []
    wrong += [swapped_order] if version != "gemm" else []
    wrong += [shifted_zeros] if version != "marlin" else []
    for misread in wrong:
        with monkeypatch.context() as patch:
            misread(patch)
            assert meets_reference(logits(folder), want) is not None


def test_wrong_order_of_scales_shows() -> None:
    """Marlin's scales are permuted too: read as they lie they belong to other columns."""
    spec = LinearSpec("m", 256, 64)
    tensors, meaning = write_linear(torch.randn(64, 256) * torch.logspace(-1, 1, 64)[:, None], "marlin", 128)
    scheme = scheme_of(spec, tensors)
    assert torch.allclose(scheme.dequantize(spec, tensors), meaning)
    moved = tensors | {"scales": marlin.columns_in_order(tensors["scales"])}
    assert not torch.allclose(scheme.dequantize(spec, moved), meaning, rtol=0.1)


def test_words_of_padded_scales() -> None:
    """AutoAWQ's table: ceil(G / 8) words, in twos for groups of 64 and in fours for groups of 32."""
    have = [padded.words(k, g) for k, g in [(256, 128), (256, 64), (256, 32), (4096, 128), (4096, 64), (1088, 64)]]
    assert have == [1, 2, 4, 4, 8, 4]
    assert padded.words(1100, -1) == 1 and padded.words(64, -1) == 2
    with pytest.raises(ValueError, match="group_size 16 does not exist"):
        padded.words(256, 16)


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
@pytest.mark.parametrize("stored, stated, words", [(128, -1, "smaller"), (-1, 128, "larger")])
def test_padding_shows_a_wrong_group_size(version: str, stored: int, stated: int, words: str) -> None:
    """Both have eight columns of scales; only the data tells."""
    spec = LinearSpec("m", 256, 64)
    tensors, _ = write_linear(torch.randn(64, 256), version, stored)
    scheme = scheme_of(spec, tensors, group_size=stated)
    with pytest.raises(ValueError, match=f"^m: scales has .* group size is {words}"):
        scheme.bind([LinearShard(spec, tensors)], CPU, DeviceInfo("cpu"), torch.float32)


def test_zeros_that_are_no_multiples_of_their_scale() -> None:
    spec = LinearSpec("m", 256, 64)
    tensors, _ = write_linear(torch.randn(64, 256), "gemv_fast", 128)
    for scale_by in (1.03, -1.0, 40.0):
        bad = tensors | {"qzeros": tensors["qzeros"] * scale_by}
        with pytest.raises(ValueError, match=r"^m: qzeros: \d+ of 128 values are no zero point"):
            scheme_of(spec, bad).bind([LinearShard(spec, dict(bad))], CPU, DeviceInfo("cpu"), torch.float32)
    # Saved again in another dtype, the zeros are still found.
    for dtype in (torch.bfloat16, torch.float32):
        cast = {leaf: t if t.dtype is torch.int16 else t.to(dtype) for leaf, t in tensors.items()}
        zeros = scheme_of(spec, cast).layout.to_gemm(spec, cast, 128)["qzeros"]
        assert torch.equal(zeros, scheme_of(spec, tensors).layout.to_gemm(spec, tensors, 128)["qzeros"])


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "marlin"])
def test_values_that_are_not_finite_are_listed(version: str, tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.{p}_proj.scales" for i in range(2) for p in "qv"]

    def spoil(stored: Tensors) -> None:
        for name in names:
            stored[name][0, 0] = float("nan") if "q_proj" in name else float("inf")

    folder, _ = make_awq(tmp_path, version, edit=spoil)
    _, plan, _ = plan_folder(folder)
    with pytest.raises(CheckpointError, match=r"2 module\(s\) hold data that cannot be used") as e:
        load(plan)
    assert all(f"{name}: 1 of " in str(e.value) for name in names)


def test_scaled_activations_end_the_load(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.act.scales"
    folder, _ = make_awq(tmp_path, "gemm", edit=lambda stored: stored.update({name: torch.ones(512).half()}))
    with pytest.raises(CheckpointError, match=rf"activation's output.*{name}"):
        plan_folder(folder)


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "marlin"])
def test_config_places(version: str, tmp_path: Path) -> None:
    """C08: config.json, its text_config, quant_config.json in the old spelling, and nowhere but in the flag."""
    folder, _ = make_awq(tmp_path / "first", version)
    formats = plan_folder(folder)[1].schemes
    assert sum(f.startswith("awq 4-bit g128") for f in formats.values()) == 14
    quant = {"w_bit": 4, "q_group_size": 128, "zero_point": version != "marlin", "version": version.upper()}
    nested = {"quantization_config": None, "text_config": {"quantization_config": {"quant_method": "awq"} | quant}}
    assert plan_folder(make_awq(tmp_path / "nested", version, **nested)[0])[1].schemes == formats
    bare, _ = make_awq(tmp_path / "bare", version, quantization_config=None)
    assert plan_folder(bare, flag="awq")[1].schemes == formats
    (bare / "quant_config.json").write_text(str(quant).replace("'", '"').replace("True", "true").replace("F", "f"))
    assert plan_folder(bare)[1].schemes == formats


def test_awq_asked_for_on_another_format(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tokenizer=False, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(Exception, match=r"--quantization awq contradicts the checkpoint; have: gptq.*need: awq"):
        plan_folder(folder, flag="awq")


def test_bits_of_8_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = make_awq(tmp_path, "gemm", quant={"bits": 8})
    with pytest.raises(CheckpointError, match="bits 8 is not supported by awq"):
        plan_folder(folder)


def test_a_linear_of_mixed_layouts_runs_in_parts(tmp_path: Path) -> None:
    """q and k in gemm, v in gemv: right all the same."""
    folder, meaning = make_awq(tmp_path, "gemm")
    other, _ = make_awq(tmp_path / "other", "gemv")
    tensors = load_file(folder / "model.safetensors")
    for name, t in load_file(other / "model.safetensors").items():
        if ".v_proj." in name:
            tensors[name] = t
    mixed, _ = make_awq(tmp_path / "mixed", "gemm", edit=lambda stored: stored.update(tensors))
    model, plan, _ = plan_folder(mixed)
    assert "run in parts" in plan.notes[-1] and "'gemm'" in plan.warnings[0]
    load(plan)
    got = torch.stack(PagedRun(model, IDS).run())
    assert meets_reference(got, expected(folder, meaning), 0.99999) is None
