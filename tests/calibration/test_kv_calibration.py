"""KV scales that earn their name (C15): the right numbers, less damage than without, picked up for their model only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibration_models import biased
from load_model import load_folder
from qengine.config import EngineConfig
from qengine.errors import CheckpointError, ConfigError
from qengine.layers.kv_layer import bind_kv_layer
from qengine.models.model import Model
from qengine.plugin import AttentionSpec, DeviceInfo, KVLayout, KVScales
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.decide import Built, decide
from qengine.runtime.kv_sidecar import FACTS, TENSORS, model_fingerprint
from qengine.runtime.report import scale_lines
from qengine_awq.quantizer import AwqQuantizer
from qengine_calibration import damage_report
from qengine_calibration.attention_error import attention_error
from qengine_calibration.kv_methods import METHODS, Scaled, choose
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_copy, make_kv_scales, weights_option
from qengine_calibration.observe import KVObserver
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from qengine_dense.kv import AutoKV
from qengine_kv_fp8.backend import Fp8E4M3KV, Fp8E5M2KV
from torch_kv import BLOCK_SIZE, PagedRun
from toy_models import VOCAB, make_tiny

SPEC = AttentionSpec(2, 2, 8, 1.0)
E4M3, E5M2 = (plugin(SPEC, "k", torch.float32) for plugin in (Fp8E4M3KV, Fp8E5M2KV))
CPU = DeviceInfo("cpu")


def texts(tokens: int = 400, length: int = 100, seed: int = 3) -> Texts:
    ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Texts([ids[i : i + length] for i in range(0, tokens, length)], length, "random ids", 1, 1, f"{seed}")


def options(method: str = "mse", granularity: str = "head") -> RunOptions:
    return RunOptions(kv=KVOptions(E4M3.name, granularity, method), device="cpu")


# ---- (a) the arithmetic


def c15a() -> KVObserver:
    """Two keys that differ in one channel, 600 and 500, values +1 and -1; q so that the exact output is tanh(1)."""
    seen = KVObserver(AttentionSpec(1, 1, 16, 1.0))
    k = torch.zeros(2, 1, 16)
    k[0, 0, 0], k[1, 0, 0] = 600.0, 500.0
    v = torch.ones(2, 1, 16)
    v[1] = -1
    q = torch.zeros(2, 1, 16)
    q[1, 0, 0] = 0.02
    seen.see(q, k, v, 2)
    return seen


@pytest.mark.parametrize(
    ("plugin", "scale", "output"), [(E4M3, 1.0, 0.000), (E4M3, 600 / 448, 0.695), (E5M2, 1.0, 0.856)]
)
def test_outputs_of_c15a(plugin: Fp8E4M3KV, scale: float, output: float) -> None:
    seen = c15a()
    (example,) = seen.examples
    codes = plugin.decode(plugin.encode(example.k / scale), torch.float32) * scale
    weights = (codes[:, 0] @ example.q[1, 0]).softmax(0)
    got = float((weights[:, None] * example.v[:, 0]).sum(0)[0])
    assert got == pytest.approx(output, abs=2e-3)
    # The first token's output is exact; the second one's relative error makes up the figure.
    error = attention_error(seen.examples, (plugin, plugin), torch.tensor([scale]), torch.ones(1))
    exact = 0.76159
    assert error == pytest.approx(abs(got - exact) / (1 + exact**2) ** 0.5, rel=2e-2, abs=1e-3)


def test_amax_takes_the_largest_key_to_the_largest_code() -> None:
    scale = choose(c15a().k, [], E4M3, "amax", "head", "keys").scale
    assert scale.tolist() == pytest.approx([600 / 448])


# ---- methods


def observed(k: torch.Tensor, v: torch.Tensor | None = None, size: float = 0.1) -> KVObserver:
    """Keys, and values where given, of sequences of 100 tokens; queries so that scores are about as large as `size`
    times the keys."""
    heads, dim = k.shape[1:]
    seen = KVObserver(AttentionSpec(heads, heads, dim, 1.0))
    q = torch.randn(k.shape, generator=torch.Generator().manual_seed(1)) * size / dim**0.5
    for i in range(0, len(k), 100):
        part = slice(i, i + 100)
        seen.see(q[part], k[part], (k if v is None else v)[part], min(100, len(k) - i))
    return seen


def chosen(x: torch.Tensor, method: str, granularity: str = "head", what: str = "keys") -> Scaled:
    seen = observed(x)
    return choose(seen.k, seen.examples, E4M3, method, granularity, what)


def rounding_error(x: torch.Tensor, scale: torch.Tensor) -> float:
    s = scale[:, None]
    return float((E4M3.decode(E4M3.encode(x / s), torch.float32) * s - x).square().sum())


@pytest.fixture
def values() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(2000, 3, 16) * torch.tensor([1.0, 100.0, 3e-4])[:, None]
    x[7, 0, 3] = 900.0  # one outlier
    return x


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_head_gets_a_scale_of_its_size(method: str, values: torch.Tensor) -> None:
    found = chosen(values, method)
    amax = values.abs().amax((0, 2))
    assert torch.allclose(found.amax, amax)
    assert torch.isfinite(found.scale).all() and (found.scale > 0).all()
    ratio = found.scale / (amax / 448)
    assert ratio[1:].max() <= 4.1 and ratio[1:].min() >= 0.12
    whole = chosen(values, method, "tensor")
    assert whole.scale.shape == (1,)
    real = (rounding_error(values, found.scale) / values.square().sum()) ** 0.5
    assert found.relative_error == pytest.approx(float(real), rel=0.1)


def test_mse_rounds_best_and_percentile_clips_the_outlier(values: torch.Tensor) -> None:
    by = {m: chosen(values, m) for m in METHODS}
    errors = {m: rounding_error(values, found.scale) for m, found in by.items()}
    assert errors["mse"] <= min(errors.values()) * 1.01
    assert by["percentile"].scale[0] < 0.05 * by["amax"].scale[0] and by["percentile"].clip_rate > 0
    assert by["amax"].clip_rate == 0
    assert rounding_error(values, torch.ones(3)) > errors["mse"]


def test_only_zeros_and_not_finite() -> None:
    found = chosen(torch.zeros(10, 2, 8), "mse")
    assert found.scale.tolist() == [1.0, 1.0] and found.silent
    bad = torch.ones(10, 2, 8)
    bad[3, 1, 2] = torch.inf
    with pytest.raises(CheckpointError, match="the keys of x are not finite"):
        chosen(bad, "mse", "head", "the keys of x")


# ---- (b) a model


IDS = list(range(40, 100))


def logits(model: Model, scales: dict[str, KVScales] | None) -> torch.Tensor:
    """With float32 cache (None) or an e4m3 one."""
    names = iter(layer.name for layer in model.attention)

    def bind(spec: AttentionSpec, blocks: int) -> object:
        name = next(names)
        plugin = AutoKV if scales is None else Fp8E4M3KV
        k, v = plugin(spec, "k", torch.float32), plugin(spec, "v", torch.float32)
        one = torch.ones(spec.num_kv_heads)
        own = KVScales(one, one) if scales is None else scales[name]
        layout = KVLayout.of(BLOCK_SIZE, k.layout(BLOCK_SIZE), v.layout(BLOCK_SIZE))
        storage = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8)
        return bind_kv_layer(k, v, layout, storage, own, CPU)

    return PagedRun(model, [IDS], bind).run()[0]  # type: ignore[arg-type]


def built(folder: Path, **settings: object) -> Built:
    fields = {"kv_cache_dtype": "fp8", **settings}
    return decide(EngineConfig(model=str(folder), device="cpu", dtype="float32", **fields))  # type: ignore[arg-type]


def test_scales_of_a_model_with_large_keys(tmp_path: Path) -> None:
    """C15 (b). The logit error with the file is clearly lower than without."""
    folder = biased(tmp_path / "model")
    facts = make_kv_scales(folder, folder, texts(), options("amax"))
    layers = facts["kv"]["layers"]
    first, second = (layers[f"model.layers.{i}.self_attn"] for i in (0, 1))
    for head in range(2):
        # RoPE turns pairs of equal size into up to sqrt(2) times their size.
        assert first["k"]["scale"][head] == pytest.approx(first["k"]["amax"][head] / 448)
        assert 890 < first["k"]["amax"][head] < 900 * 2**0.5 + 10
        assert second["k"]["scale"][head] < first["k"]["scale"][head] / 50
    assert first["attention_output_error_at_scale_1"] > first["attention_output_error"]
    b = built(folder)
    assert b.scales.scales["model.layers.0.self_attn"].k.tolist() == pytest.approx(first["k"]["scale"])
    model = load_folder(folder)
    exact = logits(model, None)
    one = {n: KVScales(torch.ones(2), torch.ones(2)) for n in b.scales.scales}
    with_file, without = (float((logits(model, s) - exact).norm()) for s in (b.scales.scales, one))
    assert without / with_file > 1.5


def test_rope_is_applied_before_keys_are_measured(tmp_path: Path) -> None:
    """By hand: the largest rotated key of layer 0; the unrotated one is another."""
    folder = biased(tmp_path / "model", 30.0)
    data = texts(100, 100)
    facts = make_kv_scales(folder, tmp_path / "out", data, options("amax"))
    t = load_file(folder / "model.safetensors")
    x = t["model.embed_tokens.weight"][torch.tensor(data.sequences[0])]
    x = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * t["model.layers.0.input_layernorm.weight"]
    p = "model.layers.0.self_attn.k_proj"
    k = (x @ t[f"{p}.weight"].t() + t[f"{p}.bias"]).view(100, 2, 64)
    angle = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = (torch.cat((f(angle), f(angle)), 1)[:, None] for f in (torch.cos, torch.sin))
    turned = k * cos + torch.cat((-k[..., 32:], k[..., :32]), -1) * sin
    got = facts["kv"]["layers"]["model.layers.0.self_attn"]["k"]["amax"]
    assert got == pytest.approx(turned.abs().amax((0, 2)).tolist(), rel=1e-4)
    assert got != pytest.approx(k.abs().amax((0, 2)).tolist(), rel=1e-2)


def test_the_file_is_found_checked_and_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    before = built(folder)
    assert all(s.source == "default 1.0" for s in before.scales.scales.values())
    assert any("WARNING" in line for line in scale_lines(before.kv, before.scales.scales))
    make_kv_scales(folder, folder, texts(), options())
    b = built(folder)
    assert not any("kv_scales" in note for note in b.checkpoint.notes)
    lines = scale_lines(b.kv, b.scales.scales)
    assert all("calibration file" in line and "mse, per head, 400 tokens" in line for line in lines)
    # A copy of the folder is the same model; a fine-tuned one isn't.
    shutil.copytree(folder, tmp_path / "copied")
    assert "calibration file" in built(tmp_path / "copied").scales.scales["model.layers.0.self_attn"].source
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] += 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="another model"):
        built(folder)


def test_other_kv_dtypes_and_places(tmp_path: Path) -> None:
    folder, out = make_tiny(tmp_path / "model"), tmp_path / "scales"
    make_kv_scales(folder, out, texts(), options("amax", "tensor"))
    assert all(t.shape == (1,) for t in load_file(out / TENSORS).values())
    assert built(folder).scales.scales["model.layers.0.self_attn"].source == "default 1.0"
    for place in (out, out / TENSORS, out / FACTS):
        b = built(folder, kv_scales=str(place))
        assert "per tensor" in b.scales.scales["model.layers.1.self_attn"].source
    other = built(folder, kv_scales=str(out), kv_cache_dtype="fp8_e5m2")
    assert "is for KV dtype fp8_e4m3" in other.scales.warnings[0]
    assert "takes no scales" in built(folder, kv_scales=str(out), kv_cache_dtype="auto").scales.notes[0]
    with pytest.raises(CheckpointError, match=r"holds no kv_scales\.safetensors"):
        built(folder, kv_scales=str(tmp_path))


def test_damaged_pairs_are_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    make_kv_scales(folder, folder, texts(), options())
    good = (folder / FACTS).read_text()
    for spoil, word in (
        (lambda f: f.pop("format"), "no calibration file"),
        (lambda f: f.update(sha256="0"), "not the file"),
        (lambda f: f.update(model="0"), "another model"),
    ):
        facts = json.loads(good)
        spoil(facts)
        (folder / FACTS).write_text(json.dumps(facts))
        with pytest.raises(CheckpointError, match=word):
            built(folder)
    (folder / FACTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds no kv_scales\.json"):
        built(folder)


def test_fingerprint_knows_config_and_data_not_the_place(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    mark = model_fingerprint(Checkpoint.open(folder))
    shutil.copytree(folder, tmp_path / "other")
    assert model_fingerprint(Checkpoint.open(tmp_path / "other")) == mark
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    assert model_fingerprint(Checkpoint.open(folder)) != mark


def test_weights_and_scales_in_one_pass(tmp_path: Path) -> None:
    """Values are measured behind the weights that are served: AWQ's factors change them."""
    folder = make_tiny(tmp_path / "model", dtype="float16")
    weights = weights_option("awq", group_size=64)
    both = RunOptions(weights, KVOptions(E4M3.name, "head", "amax"), device="cpu", feed="quantised")
    make_copy(folder, tmp_path / "both", texts(), both)
    b = built(tmp_path / "both")
    assert "calibration file" in b.scales.scales["model.layers.0.self_attn"].source
    make_kv_scales(tmp_path / "both", tmp_path / "again", texts(), options("amax"))
    for name, value in load_file(tmp_path / "again" / TENSORS).items():
        one_pass = load_file(tmp_path / "both" / TENSORS)[name]
        assert torch.allclose(one_pass, value, rtol=0.03), name


