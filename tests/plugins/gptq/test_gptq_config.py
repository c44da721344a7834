"""GPTQ configs in all spellings; dynamic rules; everything else refused by field and value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qengine.plugin import LinearSpec, TensorInfo
from qengine.plugin.patterns import NamePattern
from qengine_gptq.backend import GptqQuant, GptqScheme
from qengine_gptq.config import ModuleConfig, read_config
from qengine_gptq.zeros import ZeroRule

BASE: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def headers(k: int, n: int, bits: int, group: int, g_idx: bool = True, **other: TensorInfo) -> dict[str, TensorInfo]:
    groups = 1 if group == -1 else -(-k // group)
    own = {
        "qweight": TensorInfo("m.qweight", "I32", (-(-k * bits // 32), n)),
        "qzeros": TensorInfo("m.qzeros", "I32", (groups, -(-n * bits // 32))),
        "scales": TensorInfo("m.scales", "F16", (groups, n)),
    }
    return own | ({"g_idx": TensorInfo("m.g_idx", "I32", (k,))} if g_idx else {}) | other


def scheme(
    config: dict[str, Any] | None, name: str = "model.layers.0.mlp.up_proj", bits: int = 4, group: int = 32
) -> GptqScheme:
    found = GptqQuant.parse(config).scheme_for(LinearSpec(name, 256, 64), headers(256, 64, bits, group))
    assert isinstance(found, GptqScheme)
    return found


def test_spellings() -> None:
    want = scheme(BASE)
    assert want.key == GptqScheme(4, 32, ZeroRule("gptq", True)).key and want.notes == ()
    old = {"quant_method": "gptq", "wbits": 4, "q_group_size": 32, "sym": True, "desc_act": False}
    assert scheme(old).key == want.key
    assert scheme(old | {"w_bit": 4}).key == want.key
    new = BASE | {"method": "gptq", "format": "gptq_v2", "checkpoint_format": "GPTQ_v2", "pack_dtype": "torch.int32"}
    assert scheme(new).zeros == ZeroRule("gptq_v2", True)
    assert scheme({k: v for k, v in BASE.items() if k != "sym"}).zeros.symmetric is None
    for quantizer in ("gptqmodel:7.6.0", ["optimum:2.3.0", "gptqmodel:7.6.0"]):
        assert scheme(BASE | {"meta": {"quantizer": quantizer}}).zeros.by_word
    assert not scheme(BASE | {"meta": {"quantizer": ["autogptq:0.7"]}}).zeros.by_word
    both = scheme(BASE | {"checkpoint_format": "gptq", "format": "gptq_v2"})
    assert both.zeros.stored == "gptq" and "in one config" in both.notes[0]
    assert "activations are kept" in scheme(BASE | {"activation": {"mlp": {"format": "fp8"}}}).notes[0]
    assert scheme(BASE | {"rotation": None, "activation": None}).notes == ()


def test_act_order_is_expected_unless_groups_are_static() -> None:
    assert scheme(BASE | {"desc_act": True}).act_order
    assert not scheme(BASE | {"desc_act": True, "static_groups": True}).act_order
    assert not scheme(BASE | {"desc_act": True, "meta": {"static_groups": True}}).act_order
    spec = LinearSpec("m", 256, 64)
    required = {n.leaf: n.required for n in scheme(BASE | {"desc_act": True}).tensors(spec)}
    assert required["g_idx"] and not {n.leaf: n.required for n in scheme(BASE).tensors(spec)}["g_idx"]
    one = {n.leaf: n.required for n in scheme(BASE | {"desc_act": True, "group_size": -1}, group=-1).tensors(spec)}
    assert not one["g_idx"], "with one group the order doesn't matter"


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5}, {"bits": 16}, {"bits": "4"}, {"bits": True}, {"group_size": 0}, {"group_size": -2},
        {"group_size": 32.5}, {"sym": "yes"}, {"desc_act": 1}, {"checkpoint_format": "gptq_p"},
        {"checkpoint_format": "marlin"}, {"format": "bitblas"}, {"pack_dtype": "int8"}, {"pack_dtype": "int64"},
        {"method": "qqq"}, {"quant_method": "awq"}, {"is_marlin_format": True}, {"dynamic": ["a"]},
        {"dynamic": {"(": {}}}, {"dynamic": {"a": False}}, {"dynamic": {"a": {"bits": 7}}},
        {"dynamic": {"a": {"checkpoint_format": "marlin"}}}, {"modules_in_block_to_quantize": "q_proj"},
        {"modules_in_block_to_quantize": [[1]]}, {"rotation": "hadamard"}, {"rotation": "random"},
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_field_and_value(change: dict[str, Any]) -> None:
    (field, value), = change.items()
    with pytest.raises(ValueError) as e:
        read_config(BASE | change)
    text = str(e.value)
    assert field in text
    inner = value if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    assert str(inner) in text
    if isinstance(value, dict):
        assert next(iter(value)) in text


DYNAMIC = {
    r"-:.*\.2\.self_attn\.o_proj": {},
    r"+:.*\.1\.mlp\..*": {"bits": 8, "group_size": 64},
    "lm_head": {"bits": 8},
}


def test_dynamic_rules_override_by_name() -> None:
    config = BASE | {"dynamic": DYNAMIC}
    assert scheme(config, "model.layers.0.mlp.up_proj").bits == 4
    other = scheme(config, "model.layers.1.mlp.up_proj", 8, 64)
    assert (other.bits, other.group_size, other.zeros) == (8, 64, ZeroRule("gptq", True))
    assert scheme(config, "lm_head", 8, 32).bits == 8
    assert scheme(config, "model.lm_head").bits == 4, "anchored at the start"
    assert scheme(config, "lm_head.inner", 8).bits == 8, "and not at the end"
    settings = {"sym": False, "desc_act": True}
    found = scheme(BASE | {"dynamic": {"model": settings}})
    assert found.zeros.symmetric is False and found.act_order


def test_the_first_rule_in_the_file_wins() -> None:
    one, two = {r".*up_proj": {"group_size": 64}}, {r".*mlp.*": {"sym": False, "group_size": 64}}
    assert scheme(BASE | {"dynamic": one | two}, group=64).zeros.symmetric is True
    assert scheme(BASE | {"dynamic": two | one}, group=64).zeros.symmetric is False


def test_rules_out_of_order_are_told_by_the_file() -> None:
    """transformers sorts the keys on saving; the tensors show which rule the writer followed."""
    rules = {"+:.*mlp.*": {"bits": 8}, "+:.*up_proj": {"bits": 2}}
    found = scheme(BASE | {"dynamic": rules}, bits=2)
    assert found.bits == 2 and "'+:.*up_proj' is the one that fits" in found.notes[0]
    with pytest.raises(ValueError, match=r"bits 8 means qweight \[64, 64\].*\(4 bits\) \(by the dynamic rule"):
        scheme(BASE | {"dynamic": rules}, bits=4)


def test_what_the_file_holds_counts() -> None:
    """A module that rules or lists take out is dense if the file has a weight, and quantised if it has words."""
    quant = GptqQuant.parse(BASE | {"dynamic": DYNAMIC})
    name = "model.layers.2.self_attn.o_proj"
    spec = LinearSpec(name, 256, 64)
    assert quant.scheme_for(spec, {"weight": TensorInfo(f"{name}.weight", "F16", (64, 256))}) is None
    found = quant.scheme_for(spec, headers(256, 64, 4, 32))
    assert found is not None and "a dynamic rule takes out" in found.notes[0]


def test_optimums_list_of_modules() -> None:
    for value in (["self_attn.q_proj"], [["self_attn.q_proj"], ["mlp.down_proj"]]):
        config = BASE | {"modules_in_block_to_quantize": value}
        assert scheme(config, "model.layers.0.self_attn.q_proj").notes == ()
        assert "leaves out" in scheme(config, "model.layers.0.self_attn.k_proj").notes[0]
        assert scheme(config, "lm_head").notes == (), "the list is about modules inside blocks"
    assert scheme(BASE | {"modules_in_block_to_quantize": None}).notes == ()


@pytest.mark.parametrize(
    ("bits", "group", "config", "message"),
    [
        (8, 32, BASE, r"bits 4 means qweight \[32, 64\] for 256 inputs and 64 outputs, .*\[64, 64\] \(8 bits\)"),
        (4, 64, BASE, r"group_size 32 means 8 rows of scales for 256 inputs, the file has 4 \(by the config\)"),
        (4, 32, BASE | {"group_size": -1}, r"group_size -1 means 1 rows"),
    ],
)
def test_contradictions_name_both(bits: int, group: int, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme(config, bits=bits, group=group)


def test_other_formats_tensors_are_named() -> None:
    quant, spec = GptqQuant.parse(BASE), LinearSpec("m", 256, 64)
    awq = headers(256, 64, 4, 32) | {"qweight": TensorInfo("m.qweight", "I32", (256, 8))}
    with pytest.raises(ValueError, match="AWQ's gemm layout"):
        quant.scheme_for(spec, awq)
    marlin = {"B": TensorInfo("m.B", "I32", (16, 128)), "s": TensorInfo("m.s", "F16", (8, 64))}
    with pytest.raises(ValueError, match="Marlin"):
        quant.scheme_for(spec, marlin)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_without_a_config_the_tensors_tell(bits: int, group: int) -> None:
    found = scheme(None, bits=bits, group=group)
    assert (found.bits, found.group_size, found.zeros.stored) == (bits, group, "gptq")
    spec = LinearSpec("m", 200, 64)
    ragged = GptqQuant.parse(None).scheme_for(spec, headers(200, 64, bits, 32))
    assert isinstance(ragged, GptqScheme) and ragged.group_size == 32
    odd = headers(256, 64, 4, 32) | {"qweight": TensorInfo("m.qweight", "I32", (31, 64))}
    with pytest.raises(ValueError, match="no bits"):
        GptqQuant.parse(None).scheme_for(LinearSpec("m", 256, 64), odd)


def test_rules_are_read_once_each() -> None:
    config = read_config(BASE | {"dynamic": DYNAMIC})
    assert [rule.settings is None for rule in config.rules] == [True, False, False]
    assert all(isinstance(rule.pattern, NamePattern) for rule in config.rules)
    assert next(config.matches("lm_head")) == ModuleConfig(8, 32, True, source="the dynamic rule 'lm_head'")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    "bits", "wbits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "method", "pack_dtype", "dynamic",
    "modules_in_block_to_quantize", "meta", "static_groups", "is_marlin_format", "quant_method",
)  # fmt: skip
SHAPE = st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple)


@settings(max_examples=300)
@given(
    config=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5),
    shapes=st.dictionaries(st.sampled_from(["qweight", "qzeros", "scales", "g_idx", "B", "s", "weight"]), SHAPE),
    k=st.integers(1, 512),
    n=st.integers(1, 512),
)
def test_any_config_and_any_headers_end_in_a_scheme_or_one_error(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], k: int, n: int
) -> None:
    spec = LinearSpec("model.layers.0.mlp.up_proj", k, n)
    tensors = {leaf: TensorInfo(f"m.{leaf}", "I32", shape) for leaf, shape in shapes.items()}
    try:
        found = GptqQuant.parse(config).scheme_for(spec, tensors)
    except ValueError as e:
        assert str(e)
        return
    if found is not None:
        assert all(need.shape for need in found.tensors(spec))
