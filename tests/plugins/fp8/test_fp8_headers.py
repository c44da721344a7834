"""How a module is stored, told from its headers, with the config as a cross-check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qengine.plugin import DeviceInfo, LinearSpec, TensorInfo
from qengine_fp8.backend import Fp8Quant, Fp8Scheme, OnlineFp8Scheme

SPEC = LinearSpec("model.layers.0.self_attn.k_proj", 320, 192)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PLAIN = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def headers(weight: str | None = "F8_E4M3", **leaves: tuple[int, ...]) -> dict[str, TensorInfo]:
    out = {leaf: TensorInfo(f"{SPEC.name}.{leaf}", "F32", shape) for leaf, shape in leaves.items()}
    if weight is not None:
        out["weight"] = TensorInfo(f"{SPEC.name}.weight", weight, (192, 320))
    return out


def scheme_of(config: dict[str, Any] | None, tensors: dict[str, TensorInfo], spec: LinearSpec = SPEC) -> Fp8Scheme:
    scheme = Fp8Quant.parse(config).scheme_for(spec, tensors)
    assert isinstance(scheme, Fp8Scheme)
    return scheme


@pytest.mark.parametrize(
    ("config", "leaves", "label"),
    [
        (PLAIN, {"weight_scale": ()}, "fp8 per tensor"),
        (PLAIN, {"weight_scale": (1,)}, "fp8 per tensor"),
        (STATIC, {"weight_scale": (), "input_scale": ()}, "fp8 per tensor, static activations"),
        (PLAIN, {"weight_scale": (1,), "input_scale": (1,)}, "fp8 per tensor, static activations"),
        (STATIC, {"weight_scale_inv": (), "activation_scale": ()}, "fp8 per tensor, static activations"),
        (PLAIN, {"weight_scale_inv": ()}, "fp8 per tensor"),
        (PLAIN, {"weight_scale": (192, 1)}, "fp8 per channel"),
        (PLAIN, {"weight_scale": (192,)}, "fp8 per channel"),
        (BLOCKS, {"weight_scale_inv": (2, 3)}, "fp8 block 128x128"),
        (BLOCKS, {"scale": (2, 3)}, "fp8 block 128x128"),
        (PLAIN, {"weight_scale_inv": (2, 3)}, "fp8 block 128x128"),
        ({**PLAIN, "weight_block_size": [64, 32]}, {"weight_scale_inv": (3, 10)}, "fp8 block 64x32"),
        (None, {"weight_scale": ()}, "fp8 per tensor"),
    ],
)
def test_granularity(config: dict[str, Any] | None, leaves: dict[str, tuple[int, ...]], label: str) -> None:
    tensors = headers(**leaves)
    scheme = scheme_of(config, tensors)
    assert scheme.format == label and not scheme.notes
    needs = {need.leaf: need for need in scheme.tensors(SPEC)}
    assert {leaf: need.shape for leaf, need in needs.items()} == {leaf: t.shape for leaf, t in tensors.items()}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (BLOCKS, headers(weight_scale_inv=(2, 2)), r"\[2, 3\] for a weight \[192, 320\], the file has \[2, 2\]"),
        (BLOCKS, headers(weight_scale=()), r"the file has \[\]"),
        (PLAIN, headers(weight_scale_inv=(2, 2)), "neither per tensor nor per channel nor by blocks of 128x128"),
        (PLAIN, headers(weight_scale=(), weight_scale_inv=()), "both there"),
        (PLAIN, headers(weight_scale=(), input_scale=(), activation_scale=()), "both there"),
        (PLAIN, headers(weight_scale=(), input_scale=(192,)), r"input_scale has shape \[192\]"),
        (PLAIN, headers("BF16", weight_scale=()), "weight is BF16 and weight_scale is there"),
        (PLAIN, headers("F8_E5M2", weight_scale=()), "weight is F8_E5M2; fp8 reads F8_E4M3"),
        (PLAIN, headers("U8", weight_scale=()), "weight is U8"),
        (PLAIN, headers("U8", weight_scale=(192, 20), weight_scale_2=()), "weight_scale_2 belongs to NVFP4"),
        (PLAIN, headers(weight_scale=(), pre_quant_scale=(320,)), "pre_quant_scale belongs to AWQ"),
        (PLAIN, headers(None, qweight=(40, 192), scales=(3, 192)), "qweight belongs to GPTQ or AWQ"),
        (PLAIN, headers(None, weight_scale=()), "weight_scale is there without a weight"),
    ],
)  # fmt: skip
def test_contradictions_name_both_sides(
    config: dict[str, Any], tensors: dict[str, TensorInfo], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Quant.parse(config).scheme_for(SPEC, tensors)


def test_missing_scales_are_left_to_the_accounting() -> None:
    """Under the names that the config makes likely, so that the list of missing tensors is right."""
    names = lambda scheme: [need.leaf for need in scheme.tensors(SPEC)]  # noqa: E731
    assert names(scheme_of(PLAIN, headers())) == ["weight", "weight_scale"]
    assert names(scheme_of(BLOCKS, headers())) == ["weight", "weight_scale_inv"]
    assert names(scheme_of(STATIC, headers(weight_scale=()))) == ["weight", "weight_scale", "input_scale"]
    assert names(scheme_of(STATIC, headers(weight_scale_inv=()))) == ["weight", "weight_scale_inv", "activation_scale"]


def test_the_file_counts_over_the_skip_list() -> None:
    config = PLAIN | {"ignored_layers": ["k_proj"]}
    (note,) = scheme_of(config, headers(weight_scale=())).notes
    assert "k_proj" in note and "the file counts" in note
    assert Fp8Quant.parse(config).scheme_for(SPEC, headers("BF16")) is None
    assert Fp8Quant.parse(PLAIN).scheme_for(SPEC, headers("BF16")) is None


DYNAMIC = {
    "quant_method": "fp8", "weight_scale_semantics": "inverse", "weight_scale_method": "block",
    "weight_block_size": [128, 128], "dynamic": {
        "-:.*q_proj": {}, "+:.*k_proj": {"weight_scale_method": "row", "weight_block_size": None},
        "model": {"weight_block_size": [64, 32]},
    },
}  # fmt: skip


def test_gptqmodels_rules_for_single_modules() -> None:
    """The first that matches counts, as with GPTQ; sorted out of order, the one that fits the tensors."""
    row, small = headers(weight_scale_inv=(192,)), headers(weight_scale_inv=(3, 10))
    assert scheme_of(DYNAMIC, row).format == "fp8 per channel" and not scheme_of(DYNAMIC, row).notes
    other = scheme_of(DYNAMIC, small, LinearSpec("model.layers.0.mlp.up_proj", 320, 192))
    assert other.format == "fp8 block 64x32" and not other.notes and other.stored.divides
    (note,) = scheme_of(DYNAMIC, small).notes
    assert "'model' is the one that fits the file, not the dynamic rule '+:.*k_proj'" in note
    taken_out = LinearSpec("model.layers.0.self_attn.q_proj", 320, 192)
    assert Fp8Quant.parse(DYNAMIC).scheme_for(taken_out, headers("BF16")) is None
    assert "the config skips -:.*q_proj, but the file holds it" in scheme_of(DYNAMIC, small, taken_out).notes[0]
    assert scheme_of(DYNAMIC, headers(weight_scale_inv=(2, 3)), LinearSpec("head", 320, 192)).format.endswith("128x128")
    with pytest.raises(ValueError, match=r"neither .* \(by the dynamic rule '\+:\.\*k_proj'\)"):
        scheme_of(DYNAMIC, headers(weight_scale_inv=(2, 2)))
    assert [need.leaf for need in scheme_of(DYNAMIC, headers()).tensors(SPEC)] == ["weight", "weight_scale_inv"]


def test_without_a_config_dense_weights_are_converted() -> None:
    scheme = scheme_of(None, headers("BF16"))
    assert isinstance(scheme, OnlineFp8Scheme) and scheme.format == "fp8 per channel, made at load"
    assert [(n.leaf, n.shape) for n in scheme.tensors(SPEC)] == [("weight", (192, 320))]
    quant = Fp8Quant.parse(None)
    routers = ("model.layers.3.block_sparse_moe.gate", "mlp.shared_expert_gate")
    for name in ("lm_head", "model.embed_tokens", "transformer.wte", *routers):
        assert quant.scheme_for(LinearSpec(name, 320, 192), headers("BF16")) is None
    assert quant.scheme_for(LinearSpec("model.layers.0.mlp.gate_proj", 320, 192), headers("BF16")) is not None


def test_what_runs_fused() -> None:
    tensor, channel = (scheme_of(PLAIN, headers(weight_scale=shape)) for shape in ((), (192, 1)))
    block = scheme_of(BLOCKS, headers(weight_scale_inv=(2, 3)))
    static = scheme_of(STATIC, headers(weight_scale=(), input_scale=()))
    online = scheme_of(None, headers("F16"))
    assert tensor.key == channel.key
    inverse = scheme_of(PLAIN | {"weight_scale_semantics": "inverse"}, headers(weight_scale_inv=()))
    assert len({s.key for s in (tensor, block, static, online, inverse)}) == 5


def test_capability() -> None:
    gpu = {sm: DeviceInfo("cuda", capability=(sm // 10, sm % 10)) for sm in (70, 75, 80, 89, 90)}
    scheme = scheme_of(PLAIN, headers(weight_scale=()))
    half, wide = torch.float16, torch.float32
    assert not scheme.capability(gpu[70], half) and "7.5" in scheme.capability(gpu[70], half).reason
    assert "--dtype half" in scheme.capability(gpu[75], torch.bfloat16).reason
    for info, dtype, why in (
        (gpu[75], half, "sm_89, this GPU is sm_75"), (gpu[80], torch.bfloat16, "sm_80"), (gpu[90], wide, "float32"),
        (DeviceInfo("cpu"), torch.bfloat16, "stay one byte"),
    ):  # fmt: skip
        answer = scheme.capability(info, dtype)
        assert answer.kind == "emulated" and "weight-only mode" in answer.reason and why in answer.reason
    assert scheme.capability(gpu[89], half).kind == scheme.capability(gpu[90], torch.bfloat16).kind == "native"
    forced = Fp8Scheme(scheme.stored, weight_only=True)
    assert forced.capability(gpu[90], half).kind == "emulated" and forced.key != scheme.key
