"""One server per engine kind for the whole run: the scripted engine, and the real one on the same model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import fake_engine
from server_process import FAKE, REAL, ServerProcess, running
from toy_models import EOS, VOCAB, make_succ

CHAIN_1 = "né世界😀".encode()
CHAIN_2 = b"abcdefghij"
OTHER_EOS = 300
NAME = "toy"


def next_map() -> dict[int, int]:
    """What greedy decoding says after the last byte of the prompt: `y` or a newline: CHAIN_2; `z`: "A", then an eos
    that only generation_config names; `L`: "MLML..." without end; anything else outside the chains: CHAIN_1."""
    after = dict.fromkeys(range(VOCAB), CHAIN_1[0])
    for chain in (CHAIN_1, CHAIN_2):
        after.update(zip(chain, [*chain[1:], EOS], strict=True))
    after.update({ord("y"): ord("a"), ord("\n"): ord("a"), ord("z"): ord("A"), ord("A"): OTHER_EOS})
    after.update({ord("L"): ord("M"), ord("M"): ord("L")})
    return after


def edit_json(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SUCC with BYTETOK whose end-of-sequence ids stand only in generation_config.json, as a list."""
    folder = make_succ(tmp_path_factory.mktemp("succ"), next_map())
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "generation_config.json", eos_token_id=[OTHER_EOS, EOS])
    fake_engine.write_script(folder, next_map())
    return folder


REAL_ENGINE = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 32 * 2**20, "max_model_len": 2048}


@pytest.fixture(scope="session", params=["fake", "real"])
def server(request: pytest.FixtureRequest, toy_folder: Path) -> Iterator[ServerProcess]:
    factory, engine = (FAKE, {}) if request.param == "fake" else (REAL, REAL_ENGINE)
    with running(toy_folder, factory, engine=engine, served_model_name=[NAME, "alias"]) as made:
        yield made


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