def test_embedded_scales_are_the_checkpoints(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    make_copy(folder, tmp_path / "copy", texts(), options(), embed=True)
    assert not (tmp_path / "copy" / TENSORS).exists()
    old, new = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    extra = set(new) - set(old)
    assert extra == {f"model.layers.{i}.self_attn.{k}_scale" for i in (0, 1) for k in "kv"}
    assert all(torch.equal(new[n], old[n]) for n in old)
    assert "checkpoint k_scale" in built(tmp_path / "copy").scales.scales["model.layers.0.self_attn"].source
    # Calibrating again replaces them.
    make_copy(tmp_path / "copy", tmp_path / "third", texts(seed=9), options("amax", "tensor"), embed=True)
    assert load_file(tmp_path / "third" / "model.safetensors")["model.layers.0.self_attn.k_scale"].shape == (1,)


def test_a_layer_that_is_damaged_too_much_keeps_16_bits(tmp_path: Path) -> None:
    """The scales' layer map is served: layer 0 unscaled in 16 bits, layer 1 in fp8."""
    folder = biased(tmp_path / "model")
    facts = make_kv_scales(folder, folder, texts(), options("amax"))
    names = list(facts["kv"]["layers"])
    errors = [facts["kv"]["layers"][n]["attention_output_error"] for n in names]
    assert facts["kv"]["kv_dtype"] == "fp8_e4m3" and facts["kv"]["kept_16_bit"] == [] and errors[0] != errors[1]
    low, high = sorted(errors)
    worst = names[errors.index(high)]
    limited = replace(options("amax"), kv=KVOptions(E4M3.name, "head", "amax", (low + high) / 2))
    facts = make_kv_scales(folder, folder, texts(), limited)
    assert facts["kv"]["kept_16_bit"] == [worst]
    b = built(folder)
    assert [k.name for k, _ in b.kv.sides.values()] == ["auto" if n == worst else "fp8_e4m3" for n in names]
    assert {n: "calibration file" in b.scales.scales[n].source for n in names} == {n: n != worst for n in names}
    strict = replace(limited, kv=KVOptions(E4M3.name, most_damage=low / 10))
    facts = make_kv_scales(folder, tmp_path / "none", texts(), strict)
    assert any(line.startswith("WARNING: all layers keep a 16-bit KV cache") for line in damage_report.lines(facts))
    none = built(folder, kv_scales=str(tmp_path / "none"))
    assert [k.name for k, _ in none.kv.sides.values()] == ["auto", "auto"]
    said: list[str] = []
    facts = make_copy(folder, tmp_path / "copy", texts(), limited, embed=True, say=said.append)
    assert any("should keep a 16-bit KV cache and do not" in line for line in damage_report.lines(facts))
    assert any(line.startswith("WARNING: 1 layers should keep") and worst in line for line in said)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize(
    ("quant", "method", "word"),
    [(None, "compressed-tensors", "kv_cache_scheme"), ("fp8", "compressed-tensors", "kv_cache_scheme"),
     ("block", "fp8", "kv_cache_scheme"), ("awq", "awq", None)],
)  # fmt: skip
def test_embedded_scales_are_announced(
    quant: str | None, method: str, word: str | None, granularity: str, tmp_path: Path
) -> None:
    """In the config and the shapes that other engines' readers look for, where the format has a word for them."""
    folder = make_tiny(tmp_path / "model", dtype="float16")
    made = {"fp8": {}, "block": {"granularity": "block"}, "awq": {"group_size": 64}}
    weights = None if quant is None else weights_option("fp8" if quant == "block" else quant, **made[quant])
    wanted = RunOptions(weights, KVOptions(E4M3.name, granularity, "amax"), device="cpu")
    said: list[str] = []
    make_copy(folder, tmp_path / "copy", texts(), wanted, embed=True, say=said.append)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    told = word is not None and (method != "fp8" or granularity == "tensor")
    assert config["quant_method"] == method and bool(config.get("kv_cache_scheme")) == told
    assert any("no word for KV scales" in line for line in said) != told
    if method == "compressed-tensors":
        assert config["kv_cache_scheme"]["strategy"] == {"tensor": "tensor", "head": "attn_head"}[granularity]
    scale = load_file(tmp_path / "copy" / "model.safetensors")["model.layers.0.self_attn.k_scale"]
    assert scale.shape == ((1,) if granularity == "tensor" else (2, 1, 1))
    b = built(tmp_path / "copy")
    assert b.scales.scales["model.layers.0.self_attn"].k.tolist() == scale.expand(2, 1, 1).flatten().tolist()
    assert not b.scales.warnings and not b.load_plan.warnings


def test_scales_for_another_cache_are_not_embedded(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    wanted = RunOptions(kv=KVOptions(E5M2.name), device="cpu")
    with pytest.raises(ConfigError, match="are for an e4m3 cache, not fp8_e5m2"):
        make_copy(folder, tmp_path / "copy", texts(), wanted, embed=True)


def test_a_quantised_checkpoint_gets_scales_too(tmp_path: Path) -> None:
    from qengine_calibration.quantize import quantize_checkpoint

    folder = biased(tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "copy", AwqQuantizer(group_size=64))
    facts = make_kv_scales(tmp_path / "copy", tmp_path / "copy", texts(), options("amax"))
    assert facts["kv"]["layers"]["model.layers.0.self_attn"]["k"]["amax"][0] > 880
    assert "calibration file" in built(tmp_path / "copy").scales.scales["model.layers.0.self_attn"].source


def test_what_takes_no_scales_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no scales"):
        KVOptions(AutoKV.name)
    with pytest.raises(ConfigError, match="--method"):
        KVOptions(E4M3.name, method="guess")
