"""KV scales: every spelling is found before anything is fused, every odd one is refused, none is lost."""

from __future__ import annotations

import pytest
import torch

from qengine.errors import CheckpointError
from qengine.layers.attention import Attention
from qengine.layers.module import ModelContext
from qengine.plugin import AttentionSpec, DeviceInfo, TensorInfo
from qengine.runtime.kv_dtypes import KVDtypes
from qengine.runtime.kv_scales import SPELLINGS, ResolvedScales, resolve_kv_scales
from qengine.runtime.safetensors_file import CODES
from qengine_dense.kv import AutoKV
from qengine_kv_fp8.backend import Fp8E4M3KV

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
HEADS = 2


class Tensors:
    """A tensor source in memory."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values
        self.tensors = {n: TensorInfo(n, CODES[t.dtype], tuple(t.shape)) for n, t in values.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def file_position(self, name: str) -> tuple[str, int]:
        return "", 0


def attention() -> list[Attention]:
    ctx = ModelContext(None, torch.device("cpu"), DeviceInfo("cpu"), torch.float32, torch.float32, 64)
    return [Attention(ctx, name, AttentionSpec(4, HEADS, 64, 0.125)) for name in LAYERS]


def found(values: dict[str, torch.Tensor], **config: object) -> ResolvedScales:
    return resolve_kv_scales(Tensors(values), layers := attention(), KVDtypes.uniform(layers, Fp8E4M3KV), config)


def value(x: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, x, dtype=dtype)


def test_no_scales_mean_one() -> None:
    out = found({"model.layers.0.self_attn.q_proj.weight_scale": value(3.0, 1)})
    assert not out.consumed and not out.warnings
    for scales in out.scales.values():
        assert scales.k.tolist() == scales.v.tolist() == [1.0, 1.0] and scales.source == "default 1.0"


@pytest.mark.parametrize("names", [
    ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"),
    ("attn.k_scale", "attn.v_scale"), ("qkv_proj.k_scale", "qkv_proj.v_scale"), ("k_cache.scale", "v_cache.scale"),
], ids=lambda names: names[0])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
def test_every_spelling_of_a_pair(names: tuple[str, str], shape: tuple[int, ...]) -> None:
    k, v = names
    values = {}
    for i, layer in enumerate(LAYERS):
        values[f"{layer}.{k}"] = value(0.25 + i, *shape)
        values[f"{layer}.{v}"] = value(0.5 + i, *shape)
    out = found(values)
    assert out.consumed == set(values)
    for i, layer in enumerate(LAYERS):
        scales = out.scales[layer]
        assert scales.k.tolist() == [0.25 + i] * HEADS and scales.v.tolist() == [0.5 + i] * HEADS
        assert scales.source == f"checkpoint {k}, {v}" and scales.k.dtype is torch.float32
    # Wrong control: a name one letter off is not taken for a scale of this pair.
    odd = {f"{name}s": t for name, t in values.items()}
    assert found(odd).scales[LAYERS[0]].k.tolist() == [1.0] * HEADS


def test_all_spellings_are_covered_here() -> None:
    assert len(SPELLINGS) == 13


def test_one_shared_scale() -> None:
    out = found({f"{layer}.kv_scale": value(0.5) for layer in LAYERS})
    assert out.scales[LAYERS[1]].k.tolist() == out.scales[LAYERS[1]].v.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1)], ids=["flat", "llm-compressor"])
def test_one_scale_per_head(shape: tuple[int, ...]) -> None:
    per_head = torch.tensor([0.25, 2.0]).reshape(shape).to(torch.bfloat16)
    out = found({f"{layer}.{kind}_scale": per_head for layer in LAYERS for kind in "kv"})
    assert out.scales[LAYERS[0]].k.tolist() == [0.25, 2.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 2.5e-21], ids=str)
@pytest.mark.parametrize("kind", ["k", "v"])
def test_unusable_values_are_refused_by_name(bad: float, kind: str) -> None:
    values = {f"{layer}.{k}_scale": value(0.5, 1) for layer in LAYERS for k in "kv"}
    found(values)
    values[f"{LAYERS[1]}.{kind}_scale"] = value(bad, 1)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.{kind}_scale is no usable KV scale"):
        found(values)


def test_one_bad_head_among_good_ones() -> None:
    values = {f"{layer}.{k}_scale": torch.tensor([0.5, 0.0]) for layer in LAYERS for k in "kv"}
    with pytest.raises(CheckpointError, match="no usable KV scale"):
        found(values)


def test_partial_scales_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"1 attention layers have KV scales and 1 have none.*layers\.1"):
        found({f"{LAYERS[0]}.{k}_scale": value(0.5) for k in "kv"})
    with pytest.raises(CheckpointError, match="only one of K and V"):
        found({f"{layer}.k_scale": value(0.5) for layer in LAYERS})


# One spelling of K's scale for each rank, the highest first, and V's.
RANKED = [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]


def both(pair: tuple[str, str], x: float) -> dict[str, torch.Tensor]:
    return {f"{layer}.{leaf}": value(x) for layer in LAYERS for leaf in pair}


@pytest.mark.parametrize("high, low", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_rank_decides_between_spellings(high: int, low: int, turned: bool) -> None:
    """Whatever the order in the file; the report names what counts and what does not."""
    parts = [both(RANKED[high], 0.5), both(RANKED[low], 0.75)]
    out = found({k: v for part in (parts[::-1] if turned else parts) for k, v in part.items()})
    assert out.scales[LAYERS[0]].k.tolist() == out.scales[LAYERS[0]].v.tolist() == [0.5, 0.5]
    assert out.scales[LAYERS[0]].source == f"checkpoint {', '.join(RANKED[high])}"
    k, v = (f"two KV scales for one thing: {a} counts, {b} says otherwise (2 tensors: "
            for a, b in zip(RANKED[high], RANKED[low], strict=True))  # fmt: skip
    assert len(out.warnings) == 2 and out.warnings[0].startswith(k) and out.warnings[1].startswith(v)
    assert out.consumed == set(parts[0]) | set(parts[1])
    # Control: equal values are no contradiction.
    assert found(both(RANKED[high], 0.5) | both(RANKED[low], 0.5)).warnings == []


def test_a_shared_scale_fills_what_has_none_of_its_own() -> None:
    shared = {f"{layer}.kv_scale": value(0.75) for layer in LAYERS}
    out = found(shared | {f"{layer}.k_scale": value(0.5) for layer in LAYERS})
    assert out.scales[LAYERS[0]].k.tolist() == [0.5, 0.5] and out.scales[LAYERS[0]].v.tolist() == [0.75, 0.75]
    assert out.scales[LAYERS[0]].source == "checkpoint k_scale, kv_scale" and "kv_scale says" in out.warnings[0]


def test_a_value_that_does_not_count_need_not_be_usable() -> None:
    out = found(both(RANKED[0], 0.5) | both(RANKED[2], float("nan")))
    assert out.scales[LAYERS[0]].k.tolist() == [0.5, 0.5] and len(out.warnings) == 2
    with pytest.raises(CheckpointError, match="no usable KV scale"):
        found(both(RANKED[0], float("nan")) | both(RANKED[2], 0.5))


def test_spellings_of_one_rank_must_agree() -> None:
    values = both(RANKED[0], 0.5) | both(("attn.k_scale", "k_cache.scale"), 0.5)
    assert found(values).warnings == []
    values[f"{LAYERS[0]}.attn.k_scale"] = value(0.75)
    with pytest.raises(CheckpointError, match="scale the same thing differently"):
        found(values)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}},
        {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        {"quantization": {"kv_cache_quant_algo": "INT8"}},
        {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
    ],
)
def test_scales_of_another_cache_are_refused(config: dict[str, object]) -> None:
    values = both(RANKED[0], 0.5)
    with pytest.raises(CheckpointError, match=r"made for another KV cache.*need: float 8.*--kv-dtype auto"):
        found(values, **config)
    resolve_kv_scales(Tensors(values), layers := attention(), KVDtypes.uniform(layers, AutoKV), config)
    for fine in ({"quantization": {"kv_cache_quant_algo": "FP8"}}, {"kv_cache_scheme": "static"}):
        assert found(values, **fine).scales[LAYERS[0]].k.tolist() == [0.5, 0.5]


def test_odd_shapes_and_owners_are_refused() -> None:
    values = {f"{layer}.{k}_scale": value(0.5, 3) for layer in LAYERS for k in "kv"}
    with pytest.raises(CheckpointError, match=r"odd shape; have: \[3\]"):
        found(values)
    with pytest.raises(CheckpointError, match=r"belongs to no attention layer.*model\.layers\.0\.self_attn\.k_scale"):
        found({"model.layers.7.self_attn.k_scale": value(0.5)})


def test_query_scales_are_noted_and_zero_points_checked() -> None:
    values = {f"{layer}.{k}_scale": value(0.5) for layer in LAYERS for k in "qkv"}
    values |= {f"{layer}.{k}_zero_point": torch.zeros(1).to(torch.float8_e4m3fn) for layer in LAYERS for k in "qkv"}
    out = found(values)
    assert out.consumed == set(values) and "not needed" in out.notes[0]
    values[f"{LAYERS[0]}.k_zero_point"] = torch.ones(1).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="k_zero_point is not zero"):
        found(values)
    # A cache without scales needs no zero points either.
    resolve_kv_scales(Tensors(values), layers := attention(), KVDtypes.uniform(layers, AutoKV))


def test_a_cache_without_scales_says_that_they_are_not_used() -> None:
    values = {f"{layer}.{k}_scale": value(0.5) for layer in LAYERS for k in "kv"}
    out = resolve_kv_scales(Tensors(values), layers := attention(), KVDtypes.uniform(layers, AutoKV))
    assert out.consumed == set(values) and "not used" in out.notes[0]
    assert out.scales[LAYERS[0]].k.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "config",
    [
        {"kv_cache_scheme": "static"}, {"kv_cache_scheme": {"num_bits": 8, "dynamic": False}},
        {"quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
    ids=["autofp8", "compressed-tensors", "modelopt"],
)  # fmt: skip
def test_promised_scales_that_are_not_there_are_a_warning(config: dict[str, object]) -> None:
    assert "no KV scales" in found({}, **config).warnings[0]
    assert not found({}, kv_cache_scheme=None).warnings
    assert not found({}, kv_cache_scheme={"dynamic": True}).warnings
