"""The config of compressed-tensors: what is read, what is refused by field and value, and that nothing crashes."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from compressed_tensors_files import (
    FP8_DYNAMIC,
    INT8_DYNAMIC,
    fp8_weights,
    group_of,
    quant_config,
    weights,
)
from qengine_compressed_tensors.arguments import read_args
from qengine_compressed_tensors.backend import CompressedTensorsQuant
from qengine_compressed_tensors.config import read_config

W4 = quant_config(group_of(weights(4, "group", 128)))


def changed(path: str, value: Any, base: dict[str, Any] = W4) -> dict[str, Any]:
    """`base` with the field at a dotted path replaced."""
    config = copy.deepcopy(base)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    place[last] = value
    return config


WEIGHTS, INPUTS = "config_groups.group_0.weights", "config_groups.group_0.input_activations"
NVFP4 = weights(4, "tensor_group", 16, type="float")
MXFP4 = weights(4, "group", 32, type="float")


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("format", "nvfp4-pack-quantized", ["format", "nvfp4-pack-quantized", "NVFP4"]),
        ("config_groups.group_0.format", "mxfp4-pack-quantized", ["group_0.format", "mxfp4", "MXFP4"]),
        ("format", "marlin-24", ["format", "marlin-24", "sparse"]),
        ("format", "zip", ["format", "zip", "pack-quantized"]),
        (WEIGHTS, NVFP4, ["group_0.weights", "num_bits 4", "NVFP4"]),
        (WEIGHTS, MXFP4, ["group_0.weights", "num_bits 4", "MXFP4"]),
        (WEIGHTS, weights(8, "group", 32, type="float"), ["strategy", "group", "tensor, channel or block"]),
        (f"{WEIGHTS}.num_bits", 1, ["num_bits 1", "2 to 8"]),
        (f"{WEIGHTS}.num_bits", 12, ["num_bits 12"]),
        (f"{WEIGHTS}.num_bits", "4", ["num_bits '4'"]),
        (f"{WEIGHTS}.type", "complex", ["type 'complex'"]),
        (f"{WEIGHTS}.strategy", "token", ["strategy"]),
        (f"{WEIGHTS}.strategy", "diagonal", ["strategy 'diagonal'"]),
        (f"{WEIGHTS}.group_size", 0, ["group", "group_size"]),
        (f"{WEIGHTS}.group_size", -5, ["group_size -5"]),
        (f"{WEIGHTS}.dynamic", True, ["weights.dynamic"]),
        (f"{WEIGHTS}.dynamic", "often", ["dynamic 'often'"]),
        (f"{WEIGHTS}.actorder", "upside-down", ["actorder 'upside-down'"]),
        (f"{WEIGHTS}.symmetric", 1, ["symmetric 1"]),
        (f"{WEIGHTS}.block_structure", [128, 128], ["block_structure", "group"]),
        (f"{WEIGHTS}.rotation", 3, ["weights.rotation 3"]),
        (INPUTS, FP8_DYNAMIC | {"dynamic": "local"}, ["input_activations.dynamic 'local'"]),
        ("config_groups.group_0.output_activations", INT8_DYNAMIC, ["output_activations", "int8"]),
        ("config_groups.group_0.targets", "Linear", ["targets 'Linear'", "list"]),
        ("config_groups.group_0.targets", [], ["targets"]),
        ("config_groups.group_0.targets", ["re:("], ["targets", "re:(", "regular expression"]),
        ("config_groups.group_0", ["Linear"], ["group_0", "preset"]),
        ("config_groups", [1], ["config_groups [1]", "JSON object"]),
        ("ignore", {"a": 1}, ["ignore", "list"]),
        ("ignore", ["re:["], ["ignore", "re:["]),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, ["sparsity_config.format", "sparse-24-bitmask"]),
        ("transform_config", {"config_groups": {"u": {}}}, ["transform_config", "rotated"]),
        ("quant_method", "gptq", ["quant_method", "gptq"]),
        ("secret_sauce", {"a": 1}, ["secret_sauce"]),
    ],
)  # fmt: skip
def test_refused_by_field_and_value(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        CompressedTensorsQuant.parse(changed(path, value))
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
    "path, value",
    [
        ("sparsity_config", None),
        ("sparsity_config", {"format": "dense"}),
        ("transform_config", None),
        ("transform_config", {"config_groups": {}}),
        ("format", None),
        ("ignore", None),
        ("version", "0.17.1.a20260529"),
        ("quantization_status", "frozen"),
        (f"{WEIGHTS}.scale_dtype", "torch.bfloat16"),
        (f"{WEIGHTS}.zp_dtype", "torch.int8"),
        (f"{WEIGHTS}.strategy", None),
        (f"{WEIGHTS}.strategy", "GROUP"),
        (f"{WEIGHTS}.actorder", "static"),
        (f"{WEIGHTS}.actorder", "weight"),
        (f"{WEIGHTS}.new_field", None),
    ],
)
def test_read(path: str, value: Any) -> None:
    (group,) = read_config(changed(path, value)).groups
    args = group.weights
    assert args is not None
    assert (args.bits, args.strategy, args.group_size, args.actorder) == (4, "group", 128, None)
    assert group.format == ("fakequant" if path == "format" else "pack-quantized")


@pytest.mark.parametrize(
    "size, strategy, group", [(None, "tensor", None), (-1, "channel", None), (0, "tensor", None), (64, "group", 64)]
)
def test_strategy_from_the_group_size(size: int | None, strategy: str, group: int | None) -> None:
    args = read_args("w", {"num_bits": 4, "group_size": size})
    assert args is not None and (args.strategy, args.group_size, args.symmetric) == (strategy, group, True)


def test_actorder_and_blocks_in_their_spellings() -> None:
    for value, want in ((True, "group"), ("dynamic", "group"), ("group", "group"), (False, None), ("Weight", None)):
        args = read_args("w", weights(4, "group", 32, actorder=value))
        assert args is not None and args.actorder == want
    for value in ([128, 64], "128x64"):
        args = read_args("w", fp8_weights("block") | {"block_structure": value})
        assert args is not None and args.block == (128, 64)
    with pytest.raises(ValueError, match="block_structure"):
        read_args("w", fp8_weights("block"))


def test_a_groups_own_format_counts() -> None:
    config = quant_config(
        group_of(fp8_weights("channel"), ["re:.*attn.*"], FP8_DYNAMIC, "float-quantized"),
        group_of(weights(4, "group", 128), form=None),
        form="mixed-precision",
    )
    first, second = read_config(config).groups
    assert (first.format, first.own_format) == ("float-quantized", True)
    assert (second.format, second.own_format) == ("mixed-precision", False)


def test_groups_without_weights_store_nothing() -> None:
    """Attention and KV groups, and files that only have KV scales."""
    attention = group_of(None, ["LlamaAttention"], FP8_DYNAMIC | {"strategy": "tensor", "dynamic": False})
    cache = group_of(None, ["re:.*k_proj", "re:.*v_proj"]) | {"output_activations": FP8_DYNAMIC}
    assert read_config(quant_config(attention, cache)).groups == ()
    assert read_config(quant_config(form="dense")).groups == ()
    assert read_config(quant_config(form="dense") | {"config_groups": None}).groups == ()
    assert read_config(None).groups == ()


def test_the_first_llm_compressors_nesting() -> None:
    config = {"quantization_config": W4, "sparsity_config": {"format": "dense"}}
    assert read_config(config).groups == read_config(W4).groups
    with pytest.raises(ValueError, match="sparse-bitmask"):
        read_config({"quantization_config": {k: v for k, v in W4.items() if k != "sparsity_config"},
                     "sparsity_config": {"format": "sparse-bitmask"}})  # fmt: skip


def test_versions() -> None:
    assert read_config(W4).version == (0, 19, 0)
    for bad in (None, 3, "", "unknown", [1]):
        assert read_config(W4 | {"version": bad}).version == ()
    assert CompressedTensorsQuant.parse(W4).likely_packing == "dense"
    assert CompressedTensorsQuant.parse(W4 | {"version": "0.12.2"}).likely_packing == "padded"


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1.5, float("nan"), "", "x", "group", "re:.*", "re:(?P<", [], [None], ["a"],
    [[]], {}, {"a": None}, {"format": 7}, {"config_groups": 1}, "128x", "x" * 5000,
)  # fmt: skip


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(p for key, child in children for p in paths(child, (*prefix, key)))]


def test_fuzzed_configs_are_read_or_refused() -> None:
    """Any value anywhere gives a config or a ValueError of bounded length, never another exception."""
    base = quant_config(
        group_of(fp8_weights("block", [128, 128]), ["re:.*attn.*"], FP8_DYNAMIC, "float-quantized"),
        group_of(weights(4, "group", 128), inputs=INT8_DYNAMIC),
        kv_cache_scheme=weights(8, "tensor", type="float"),
    )
    rng = random.Random(0)
    places = [p for p in paths(base) if p]
    read = refused = 0
    for _ in range(3000):
        config = copy.deepcopy(base)
        for _ in range(rng.randint(1, 3)):
            path, place = rng.choice(places), config
            try:
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = rng.choice(VALUES)
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change has removed this place
        try:
            CompressedTensorsQuant.parse(config)
            read += 1
        except ValueError as e:
            refused += 1
            assert 0 < len(str(e)) < 600
    assert read > 100 and refused > 1000
