"""`calibrate --kv-dtype` with a map: K and V apart, layers apart, dtypes without scales, and what is served then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qengine.cli.main import main
from qengine.config import EngineConfig
from qengine.errors import ConfigError
from qengine.runtime.decide import Built, decide
from qengine.runtime.kv_sidecar import TENSORS
from qengine_calibration import damage_report
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_copy, make_kv_scales
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from toy_models import VOCAB, make_tiny

LAYERS = [f"model.layers.{i}.self_attn" for i in (0, 1)]
MIXED = "k=fp8,v=auto,layers.1=fp8_e5m2"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("map") / "model")


@pytest.fixture(scope="module")
def texts() -> Texts:
    ids = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    return Texts([ids[:100], ids[100:]], 100, "random ids", 1, 1, "")


def measure(tiny: Path, out: Path, texts: Texts, kv_dtype: str, **options: Any) -> dict[str, Any]:
    wanted = RunOptions(kv=KVOptions(kv_dtype, "head", "amax", **options), device="cpu")
    facts: dict[str, Any] = make_kv_scales(tiny, out, texts, wanted)["kv"]
    return facts


def built(tiny: Path, kv: str, scales: Path) -> Built:
    config = EngineConfig(model=str(tiny), device="cpu", dtype="float32", kv_cache_dtype=kv, kv_scales=str(scales))
    return decide(config)


def served(b: Built) -> list[str]:
    return ["/".join(plugin.name for plugin in pair) for pair in b.kv.sides.values()]


def test_a_map_is_measured_and_served(tiny: Path, texts: Texts, tmp_path: Path) -> None:
    facts = measure(tiny, tmp_path, texts, MIXED)
    assert facts["kv_dtype"] == {LAYERS[0]: {"k": "fp8_e4m3", "v": "auto"}, LAYERS[1]: "fp8_e5m2"}
    assert facts["measured_for"] == facts["kv_dtype"]
    tensors = load_file(tmp_path / TENSORS)
    assert set(tensors) == {f"{LAYERS[0]}.k_scale", f"{LAYERS[1]}.k_scale", f"{LAYERS[1]}.v_scale"}
    for layer, side, largest in ((0, "k", 448), (1, "k", 57344), (1, "v", 57344)):
        amax = torch.tensor(facts["layers"][LAYERS[layer]][side]["amax"])
        assert torch.allclose(tensors[f"{LAYERS[layer]}.{side}_scale"], amax / largest)
    # Only keys are rounded in layer 0; two fraction bits in layer 1.
    errors = [facts["layers"][name]["attention_output_error"] for name in LAYERS]
    other = measure(tiny, tmp_path / "both", texts, "fp8")["layers"]
    both = [other[name]["attention_output_error"] for name in LAYERS]
    assert 0 < errors[0] < 0.8 * both[0] and errors[1] > 1.2 * both[1]

    b = built(tiny, MIXED, tmp_path)
    assert served(b) == ["fp8_e4m3/auto", "fp8_e5m2/fp8_e5m2"] and not b.scales.warnings and not b.kv.notes
    assert b.scales.scales[LAYERS[0]].k.tolist() == tensors[f"{LAYERS[0]}.k_scale"].tolist()
    assert b.scales.scales[LAYERS[0]].v.tolist() == [1.0, 1.0]
    # A map that it was not measured for changes nothing that it does not know.
    other = built(tiny, "fp8", tmp_path)
    assert served(other) == ["fp8_e4m3/fp8_e4m3"] * 2 and "has no scales for" in other.scales.warnings[0]


def test_a_damaged_layer_of_a_map_keeps_16_bits_on_both_sides(tiny: Path, texts: Texts, tmp_path: Path) -> None:
    facts = measure(tiny, tmp_path, texts, "k=fp8_e4m3,v=fp8_e5m2", most_damage=1e-6)
    assert facts["kept_16_bit"] == LAYERS and facts["kv_dtype"] == "auto"
    assert served(built(tiny, "k=fp8_e4m3,v=fp8_e5m2", tmp_path)) == ["auto/auto"] * 2
    assert served(built(tiny, "fp8_e4m3", tmp_path)) == ["auto/fp8_e4m3"] * 2
    assert served(built(tiny, "k=auto,v=fp8_e4m3", tmp_path)) == ["auto/fp8_e4m3"] * 2


def test_the_report_knows_sides_without_scales(tiny: Path, texts: Texts, tmp_path: Path) -> None:
    wanted = RunOptions(kv=KVOptions("k=fp8,v=auto", method="amax"), device="cpu")
    facts = make_kv_scales(tiny, tmp_path, texts, wanted)
    assert any("attention-output error" in line for line in damage_report.lines(facts))
    page = damage_report.html_page(facts)
    assert "K clipped" in page and facts["kv"]["layers"][LAYERS[0]]["v"].keys() == {"kv_dtype", "amax"}


def test_what_cannot_be_asked_for(tiny: Path, texts: Texts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no scales"):
        KVOptions("k=auto,v=auto")
    with pytest.raises(ConfigError, match="there is no layer 2"):
        measure(tiny, tmp_path, texts, "fp8,layers.2=auto")
    with pytest.raises(ConfigError, match="for an e4m3 cache, not auto"):
        wanted = RunOptions(kv=KVOptions("k=fp8,v=auto"), device="cpu")
        make_copy(tiny, tmp_path / "copy", texts, wanted, embed=True)


def test_from_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text " * 100)
    argv = ["calibrate", str(tiny), "--kv-dtype", "k=fp8_e4m3,v=auto", "--data", str(tmp_path / "t.txt")]
    argv += ["--seq-len", "64", "--eval-tokens", "128", "--device", "cpu", "-q", "--out", str(tmp_path / "kv")]
    assert main(argv) == 0
    assert "end to end on 128 tokens" in capsys.readouterr().err
    found = json.loads((tmp_path / "kv" / "kv_calibration.json").read_text())
    assert found["end_to_end"]["b"]["kv_dtype"] == "k=fp8_e4m3, v=auto"
    assert main(["calibrate", str(tiny), "--kv-dtype", "k=fp8,v=nope"]) == 2
    assert "nope" in capsys.readouterr().err
