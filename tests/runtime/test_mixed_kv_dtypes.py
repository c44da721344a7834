"""K and V, and layers, of different KV dtypes in one pool: who gets what, bytes, scales, and the same text as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qengine.config import EngineConfig
from qengine.errors import CheckpointError, ConfigError, PluginError
from qengine.plugin import SideLayout
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.decide import Built, decide
from qengine.runtime.engine import Engine
from qengine.runtime.kv_sidecar import model_fingerprint, write_sidecar
from qengine_kv_fp8.backend import Fp8E4M3KV
from toy_engine import request, run, toy_engine
from toy_models import make_tiny

LAYERS = [f"model.layers.{i}.self_attn" for i in range(4)]
FULL, HALF = 16 * 2 * 64 * 4, 16 * 2 * 64
"""Bytes of one side of a block: 16 tokens of 2 heads of 64 float32 or 8-bit values."""
MIXED = "fp8,layers.0=auto,layers.3.v=auto"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixed") / "model", num_hidden_layers=4)


def built(folder: Path, kv: str, **options: object) -> Built:
    fields = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, **options}
    return decide(EngineConfig(model=str(folder), kv_cache_dtype=kv, **fields))  # type: ignore[arg-type]


def names(b: Built) -> list[str]:
    return ["/".join(plugin.name for plugin in pair) for pair in b.kv.sides.values()]


def storage(engine: Engine) -> list[torch.Tensor]:
    return engine.runner.cache.storage


@pytest.mark.parametrize(
    ("kv", "blocks"),
    [
        ("auto", [2 * FULL] * 4),
        ("fp8", [2 * HALF] * 4),
        ("k=fp8,v=auto", [HALF + FULL] * 4),
        (MIXED, [2 * FULL, 2 * HALF, 2 * HALF, HALF + FULL]),
    ],
)
def test_planned_bytes_are_those_of_the_pool(tiny: Path, kv: str, blocks: list[int]) -> None:
    engine = toy_engine(tiny, kv_cache_dtype=kv)
    assert [t.shape[1] for t in storage(engine)] == blocks
    pool = sum(t.numel() for t in storage(engine))
    b = built(tiny, kv)
    assert pool == b.memory.kv_bytes + b.memory.null_block_bytes
    assert b.memory.kv_tokens == (4 << 20) // sum(blocks) * 16
    line = f"KV cache bytes for one token: {sum(blocks) // 16:,}"
    assert any(text.startswith(line) for text in engine.facts.report)


def test_the_report_names_exceptions(tiny: Path) -> None:
    text = "\n".join(toy_engine(tiny, kv_cache_dtype=MIXED).facts.report)
    assert "KV cache: fp8_e4m3; layer 0: auto; layer 3: k=fp8_e4m3, v=auto" in text
    assert "(layer 0: 1,024 each, layers 1-2: 256 each, layer 3: 640 each)" in text
    assert "KV scales, source=default 1.0: layers 1-2 k=1, v=1; layer 3 k=1" in text
    skipped = toy_engine(tiny, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="3").facts.report
    assert any("KV cache: fp8_e4m3; layer 3: auto" in line for line in skipped)


@pytest.mark.parametrize("kv", ["k=fp8_e4m3,v=auto", "k=auto,v=fp8_e5m2", MIXED])
def test_chunks_and_hits_change_no_text(tiny: Path, kv: str) -> None:
    prompts = [[(7 * i + j) % 250 for i in range(length)] for j, length in enumerate((3, 40, 17, 70))]
    asked = [request(str(i), p) for i, p in enumerate(prompts)]
    whole = run(toy_engine(tiny, kv_cache_dtype=kv), asked)
    chunked = toy_engine(tiny, kv_cache_dtype=kv, max_num_batched_tokens=16)
    assert run(chunked, asked).ids == whole.ids
    again = run(chunked, [request(f"again {i}", p) for i, p in enumerate(prompts)])
    assert again.ids == {f"again {name}": ids for name, ids in whole.ids.items()}
    assert chunked.stats().prefix_cache_hits > 0


def test_each_side_is_stored_by_its_own_dtype(tiny: Path) -> None:
    """After one prompt, K of the first layer is e4m3 codes and V is float32, at the bytes that the layout says; the
    other way round they are not."""
    prompt = list(range(5, 21))
    pools = {}
    for kv in ("auto", "k=fp8,v=auto"):
        engine = toy_engine(tiny, kv_cache_dtype=kv)
        run(engine, [request("a", prompt, max_tokens=1)])
        pools[kv] = next(block for block in storage(engine)[0] if block.any())
    k, v = pools["auto"].view(torch.float32).split(FULL // 4)
    mixed = pools["k=fp8,v=auto"]
    assert torch.equal(mixed[:HALF].view(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn))
    assert torch.equal(mixed[HALF:].view(torch.float32), v)
    assert not torch.equal(mixed[:HALF].view(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)), "control"


def test_layers_and_dtypes_that_are_not_there(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="there is no layer 4"):
        built(tiny, "fp8,layers.4=auto")
    with pytest.raises(PluginError, match="no plugin named 'fp9'"):
        built(tiny, "fp8,layers.2.v=fp9")
    with pytest.raises(ConfigError, match="sliding window"):
        built(tiny, "fp8", kv_cache_dtype_skip_layers="sliding_window")


def test_a_layout_that_is_too_small_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(self: Fp8E4M3KV, block_size: int) -> SideLayout:
        right = SideLayout.dense(self.spec, block_size, torch.uint8)
        return SideLayout(right.dtype, right.nbytes - 1, right.token_stride, right.head_stride, right.row)

    monkeypatch.setattr(Fp8E4M3KV, "layout", lying)
    with pytest.raises(PluginError, match=r"do not fit.*have: 2047 bytes; need: 2048 bytes"):
        built(tiny, "k=auto,v=fp8")


# ---- calibration files with a dtype for each layer


def sidecar(tiny: Path, folder: Path, kv_dtype: object, layers: list[str]) -> Path:
    tensors = {f"{name}.{side}_scale": torch.tensor([0.5]) for name in layers for side in "kv"}
    facts = {"kv_dtype": kv_dtype, "method": "amax", "granularity": "tensor", "text": {"tokens": 1}}
    write_sidecar(folder, model_fingerprint(Checkpoint.open(tiny)), tensors, facts)
    return folder


def excepting(*layers: int) -> dict[str, str]:
    return {name: "auto" if i in layers else "fp8_e4m3" for i, name in enumerate(LAYERS)}


def test_a_calibration_file_excepts_layers(tiny: Path, tmp_path: Path) -> None:
    place = str(sidecar(tiny, tmp_path, excepting(1), [LAYERS[0], *LAYERS[2:]]))
    b = built(tiny, "fp8", kv_scales=place)
    assert names(b) == ["fp8_e4m3/fp8_e4m3", "auto/auto", "fp8_e4m3/fp8_e4m3", "fp8_e4m3/fp8_e4m3"]
    assert [layout.block_bytes for layout in b.layouts] == [2 * HALF, 2 * FULL, 2 * HALF, 2 * HALF]
    assert b.scales.scales[LAYERS[0]].k.tolist() == [0.5, 0.5] and not b.scales.warnings
    assert b.kv.notes and "KV dtype of layer 1 is auto, as" in b.kv.notes[0]
    # Only the side that has the dtype which the file is about.
    assert names(built(tiny, "k=fp8,v=fp8_e5m2", kv_scales=place))[1] == "auto/fp8_e5m2"


def test_flags_overrule_a_calibration_file(tiny: Path, tmp_path: Path) -> None:
    place = str(sidecar(tiny, tmp_path, excepting(1), [LAYERS[0], *LAYERS[2:]]))
    b = built(tiny, "fp8,layers.1.k=fp8,layers.2=auto", kv_scales=place)
    assert names(b) == ["fp8_e4m3/fp8_e4m3", "fp8_e4m3/auto", "auto/auto", "fp8_e4m3/fp8_e4m3"]
    assert b.scales.scales[LAYERS[1]].k.tolist() == [1.0, 1.0]
    assert any(f"no scales for {LAYERS[1]}.k" in line for line in b.scales.warnings)
    assert names(built(tiny, "auto", kv_scales=place)) == ["auto/auto"] * 4
    other = built(tiny, "fp8_e5m2", kv_scales=place)
    assert names(other) == ["fp8_e5m2/fp8_e5m2"] * 4 and "not fp8_e5m2" in other.scales.warnings[0]


def test_a_calibration_file_that_lacks_a_layer_is_refused(tiny: Path, tmp_path: Path) -> None:
    place = str(sidecar(tiny, tmp_path, excepting(1), LAYERS[2:]))
    with pytest.raises(CheckpointError, match=f"does not hold the scales.*{LAYERS[0]}"):
        built(tiny, "fp8", kv_scales=place)
    odd = str(sidecar(tiny, tmp_path / "odd", ["fp8_e4m3"], LAYERS))
    with pytest.raises(CheckpointError, match="no calibration file"):
        built(tiny, "fp8", kv_scales=odd)


def test_scales_go_to_the_sides_that_take_some(tmp_path: Path, tiny: Path) -> None:
    place = str(sidecar(tiny, tmp_path, "fp8_e4m3", LAYERS))
    b = built(tiny, "k=fp8,v=auto,layers.3=auto", kv_scales=place)
    for name in LAYERS[:3]:
        assert (b.scales.scales[name].k.tolist(), b.scales.scales[name].v.tolist()) == ([0.5, 0.5], [1.0, 1.0])
    assert b.scales.scales[LAYERS[3]].k.tolist() == [1.0, 1.0]
