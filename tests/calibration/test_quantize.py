"""Quantised copies: the right modules, the right values, the same bytes, and nothing half-made."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from load_model import load_folder, plan_folder
from qengine.errors import CheckpointError, ConfigError, UserError
from qengine.plugin import LinearSpec
from qengine.runtime.cache_dir import VARIABLE, only_one
from qengine.runtime.checkpoint import Checkpoint
from qengine_awq.backend import AwqQuant
from qengine_awq.quantizer import AwqQuantizer
from qengine_calibration import prepared
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import make_copy, weights_option
from qengine_calibration.prepared import prepared_copy
from qengine_calibration.quantize import fingerprint, group_size, quantize_checkpoint
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts
from qengine_calibration.work import WorkFolder
from torch_kv import PagedRun
from toy_models import VOCAB, make_succ, make_tiny, make_tiny_awq, write_model

IDS = [72, 101, 108, 108, 111, 256, 3, 200]


def logits(folder: Path) -> torch.Tensor:
    run = PagedRun(load_folder(folder), [IDS])
    run.step([len(IDS)])
    return run.logits[0][0]


def dense_meaning(folder: Path) -> dict[str, torch.Tensor]:
    """The copy's weights by their plain meaning, float32."""
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quant is not None
    quant = AwqQuant.parse(checkpoint.quant.config)
    out = {}
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            own = {n.rpartition(".")[2]: n for n in checkpoint.tensors if n.startswith(module + ".")}
            tensors = {k: checkpoint.read(n) for k, n in own.items()}
            spec = LinearSpec(module, tensors["qweight"].shape[0], tensors["scales"].shape[1])
            scheme = quant.scheme_for(spec, {k: checkpoint.tensors[n] for k, n in own.items()})
            assert scheme is not None
            out[f"{module}.weight"] = scheme.dequantize(spec, tensors)
        elif leaf not in ("qzeros", "scales"):
            out[name] = checkpoint.read(name).float()
    return out


def test_round_trip(tmp_path: Path) -> None:
    """The copy loads as AWQ, means weights close to the source's, and runs as exactly those weights."""
    source = make_tiny(tmp_path / "source", dtype="float16", shards=2)
    quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=64))
    _, plan, checkpoint = plan_folder(tmp_path / "copy")
    assert sum(f.startswith("awq") for f in plan.schemes.values()) == 14 and plan.schemes["lm_head"] == "16-bit"
    assert checkpoint.notes == [] and plan.warnings == []
    original = Checkpoint.open(source)
    meaning = dense_meaning(tmp_path / "copy")
    assert set(meaning) == set(original.tensors)
    for name, value in meaning.items():
        want = original.read(name).float()
        error = (value - want).norm() / want.norm()
        assert error < 0.15 if name.endswith("_proj.weight") else error == 0
        assert not name.endswith("_proj.weight") or error > 0.02
    config = json.loads((source / "config.json").read_text())
    dense = write_model(tmp_path / "dense", config, meaning)
    assert torch.allclose(logits(tmp_path / "copy"), logits(dense), atol=1e-3)
    assert not torch.allclose(logits(source), logits(dense), atol=1e-2)


def test_files_around_the_weights(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", shards=2)
    for name in ("LICENSE", "chat_template.jinja", "quantize_config.jsonl", "notes.md"):
        (source / name).write_text(name)
    quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=64))
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert config == json.loads((source / "config.json").read_text())


def test_same_source_same_bytes(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False)
    for name in ("a", "b"):
        quantize_checkpoint(source, tmp_path / name, AwqQuantizer(group_size=64))
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "b"))
    assert one == two


def test_tied_embedding_stays(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False, tie_word_embeddings=True)
    quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=64))
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    assert "model.embed_tokens.weight" in tensors and not [n for n in tensors if n.startswith("lm_head")]
    assert plan_folder(tmp_path / "copy")[0].tied


def test_zero_weights_stay_zero(tmp_path: Path) -> None:
    """SUCC still spells its chain."""
    source = make_succ(tmp_path / "source", chain="abcdef", tokenizer=False, dtype="float16")
    quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=64))
    run = PagedRun(load_folder(tmp_path / "copy"), [list(b"xabcde")])
    run.step([6])
    assert run.logits[0][0].argmax(-1).tolist() == list(b"abcdef")


def test_a_quantised_source_is_refused(tmp_path: Path) -> None:
    source, _ = make_tiny_awq(tmp_path / "source", tokenizer=False)
    with pytest.raises(CheckpointError, match="quantised already; have: awq"):
        quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=64))


