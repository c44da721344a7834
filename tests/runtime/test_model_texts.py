"""Tokenizer, end-of-sequence ids and sampling defaults: what is wrong with them is said in one line, before weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from qengine.config import EngineConfig
from qengine.errors import CheckpointError
from qengine.runtime.facts import EngineFacts
from qengine.runtime.input_processor import InputProcessor
from qengine.runtime.model_texts import ModelTexts
from qengine.server import engine_process
from toy_models import EOS, VOCAB, make_bytetok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_bytetok(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    return tmp_path


def test_what_the_files_say(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7], "temperature": 0.6, "top_k": None}))
    texts = ModelTexts.read(folder)
    assert texts.eos_token_ids == (5, 7, EOS) and texts.defaults == {"temperature": 0.6}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"generation_config\.json cannot be read"),
        ("[]", r"generation_config\.json is not a JSON object"),
        ('{"a":' * 100_000, r"generation_config\.json cannot be read"),
        ('{"temperature": "hot"}', r"generation_config\.json: temperature"),
        ('{"temperature": -1}', r"generation_config\.json: temperature"),
        ('{"top_k": 1.5}', r"generation_config\.json: .*top_k"),
        ('{"max_new_tokens": 0}', r"generation_config\.json: max_tokens"),
        ('{"eos_token_id": "x"}', "eos_token_id is wrong; have: 'x'"),
        ('{"eos_token_id": [[1]]}', "eos_token_id is wrong"),
        ('{"eos_token_id": true}', "eos_token_id is wrong"),
    ],
    ids=lambda text: text[:24],
)
def test_a_bad_generation_config_is_named(folder: Path, content: str, words: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        ModelTexts.read(folder)


def test_the_engine_process_reads_them_before_the_weights(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; .*--tokenizer"):
        engine_process.build_engine(EngineConfig(model=str(folder), load_format="dummy"))


def test_a_tokenizer_of_another_model_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineFacts(
        model_folder=str(folder), tokenizer_folder=str(folder), vocab_size=VOCAB, max_model_len=50, kv_tokens=512,
        block_size=16,
    )  # fmt: skip
    for rows, told in ((VOCAB, False), (100, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            InputProcessor.from_engine(msgspec.structs.replace(engine, vocab_size=rows))
        assert ("the model only 100" in caplog.text) == told
