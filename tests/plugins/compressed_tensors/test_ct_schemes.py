"""Which scheme a module gets: targets and ignore, tensors against config, mixed files."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_tensors,
    fp8_weights,
    group_of,
    headers,
    int_tensors,
    quant_config,
    weights,
)
from qengine.plugin import LinearScheme, LinearSpec, TensorInfo
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_compressed_tensors.config import Group, read_config, read_names
from qengine_compressed_tensors.fp8 import Fp8Scheme
from qengine_compressed_tensors.int8 import Int8Scheme
from qengine_compressed_tensors.targets import is_ignored, matching_groups
from qengine_compressed_tensors.weight_only import WeightOnlyInt

N, K = 64, 128
Q = "model.layers.1.self_attn.q_proj"


def packed(bits: int = 4, group: int = 32, **options: Any) -> dict[str, torch.Tensor]:
    return int_tensors(torch.randn(N, K), bits, group, **options)[0]


def scheme(
    config: dict[str, Any] | None, tensors: dict[str, torch.Tensor], name: str = Q, n: int = N, k: int = K
) -> LinearScheme | None:
    return CompressedTensorsQuant.parse(config).scheme_for(LinearSpec(name, k, n), headers(name, tensors))


def w4(targets: list[str] | None = None, group: int = 32, **more: Any) -> dict[str, Any]:
    return group_of(weights(4, "group", group, **more), targets)


def names(groups: list[Group]) -> list[str]:
    return [group.name.removeprefix("config_groups.") for group in groups]


def test_precedence_of_targets() -> None:
    """Exact name before patterns, patterns (anchored at the start only, alphabetical) before classes."""
    config = read_config(
        quant_config(
            w4(["Linear"]),
            w4(["re:.*q_proj"]),
            w4(["re:.*attn"]),
            w4([Q, "Embedding"]),
            w4(["re:self_attn", "q_proj", "LlamaAttention"]),
        )
    )
    assert names(matching_groups(Q, config.groups)) == ["group_3", "group_2", "group_1", "group_0"]
    assert names(matching_groups("model.layers.1.mlp.up_proj", config.groups)) == ["group_0"]
    assert names(matching_groups(Q + "x", config.groups)) == ["group_2", "group_1", "group_0"]


def test_of_equal_targets_the_last_group_counts() -> None:
    config = read_config(quant_config(w4(group=64), w4(group=32)))
    assert names(matching_groups(Q, config.groups)) == ["group_1", "group_0"]


@pytest.mark.parametrize(
    "entry, want",
    [(Q, True), ("re:.*q_proj", True), ("re:model", True), ("Linear", True), ("q_proj", False), ("re:layers", False),
     ("re:.*q_proj$", True), ("LlamaMLP", False)],
)  # fmt: skip
def test_ignore(entry: str, want: bool) -> None:
    assert is_ignored(Q, read_names("ignore", [entry])) == want


def test_mixed_schemes_in_one_file() -> None:
    config = quant_config(
        group_of(fp8_weights("channel"), ["re:.*o_proj"], FP8_DYNAMIC, "float-quantized"),
        group_of(weights(8, "channel"), ["re:.*down_proj"], INT8_DYNAMIC, "int-quantized"),
        group_of(weights(8, "group", 64, symmetric=False), ["re:.*lm_head"], form="pack-quantized"),
        w4(),
        form="mixed-precision",
        ignore=["model.layers.0.mlp.up_proj"],
    )
    o = scheme(config, fp8_tensors(torch.randn(N, K), "channel")[0], "model.layers.0.self_attn.o_proj")
    down = scheme(config, packed(8, -1, layout="bytes"), "model.layers.0.mlp.down_proj")
    head = scheme(config, packed(8, 64, symmetric=False), "lm_head")
    up = scheme(config, {"weight": torch.randn(N, K)}, "model.layers.0.mlp.up_proj")
    gate = scheme(config, packed(), "model.layers.0.mlp.gate_proj")
    assert isinstance(o, Fp8Scheme) and isinstance(down, Int8Scheme) and up is None
    assert isinstance(head, WeightOnlyInt) and (head.stored.bits, head.stored.group_size) == (8, 64)
    assert isinstance(gate, WeightOnlyInt) and gate.stored.bits == 4
    found = (o, down, head, gate)
    assert not any(s.notes for s in found) and len({s.key for s in found}) == 4


def test_whether_a_module_is_quantised_is_what_the_file_holds(caplog: pytest.LogCaptureFixture) -> None:
    ignored = scheme(quant_config(w4(), ignore=[Q]), packed())
    assert isinstance(ignored, WeightOnlyInt) and "ignore list" in ignored.notes[0]
    untargeted = scheme(quant_config(w4(["re:.*mlp.*"])), packed())
    assert isinstance(untargeted, WeightOnlyInt) and "no target" in untargeted.notes[0]
    with caplog.at_level(logging.WARNING):
        assert scheme(quant_config(w4()), {"weight": torch.randn(N, K)}, "model.embed_tokens") is None
        assert not caplog.text, "a tied head is an embedding, whatever the targets say of class Linear"
        assert scheme(quant_config(w4(["re:.*q_proj"])), {"weight": torch.randn(N, K)}) is None
    assert Q in caplog.text and "dense" in caplog.text
    assert scheme(quant_config(w4()), {}) is None, "a tied head has no tensors"
    for config in (None, quant_config()):
        with pytest.raises(ValueError, match=r"weight_packed.*config_groups"):
            scheme(config, packed())


def test_a_less_specific_group_that_fits_the_file() -> None:
    config = quant_config(w4(["re:.*q_proj"], group=64), w4(group=32))
    s = scheme(config, packed())
    assert isinstance(s, WeightOnlyInt) and s.stored.group_size == 32
    assert "group_0" in s.notes[0] and "group_1" in s.notes[0]


@pytest.mark.parametrize(
    "group, tensors, words",
    [
        (w4(group=64), packed(), ["group_0", "int4 per group 64", "[64, 2]", "[64, 4]"]),
        (group_of(weights(8, "group", 32)), packed(), ["num_bits 8", "32 words", "[64, 16]"]),
        (w4(), packed(3), ["num_bits 4", "16 words", "[64, 12]"]),
        (group_of(weights(4, "channel")), packed(), ["int4 per channel", "[64, 1]", "[64, 4]"]),
        (group_of(weights(4, "tensor")), packed(), ["one scale per tensor", "[64, 4]"]),
        (w4(), packed(layout="bytes", bits=8), ["pack-quantized", "weight I8"]),
        (group_of(fp8_weights("channel"), form="float-quantized"), packed(), ["float8", "weight_packed I32"]),
        (w4(), fp8_tensors(torch.randn(N, K), "channel")[0], ["int4", "F8_E4M3"]),
        (
            group_of(fp8_weights("block", [128, 128]), form="float-quantized"),
            fp8_tensors(torch.randn(N, K), "block", (32, 32))[0],
            ["blocks of [128, 128]", "[1, 1]", "[2, 4]"],
        ),
        (
            group_of(fp8_weights("tensor"), form="float-quantized"),
            fp8_tensors(torch.randn(N, K), "channel")[0],
            ["one scale per tensor", "[64, 1]"],
        ),
    ],
)
def test_contradictions_name_both_sides(
    group: dict[str, Any], tensors: dict[str, torch.Tensor], words: list[str]
) -> None:
    group = group | ({} if group["format"] else {"format": "pack-quantized"})
    with pytest.raises(ValueError) as e:
        scheme(quant_config(group), tensors)
    assert all(word in str(e.value) for word in words), e.value


def test_a_global_format_gives_way_to_the_file() -> None:
    s = scheme(quant_config(group_of(weights(8, "channel"))), packed(8, -1, layout="bytes"))
    assert isinstance(s, WeightOnlyInt) and "weight I8" in s.notes[0]


def test_zero_points_count_even_where_the_config_is_symmetric() -> None:
    s = scheme(quant_config(w4()), packed(symmetric=False))
    assert isinstance(s, WeightOnlyInt) and s.stored.zeros == "dense" and "symmetric" in s.notes[0]
    bad = packed(symmetric=False)
    bad["weight_zero_point"] = torch.zeros(7, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight_zero_point I32 \[7, 4\]"):
        scheme(quant_config(w4(symmetric=False)), bad)


@pytest.mark.parametrize("leaf", ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"])
def test_what_is_missing_stays_needed(leaf: str) -> None:
    """An unfinished file shows up in the accounting and is never read as another format."""
    g_idx = torch.arange(K) // 32
    tensors = packed(symmetric=False, g_idx=g_idx)
    del tensors[leaf]
    s = scheme(quant_config(w4(symmetric=False, actorder="group")), tensors)
    assert s is not None
    assert leaf in {need.leaf for need in s.tensors(LinearSpec(Q, K, N)) if need.required}


def test_g_idx_counts_whatever_the_flag_says() -> None:
    s = scheme(quant_config(w4(actorder="static")), packed(g_idx=torch.arange(K) // 32))
    assert isinstance(s, WeightOnlyInt) and s.stored.reordered and "weight_g_idx" in s.notes[0]
    s = scheme(quant_config(w4(actorder="group")), packed(g_idx=torch.arange(K) // 32))
    assert isinstance(s, WeightOnlyInt) and s.stored.reordered and not s.notes


def test_4_bit_floats_are_named_from_their_tensors() -> None:
    """Whatever the config says of them."""
    half = {"weight_packed": ("U8", (N, K // 2))}
    nv = half | {"weight_scale": ("F8_E4M3", (N, 8)), "weight_global_scale": ("F32", (1,))}
    mx = half | {"weight_scale": ("U8", (N, 4))}
    for leaves, name in ((nv, "NVFP4"), (mx, "MXFP4")):
        tensors = {leaf: TensorInfo(f"{Q}.{leaf}", dtype, shape) for leaf, (dtype, shape) in leaves.items()}
        with pytest.raises(ValueError, match=name):
            CompressedTensorsQuant.parse(quant_config(w4())).scheme_for(LinearSpec(Q, K, N), tensors)


def test_weights_that_were_never_compressed() -> None:
    tensors = {"weight": torch.randn(N, K).bfloat16(), "weight_scale": torch.ones(N, 4)}
    with pytest.raises(ValueError, match=r"BF16.*weight_scale.*not compressed"):
        scheme(quant_config(w4()), tensors)
    both = packed() | {"weight": torch.randn(N, K)}
    with pytest.raises(ValueError, match="both"):
        scheme(quant_config(w4()), both)


def test_blocks_that_no_kernel_takes() -> None:
    config = quant_config(group_of(fp8_weights("block", [16, 16])), form="float-quantized")
    with pytest.raises(ValueError, match=r"\[16, 16\].*multiple of 32"):
        scheme(config, fp8_tensors(torch.randn(N, K), "block", (16, 16))[0])


@pytest.mark.parametrize(
    "inputs, runs",
    [
        (INT8_DYNAMIC, True),
        (INT8_DYNAMIC | {"strategy": "tensor"}, True),
        (INT8_DYNAMIC | {"strategy": "tensor", "dynamic": False}, True),
        (INT8_DYNAMIC | {"symmetric": False}, False),
        (INT8_DYNAMIC | {"strategy": "group", "group_size": 128}, False),
        (INT8_DYNAMIC | {"num_bits": 4}, False),
        (FP8_DYNAMIC, False),
    ],
)
def test_which_activations_become_int8(inputs: dict[str, Any], runs: bool) -> None:
    config = quant_config(group_of(weights(8, "channel"), inputs=inputs), form="int-quantized")
    s = scheme(config, packed(8, -1, layout="bytes"))
    assert isinstance(s, Int8Scheme if runs else WeightOnlyInt)
    assert bool(s.notes) != runs


@pytest.mark.parametrize(
    "leaf, value, words",
    [
        ("weight_scale", float("nan"), "weight_scale holds 1 values that are not finite"),
        ("weight_scale", float("inf"), "not finite"),
        ("weight_shape", 65, r"weight_shape says \[65, 128\], the model needs \[64, 128\]"),
        ("weight_g_idx", 3, r"weight_g_idx does not give each of the 4 groups its 32 channels"),
        ("weight_g_idx", 9, r"values from 0 to 9"),
    ],
)
def test_data_that_no_reading_makes_sense_of(leaf: str, value: float, words: str) -> None:
    tensors = packed(g_idx=torch.arange(K) // 32)
    tensors[leaf] = tensors[leaf].clone()
    tensors[leaf].view(-1)[0] = value
    s = scheme(quant_config(w4(actorder="group")), tensors)
    assert s is not None
    with pytest.raises(ValueError, match=f"{Q}.{words}" if words.startswith("weight") else words):
        s.dequantize(LinearSpec(Q, K, N), tensors)


def test_values_that_the_width_does_not_hold() -> None:
    config = quant_config(group_of(weights(3, "group", 32, symmetric=False)), form="naive-quantized")
    tensors = packed(3, symmetric=False, layout="bytes")
    s = scheme(config, tensors)
    assert s is not None
    for leaf in ("weight", "weight_zero_point"):
        spoiled = tensors | {leaf: tensors[leaf].clone()}
        spoiled[leaf][0, 0] = 4
        with pytest.raises(ValueError, match=rf"{leaf} holds values from -[0-4] to 4, which 3 bits do not hold"):
            s.dequantize(LinearSpec(Q, K, N), spoiled)


@pytest.mark.parametrize("code, right", [("BF16", True), ("F32", True), ("I32", False), ("F8_E4M3", False)])
def test_scales_are_floats(code: str, right: bool) -> None:
    """Whatever the file holds as scales, they have to be numbers that scale; the accounting names them otherwise."""
    infos = headers(Q, packed())
    infos["weight_scale"] = replace(infos["weight_scale"], dtype=code)
    found = CompressedTensorsQuant.parse(quant_config(w4())).scheme_for(LinearSpec(Q, K, N), infos)
    assert found is not None
    (need,) = [need for need in found.tensors(LinearSpec(Q, K, N)) if need.leaf == "weight_scale"]
    assert (code in need.dtypes) == right and (need.dtypes[0] == code) == right
    assert set(need.dtypes) == {"F16", "BF16", "F32"}


def test_empty_scales_are_a_wrong_shape() -> None:
    tensors = packed() | {"weight_scale": torch.empty(0, 4)}
    with pytest.raises(ValueError, match=r"weight_scale F32 \[0, 4\]"):
        scheme(quant_config(w4()), tensors)