def test_a_cut_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False)
    calls = iter(range(100))

    class Cut(AwqQuantizer):
        def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
            if next(calls) == 5:
                raise KeyboardInterrupt
            return super().quantize(spec, weight)

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out" / "copy", Cut(group_size=64))
    assert list((tmp_path / "out").iterdir()) == []
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("widths", "size"), [((576, 1536), 64), ((4096, 11008), 128), ((96, 160), 32), ((256, 257), 128)]
)
def test_group_size_divides_most_inputs(widths: tuple[int, ...], size: int) -> None:
    assert group_size([LinearSpec("x", w, 8) for w in widths]) == size


def test_no_group_size_fits() -> None:
    with pytest.raises(ConfigError, match=r"inputs \[50\]"):
        group_size([LinearSpec("x", 50, 8)])


def test_prepared_copy_is_made_once_and_again_for_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    source = make_tiny(tmp_path / "source", dtype="float16")
    said: list[str] = []
    copy = prepared_copy(source, "awq", said.append)
    assert copy.parent == tmp_path / "cache" / "quantised" and copy.name.startswith("source-awq-g128-calibrated-")
    assert "group size 128" in said[0] and "calibrated with" in said[1] and "tokens of the built-in texts" in said[1]
    for maker in ("make_copy", "quantize_checkpoint"):
        monkeypatch.setattr(prepared, maker, lambda *a, **k: pytest.fail("made twice"))
    assert prepared_copy(source, "awq", said.append) == copy
    assert "made before" in said[-1]
    mark = fingerprint(Checkpoint.open(source))
    (source / "tokenizer_config.json").write_text("{}")
    assert fingerprint(Checkpoint.open(source)) != mark


def test_two_that_make_a_copy_together_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    source = make_tiny(tmp_path / "source", dtype="float16")
    said: list[str] = []
    both_miss_it = Barrier(2, timeout=60)

    def make_together(*args: Any, **options: Any) -> dict[str, Any]:
        both_miss_it.wait()
        return make_copy(*args, **options)

    monkeypatch.setattr(prepared, "make_copy", make_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepared_copy(source, "awq", said.append), range(2))
    assert first == second and Checkpoint.open(first).quant is not None
    assert said.count("another process has made it meanwhile") == 1 and sum("is ready" in line for line in said) == 2


def test_a_format_without_groups_is_asked_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(AwqQuantizer):
        def __init__(self) -> None:
            super().__init__(group_size=-1)

    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(AwqQuant, "quantizer", classmethod(lambda cls, **options: Whole(**options)))
    said: list[str] = []
    copy = prepared_copy(make_tiny(tmp_path / "source", dtype="float16"), "awq", said.append)
    assert copy.name.startswith("source-awq-calibrated-") and "with awq weights (once)" in said[0]


def test_a_copy_that_would_hold_no_quantised_linear_is_not_made(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False)
    with pytest.raises(ConfigError, match=r"have: 256 inputs; need: a multiple of group size 96 \(\d+ linears\)"):
        quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(group_size=96))
    assert not (tmp_path / "copy").exists()


def test_sixteen_bit_needs_no_copy_and_a_reader_cannot_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny(tmp_path / "source", tokenizer=False)
    assert prepared_copy(source, "dense") == source
    monkeypatch.setattr(AwqQuant, "quantizer", classmethod(lambda cls, **options: None))
    with pytest.raises(ConfigError, match="awq weights cannot be made"):
        prepared_copy(source, "awq")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "m", tokenizer=False)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = torch.nan
    save_file(weights, source / "model.safetensors")
    ids = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    texts = Texts([ids[:100], ids[100:]], 100, "random ids", 1, 1, "3")
    making = RunOptions(weights_option("awq", group_size=64), KVOptions("fp8"), device="cpu")
    with pytest.raises(CheckpointError, match=f"outputs of layer 1 are not finite; have: NaN or infinity in {name}"):
        make_copy(source, tmp_path / "copy", texts, making)
    with pytest.raises(CheckpointError, match=r"m cannot be quantised: model\.layers\.1\.mlp\.up_proj: .*finite"):
        quantize_checkpoint(source, tmp_path / "copy", AwqQuantizer(64))
    assert not (tmp_path / "copy").exists()


def test_layers_of_a_run_with_other_settings_are_said_to_be_lost(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "work", "4 bits", 8, resume=False)
    work.save(0, {"a": torch.ones(1)}, {})
    assert WorkFolder(work.path, "4 bits", 8, resume=True).done == 1
    other = WorkFolder(work.path, "3 bits", 8, resume=True)
    assert (other.done, other.lost) == (0, 1)


def test_two_processes_do_not_measure_scales_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    said: list[str] = []
    with only_one(tmp_path, said.append):
        with pytest.raises(UserError, match="has been at work in"), only_one(tmp_path, said.append, wait=0.1):
            pass
        with only_one(tmp_path / "other", said.append):
            pass
    assert len(said) == 1 and "waiting for it" in said[0]
    with only_one(tmp_path, said.append):
        assert not list(tmp_path.glob("*.lock"))
