"""The demo conversion on a tiny GGUF that the gguf package writes here: row order, names, tokenizer, numbers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qengine.errors import CheckpointError
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.gguf_convert import convert, unpermute
from tiny_gguf import DIM, HEADS, KV_HEADS, TOKENS, permute, tiny_weights, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source, target = tmp_path / "tiny.gguf", tmp_path / "hf"
    write_gguf(source)
    target.mkdir()
    convert(source, target)
    return target


def test_rows_of_q_and_k_are_put_back() -> None:
    rows = np.arange(HEADS * DIM, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32)
    stored = permute(rows, HEADS)
    assert not np.array_equal(stored, rows)
    assert np.array_equal(unpermute(stored, HEADS), rows)
    # Wrong control: permuting once more, or with another number of heads, is not the inverse.
    assert not np.array_equal(permute(stored, HEADS), rows)
    assert not np.array_equal(unpermute(stored, HEADS // 2), rows)


def test_every_tensor_has_its_values(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    weights = tiny_weights()
    assert set(checkpoint.tensors) == set(weights)
    for name, value in weights.items():
        stored = checkpoint.read(name)
        assert stored.dtype is torch.float16
        # Q8_0 rounds to 1/127 of each block's largest value; the rest is float16's rounding.
        assert np.abs(stored.float().numpy() - value).max() <= np.abs(value).max() / 127


def test_transformers_computes_the_same_as_from_the_weights(folder: Path) -> None:
    """Loads the folder and agrees with a model that was given the original rows; permuted ones give other logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[3, 5, 7, 11, 13, 2, 4]])

    def logits(weights: dict[str, np.ndarray]) -> torch.Tensor:
        model.load_state_dict({n: torch.from_numpy(w.copy()) for n, w in weights.items()}, strict=False)
        with torch.inference_mode():
            return model(ids).logits

    with torch.inference_mode():
        converted = model(ids).logits
    weights = tiny_weights()
    want = logits(weights)
    assert (converted - want).abs().max() < 0.05 * want.std()
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    as_stored = {
        n: permute(w, heads[n.split(".")[-2]]) if n.split(".")[-2] in heads else w for n, w in weights.items()
    }
    assert (logits(as_stored) - want).abs().max() > 0.05 * want.std()


def test_config_and_stop_ids(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True and config["head_dim"] == DIM
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_digits_are_split_one_by_one(folder: Path) -> None:
    tok = AutoTokenizer.from_pretrained(folder)
    assert "12" in TOKENS  # a vocabulary that could merge digits
    assert tok.convert_ids_to_tokens(tok("a 12").input_ids) == ["a", "Ġ", "1", "2"]
    assert tok.convert_ids_to_tokens(tok("ab").input_ids) == ["ab"]
    assert tok("<|im_start|>a<|im_end|>").input_ids == [1, TOKENS.index("a"), 2]
    assert tok.decode(tok("a 12 ab").input_ids) == "a 12 ab"
    text = tok.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "<|im_start|>ab<|im_end|>"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architecture": "gpt2"}, "general.architecture; have: gpt2; need: llama"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre; have: llama-bpe; need: smollm"),
        ({"extra": "blk.0.attn_sinks.weight"}, "tensor blk.0.attn_sinks.weight"),
        ({"scale": 1e6}, "beyond float16's range"),
    ],
    ids=["architecture", "pre-tokenizer", "tensor", "range"],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    source, target = tmp_path / "odd.gguf", tmp_path / "hf"
    target.mkdir()
    write_gguf(source, **change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as e:
        convert(source, target)
    assert problem in str(e.value)


def test_the_package_still_reads_what_it_writes() -> None:
    """The quantised type used here goes through the gguf package both ways."""
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    kind = gguf.GGMLQuantizationType.Q8_0
    assert np.abs(gguf.dequantize(gguf.quantize(values, kind), kind) - values).max() < 0.01
