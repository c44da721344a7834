"""Scales that serving measures by itself: kept for each KV dtype, beside a file of the user's, which goes first."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qengine.config import EngineConfig
from qengine.errors import CheckpointError, ConfigError
from qengine.runtime.cache_dir import VARIABLE
from qengine.runtime.decide import Built, decide
from qengine.runtime.kv_beside import OWN, own_folder
from qengine.runtime.kv_sidecar import FACTS, TENSORS
from qengine_calibration import prepared
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_kv_scales
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from toy_models import VOCAB, make_tiny

LAYER = "model.layers.0.self_attn"
MAP = "k=fp8_e5m2,v=fp8_e4m3"


@pytest.fixture
def texts() -> Texts:
    ids = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    return Texts([ids[:100], ids[100:]], 100, "random ids", 1, 1, "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return make_tiny(tmp_path / "model")


def start(folder: Path, kv_dtype: str, texts: Texts) -> bool:
    """What a start does with this KV dtype; whether it measured."""
    said: list[str] = []
    prepared.prepared_kv_scales(folder, kv_dtype, said.append, texts)
    return any("measuring scales" in line for line in said)


def built(folder: Path, kv_dtype: str, kv_scales: str | None = None) -> Built:
    options = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_dtype=kv_dtype)
    return decide(replace(options, kv_scales=kv_scales))


def source(b: Built) -> str:
    return b.scales.scales[LAYER].source


def users_file(folder: Path, texts: Texts, kv_dtype: str = "fp8") -> None:
    make_kv_scales(folder, folder, texts, RunOptions(kv=KVOptions(kv_dtype, method="amax"), device="cpu"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("kv_scales.*"))}


def test_every_dtype_is_measured_once(folder: Path, texts: Texts) -> None:
    kept: dict[Path, bytes] = {}
    for kv_dtype, measures in (
        ("fp8", True), ("fp8_e5m2", True), ("fp8", False), (MAP, True), ("fp8_e4m3", False), ("fp8_e5m2", False),
        ("k=fp8,v=fp8", False), (MAP, False), ("auto", False),
    ):  # fmt: skip
        assert start(folder, kv_dtype, texts) == measures, kv_dtype
        assert kept.items() <= (kept := contents(folder)).items()
        b = built(folder, kv_dtype)
        if kv_dtype != "auto":
            assert f"calibration file {own_folder(folder, kv_dtype) / TENSORS} (" in source(b)
            assert not b.scales.warnings and not b.kv.notes
    assert {path.parent for path in kept} == {own_folder(folder, name) for name in ("fp8", "fp8_e5m2", MAP)}
    assert {path.parent.name for path in kept} == {"fp8_e4m3", "fp8_e5m2", MAP}
    # Each serves its own numbers.
    for kv_dtype in ("fp8", "fp8_e5m2", MAP):
        own = load_file(own_folder(folder, kv_dtype) / TENSORS)
        assert built(folder, kv_dtype).scales.scales[LAYER].k.tolist() == own[f"{LAYER}.k_scale"].tolist()


def test_a_file_of_the_users_goes_first_and_stays(folder: Path, texts: Texts) -> None:
    assert start(folder, "fp8", texts) and OWN in source(built(folder, "fp8"))
    users_file(folder, texts)
    mine = {name: (folder / name).read_bytes() for name in (TENSORS, FACTS)}
    assert not start(folder, "fp8", texts) and not start(folder, "k=fp8,v=auto", texts)
    assert f"{folder / TENSORS} (amax" in source(built(folder, "fp8"))
    assert start(folder, "fp8_e5m2", texts)
    assert f"{own_folder(folder, 'fp8_e5m2') / TENSORS} (output" in source(built(folder, "fp8_e5m2"))
    assert f"{folder / TENSORS} is not used" in built(folder, "auto").scales.notes[0]
    assert mine == {name: (folder / name).read_bytes() for name in mine}


def test_a_map_that_names_layers_is_no_other_map(folder: Path, texts: Texts) -> None:
    """Plain fp8 isn't served with scales that lack a layer."""
    partial = "fp8,layers.0=auto"
    assert start(folder, partial, texts) and start(folder, "fp8", texts) and not start(folder, partial, texts)
    assert source(built(folder, partial)) == "default 1.0" and "calibration file" in source(built(folder, "fp8"))
    names = {own_folder(folder, f"fp8,{rest}").name for rest in ("layers.0=auto", "layers.1=auto", "layers.0.k=auto")}
    assert len(names) == 3 and all(name.startswith("fp8_e4m3-") for name in names)
    # Every layer by number: the base dtype is in no layer, which is no reason to measure at each start.
    assert start(folder, "fp8,layers.0-1=fp8_e5m2", texts) and not start(folder, "fp8,layers.0-1=fp8_e5m2", texts)


def test_a_copy_that_is_made_for_a_map(folder: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of a map that leaves layers out do not go beside the copy, where they would count for plain fp8."""
    monkeypatch.setattr(prepared, "load_texts", lambda *_, **__: texts)
    partial = "fp8,layers.0=auto"
    copy = prepared.prepared_copy(folder, "awq", kv_dtype=partial)
    assert not (copy / TENSORS).exists() and (own_folder(copy, partial) / TENSORS).is_file()
    assert prepared.prepared_copy(folder, "awq", kv_dtype="fp8") == copy
    assert "calibration file" in source(built(copy, "fp8")) and not built(copy, "fp8").scales.warnings


def test_damaged_scales_of_its_own_are_measured_anew(folder: Path, texts: Texts) -> None:
    own = own_folder(folder, "fp8")
    assert start(folder, "fp8", texts)
    (own / FACTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds no kv_scales\.json"):
        built(folder, "fp8")
    assert start(folder, "fp8", texts) and not start(folder, "fp8", texts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with pytest.raises(CheckpointError, match="made for another model"):
        built(folder, "fp8")
    assert start(folder, "fp8", texts) and not built(folder, "fp8").scales.warnings


def test_a_damaged_file_of_the_users_is_passed_over_and_named(folder: Path, texts: Texts) -> None:
    users_file(folder, texts)
    (folder / FACTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds no kv_scales\.json"):
        built(folder, "fp8")
    auto = built(folder, "auto").scales.notes
    assert len(auto) == 1 and "KV dtype auto needs none" in auto[0] and "holds no kv_scales.json" in auto[0]
    with pytest.raises(CheckpointError, match=r"holds no kv_scales\.json"):  # what was named has to be there
        built(folder, "auto", kv_scales=str(folder))
    before = (folder / TENSORS).read_bytes()
    assert start(folder, "fp8", texts) and not start(folder, "fp8", texts)
    b = built(folder, "fp8")
    assert OWN in source(b) and "not those beside the model" in b.scales.notes[0]
    assert (folder / TENSORS).read_bytes() == before


def test_two_that_start_together_measure_once(folder: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def counted(source: Path, target: Path, *args: object, **options: object) -> None:
        made.append(target)
        make_kv_scales(source, target, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(prepared, "make_kv_scales", counted)
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(lambda _: start(folder, "fp8", texts), range(2))) == 1
    assert made == [own_folder(folder, "fp8")]


def test_a_place_that_is_none(folder: Path) -> None:
    for name, have in (("word", "no such path"), (f"word/{TENSORS}", "no such path"), ("config.json", "another name")):
        with pytest.raises(ConfigError, match=f"--kv-scales .*{name}; have: .*{have}.*what would work: .*calibrate"):
            built(folder, "fp8", kv_scales=str(folder / name))
