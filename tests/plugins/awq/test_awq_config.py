"""Which AWQ files are read and which are refused by field and value (case C08, the plugin's half)."""

from typing import Any

import pytest
import torch

from qengine.plugin import DeviceInfo, LinearSpec, TensorInfo
from qengine_awq.backend import AwqQuant, AwqScheme

SPEC = LinearSpec("model.layers.0.mlp.up_proj", 576, 960)


def headers(**shapes: Any) -> dict[str, TensorInfo]:
    kinds = {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32", "weight": "F16"}
    return {leaf: TensorInfo(f"{SPEC.name}.{leaf}", kinds[leaf], shape) for leaf, shape in shapes.items()}


def gemm(groups: int = 9) -> dict[str, TensorInfo]:
    return headers(qweight=(576, 120), qzeros=(groups, 120), scales=(groups, 960))


NEW = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    "config",
    [
        NEW,
        NEW | {"modules_to_not_convert": None},
        {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
        NEW | {"version": "exllama"},
        NEW | {"version": "ipex"},
        {"method": "awq", "quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm", "bits": 4,
         "group_size": 64, "zero_point": False},
        {"group_size": 64},
        None,
    ],
    ids=["new", "null-skips", "old", "exllama", "ipex", "gptqmodel", "bare", "none"],
)  # fmt: skip
def test_gemm_in_every_spelling(config: dict[str, Any] | None) -> None:
    scheme = AwqQuant.parse(config).scheme_for(SPEC, gemm())
    assert isinstance(scheme, AwqScheme)
    assert (scheme.group_size, scheme.zero_point) == (64, True)
    needs = {need.leaf: need.shape for need in scheme.tensors(SPEC)}
    assert needs == {"qweight": (576, 120), "scales": (9, 960), "qzeros": (9, 120)}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": "gemm_v2"}, ["version", "gemm_v2", "gemv_fast"]),
        ({"format": "paroquant", "version": None}, ["format", "paroquant"]),
        ({"checkpoint_format": 4}, ["checkpoint_format", "4"]),
        ({"bits": 8}, ["bits", "8"]),
        ({"bits": True}, ["bits", "True"]),
        ({"w_bit": 8, "bits": None}, ["w_bit", "8"]),
        ({"group_size": 0}, ["group_size", "0"]),
        ({"group_size": "128"}, ["group_size", "'128'"]),
        ({"zero_point": "yes"}, ["zero_point", "yes"]),
        ({"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "lm_head"]),
        ({"modules_to_not_convert": 3}, ["modules_to_not_convert", "3"]),
        ({"quant_method": "gptq"}, ["quant_method", "gptq"]),
    ],
)
def test_refused_by_field_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        AwqQuant.parse(NEW | change)
    assert all(word in str(e.value) for word in words)


def test_zero_point_false_means_no_qzeros() -> None:
    tensors = headers(qweight=(576, 120), scales=(9, 960))
    scheme = AwqQuant.parse(NEW | {"zero_point": False}).scheme_for(SPEC, tensors)
    assert isinstance(scheme, AwqScheme) and not scheme.zero_point
    assert "qzeros" not in {need.leaf for need in scheme.tensors(SPEC)}


def test_missing_qzeros_stay_needed_where_the_config_says_so() -> None:
    """An unfinished file must show up in the accounting, not be read as symmetric."""
    tensors = headers(qweight=(576, 120), scales=(9, 960))
    scheme = AwqQuant.parse(NEW).scheme_for(SPEC, tensors)
    assert scheme is not None and "qzeros" in {need.leaf for need in scheme.tensors(SPEC)}


def test_gptq_tensors_are_refused_naming_both() -> None:
    plain = headers(qweight=(72, 960), qzeros=(9, 120), scales=(9, 960))
    for tensors in (plain, plain | headers(g_idx=(576,))):
        with pytest.raises(ValueError, match=r"GPTQ.*awq"):
            AwqQuant.parse(None).scheme_for(SPEC, tensors)


GEMV = headers(qweight=(960, 72), qzeros=(960, 2), scales=(960, 16))
FAST = {
    "qweight": TensorInfo("qweight", "I16", (240, 576)),
    "qzeros": TensorInfo("qzeros", "F16", (16, 960)),
    "scales": TensorInfo("scales", "F16", (16, 960)),
}
LLM_AWQ = {("scaled_zeros" if leaf == "qzeros" else leaf): info for leaf, info in FAST.items()}
MARLIN = headers(qweight=(36, 1920), scales=(9, 960))


@pytest.mark.parametrize("stated", ["gemm", "gemv", "gemv_fast", "marlin", None], ids=str)
@pytest.mark.parametrize(
    "tensors, name, group",
    [
        (gemm(), "gemm", 64), (GEMV, "gemv", 64), (FAST, "gemv_fast", 64), (LLM_AWQ, "llm-awq", 64),
        (MARLIN, "marlin", 64), (headers(qweight=(960, 72), qzeros=(960, 4), scales=(960, 32)), "gemv", 32),
    ],
    ids=["gemm", "gemv", "fast", "llm-awq", "marlin", "gemv-32"],
)  # fmt: skip
def test_the_tensors_decide_the_layout(
    tensors: dict[str, TensorInfo], name: str, group: int, stated: str | None
) -> None:
    """Whatever the config says; a contradiction is noted."""
    config = None if stated is None else {"version": stated.upper()}
    scheme = AwqQuant.parse(config).scheme_for(SPEC, tensors)
    assert isinstance(scheme, AwqScheme) and scheme.layout.name == name and scheme.group_size == group
    assert {need.leaf: need.shape for need in scheme.tensors(SPEC)} == {leaf: t.shape for leaf, t in tensors.items()}
    agrees = stated is None or stated in scheme.layout.stated
    assert len(scheme.notes) == (not agrees) and (agrees or f"{stated!r}" in scheme.notes[0])
    assert (name == "gemm") == (name not in scheme.format)


def test_square_gemv_is_told_by_its_scales() -> None:
    spec = LinearSpec("m", 512, 512)
    square = {"qweight": (512, 64), "qzeros": (512, 1), "scales": (512, 8)}
    scheme = AwqQuant.parse(None).scheme_for(spec, headers(**square))
    assert isinstance(scheme, AwqScheme) and scheme.layout.name == "gemv"
    scheme = AwqQuant.parse(None).scheme_for(spec, headers(**square | {"qzeros": (4, 64), "scales": (4, 512)}))
    assert isinstance(scheme, AwqScheme) and scheme.layout.name == "gemm" and scheme.group_size == 128


def test_an_unfinished_module_takes_the_stated_layout() -> None:
    """Only scales [groups, N] are there: four layouts could have them, and the accounting must name the right rest."""
    for version, shape in (("gemm", (576, 120)), ("marlin", (36, 1920))):
        scheme = AwqQuant.parse({"version": version, "group_size": 64}).scheme_for(SPEC, headers(scales=(9, 960)))
        assert scheme is not None and next(n for n in scheme.tensors(SPEC) if n.leaf == "qweight").shape == shape


@pytest.mark.parametrize(
    "tensors, words",
    [
        (headers(qweight=(576, 240), qzeros=(9, 240), scales=(9, 960)), "8-bit weights"),
        (headers(qweight=(144, 960), qzeros=(9, 240), scales=(9, 960)), "GPTQ's layout with 8 bits"),
        (headers(qweight=(576, 120), qzeros=(9, 120), scales=(9, 961)), "do not belong together"),
        (headers(qweight=(36, 1920), qzeros=(9, 120), scales=(9, 960)), "do not belong together"),
        (headers(qweight=(3, 3), scales=(9, 960)), "no layout of AWQ"),
    ],
)
def test_shapes_of_no_layout(tensors: dict[str, TensorInfo], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}.*awq reads qweight"):
        AwqQuant.parse(None).scheme_for(SPEC, tensors)


@pytest.mark.parametrize("zeros", [True, False])
def test_zero_points_are_there_or_not_whatever_the_config_says(zeros: bool) -> None:
    tensors = gemm() if zeros else MARLIN
    scheme = AwqQuant.parse({"zero_point": not zeros, "version": "gemm" if zeros else "marlin"}).scheme_for(
        SPEC, tensors
    )
    assert isinstance(scheme, AwqScheme) and scheme.zero_point == zeros and "zero_point is" in scheme.notes[0]


def test_scaled_activations_are_refused() -> None:
    quant = AwqQuant.parse(NEW)
    reason = quant.unread(TensorInfo("transformer.h.0.mlp.act.scales", "F16", (512,)))
    assert reason is not None and "activation" in reason
    assert quant.unread(TensorInfo("model.layers.0.mystery.weight", "F16", (3,))) is None
    # A quantised layer that the config does not count is a stale tensor, no activation.
    assert quant.unread(TensorInfo("model.layers.9.mlp.up_proj.scales", "F16", (9, 960))) is None


@pytest.mark.parametrize("k, rows, want", [(576, 9, 64), (576, 18, 32), (576, 1, -1), (96, 2, 64), (1536, 12, 128)])
def test_group_size_from_the_tensors_alone(k: int, rows: int, want: int) -> None:
    spec = LinearSpec("m", k, 960)
    tensors = headers(qweight=(k, 120), qzeros=(rows, 120), scales=(rows, 960))
    scheme = AwqQuant.parse(None).scheme_for(spec, tensors)
    assert isinstance(scheme, AwqScheme) and scheme.group_size == want


def test_config_that_contradicts_the_tensors() -> None:
    with pytest.raises(ValueError, match=r"group_size 128 .* 5 rows .* 9"):
        AwqQuant.parse(NEW | {"group_size": 128}).scheme_for(SPEC, gemm(9))


def test_tensors_decide_what_is_quantised() -> None:
    quant = AwqQuant.parse(NEW | {"modules_to_not_convert": ["up_proj"]})
    assert quant.scheme_for(SPEC, headers(weight=(960, 576))) is None
    scheme = quant.scheme_for(SPEC, gemm())
    assert scheme is not None and "modules_to_not_convert" in scheme.notes[0]
    assert AwqQuant.parse(NEW).scheme_for(SPEC, {}) is None


def test_capability_by_device_and_dtype() -> None:
    scheme = AwqScheme(64, True)
    gpu = {sm: DeviceInfo("cuda", f"sm_{sm}", divmod(sm, 10)) for sm in (70, 75, 80, 90)}
    cpu = DeviceInfo("cpu")
    refused = scheme.capability(gpu[70], torch.float16)
    assert not refused and "7.5" in refused.reason
    turing = scheme.capability(gpu[75], torch.bfloat16)
    assert not turing and "bfloat16" in turing.reason and "--dtype half" in turing.reason
    assert scheme.capability(gpu[75], torch.float16) and scheme.capability(gpu[80], torch.bfloat16)
    assert scheme.capability(cpu, torch.bfloat16).kind == "native"
    assert scheme.capability(cpu, torch.float32).kind == "emulated"
