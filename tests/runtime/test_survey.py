"""What is wrong with a checkpoint comes with the list of names, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from awq_files import make_awq
from compressed_tensors_files import group_of, int_tensors, quant_config, weights
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.layers.module import ModelContext
from qengine.models.registry import build_model
from qengine.plugin import DeviceInfo
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import select_quant
from qengine.runtime.survey import Survey, grouped, survey
from toy_models import llama_config, llama_tensors, write_model

Stored = dict[str, torch.Tensor]


def look(folder: Path) -> Survey:
    checkpoint = Checkpoint.open(folder)
    choice = select_quant(None, checkpoint.quant)
    ctx = ModelContext(
        load_config(checkpoint), torch.device("cpu"), DeviceInfo("cpu"), torch.float32, torch.float32, 64
    )
    return survey(build_model(ctx).leaves, checkpoint, choice.quant, choice.dense)


def test_all_modules_that_cannot_be_read_are_listed(tmp_path: Path) -> None:
    folder, _ = make_awq(tmp_path, "gemm", quant={"group_size": 64})
    words = "14 modules cannot be read: group_size 64 in the config means 4 rows"
    with pytest.raises(CheckpointError, match=words) as e:
        plan_folder(folder)
    text = str(e.value)
    assert "(12 modules: model.layers.0.self_attn.q_proj" in text and "(2 modules: model.layers.0.mlp" in text


def test_everything_is_found_in_one_go(tmp_path: Path) -> None:
    """A module of no layout, a missing tensor, one of a wrong shape, one that must not be ignored, one that may."""

    def spoil(stored: Stored) -> None:
        del stored["model.layers.0.self_attn.o_proj.qzeros"]
        stored["model.layers.1.mlp.down_proj.qweight"] = torch.zeros(3, 3, dtype=torch.int32)
        stored["model.norm.weight"] = torch.zeros(255).half()
        stored["model.layers.0.mlp.act.scales"] = torch.ones(4).half()
        stored["model.layers.0.mystery.weight"] = torch.ones(4).half()
        stored["model.layers.1.self_attn.q_proj.bias"] = torch.ones(256).half()
        stored["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(128).half()
        stored["model.layers.1.input_layernorm.bias"] = torch.ones(256).half()

    found = look(make_awq(tmp_path, "gemm", edit=spoil)[0])
    assert list(found.refused) == ["model.layers.1.mlp.down_proj"]
    assert found.books.missing == ["model.layers.0.self_attn.o_proj.qzeros"]
    assert found.books.wrong == ["model.norm.weight: have F16 255, need F16 or BF16 or F32 or F64 256"]
    assert list(found.unread) == ["model.layers.0.mlp.act.scales"] and found.extra == ["model.layers.0.mystery.weight"]
    assert sorted(found.odd_biases) == ["model.layers.1.input_layernorm.bias", "model.layers.1.self_attn.q_proj.bias"]
    assert found.zero_biases == ["model.layers.1.self_attn.k_proj.bias"]
    texts = [str(problem) for problem in found.problems()]
    assert len(texts) == 4 and texts[0].startswith("model.layers.1.mlp.down_proj: ")
    # Control: none of it in the file as it was written.
    clean = look(make_awq(tmp_path / "clean", "gemm")[0])
    assert clean.problems() == [] and clean.extra == [] and clean.contradictions() == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", [DeviceInfo("cpu"), DeviceInfo("cuda", "a GPU", (9, 0))], ids=lambda d: d.type)
def test_a_quantised_embedding_is_refused_wherever_rows_are_gathered(
    device: DeviceInfo, tied: bool, tmp_path: Path
) -> None:
    """On a GPU a tied one would pass as an output layer, and end in a crash at the first request."""
    settings = quant_config(group_of(weights(4, "group", 128)))
    config = llama_config(tie_word_embeddings=tied, quantization_config=settings)
    held: Stored = {}
    for name, t in llama_tensors(config).items():
        if name.endswith(("_proj.weight", "embed_tokens.weight")):
            parts, _ = int_tensors(t, 4, 128)
            held |= {f"{name.removesuffix('.weight')}.{leaf}": value for leaf, value in parts.items()}
        else:
            held[name] = t.bfloat16()
    write_model(tmp_path, config, held)
    need = r"need: weight F16 \| BF16 \| F32 \| F64 \[320, 256\]; what would work"
    with pytest.raises(CheckpointError, match=rf"^model.embed_tokens: .*weight_packed I32 \[320, 32\].*{need}"):
        plan_folder(tmp_path, info=device)
    held = {name: t for name, t in held.items() if "embed" not in name}  # control: rows are there
    write_model(tmp_path, config, held | {"model.embed_tokens.weight": torch.zeros(320, 256).bfloat16()})
    assert not plan_folder(tmp_path, info=device)[1].warnings


def test_grouping_keeps_order_and_counts() -> None:
    assert grouped([("a", "x"), ("b", "y"), ("c", "x")]) == ["x (2 modules: a, c)", "y (1 module: b)"]
