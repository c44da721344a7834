"""Patterns out of configs: they mean what `re.match` means, and none of them can make a load hang."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qengine.plugin.patterns as patterns
from load_model import plan_folder
from qengine.errors import CheckpointError
from qengine.plugin.patterns import NamePattern
from qengine_compressed_tensors.config import read_config as read_ct
from qengine_compressed_tensors.targets import names_module
from qengine_gptq.config import read_config as read_gptq
from toy_models import llama_config, make_tiny, write_json

NAMES = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.down_proj"]
ENDLESS = "(.|..)+[!?]"
"""Each two letters of a name can be read in two ways, and no name ends with a sign."""
FUZZ = settings(max_examples=150)


@pytest.fixture(autouse=True)
def short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)


@pytest.mark.parametrize(
    "text", ["", "model", "layers", ".*q_proj", ".*(q|k)_proj$", r".*layers\.1?\d\.", "(?!lm).*", "LM_HEAD", "[a-z_]+$"]
)
def test_the_same_as_re_match(text: str) -> None:
    for name in NAMES:
        assert NamePattern("ignore", text).matches(name) == (re.match(text, name) is not None)


@pytest.mark.parametrize("text", ["(", "*", "a{2,1}", "\\", "(" * 5000, "a{99999999999999999999}", "(?P<a>b"])
def test_no_regular_expression(text: str) -> None:
    with pytest.raises(ValueError, match=r"^ignore '.* is no regular expression: ") as caught:
        NamePattern("ignore", text)
    assert len(str(caught.value)) < 500


def test_endless_patterns_are_refused_and_stay_refused() -> None:
    pattern = NamePattern("ignore", ENDLESS, "re:" + ENDLESS)
    start = time.thread_time()
    for _ in range(50):
        with pytest.raises(ValueError, match=r"ignore 're:.*takes more than 0\.2 seconds"):
            pattern.matches(NAMES[2] * 4)
    assert time.thread_time() - start < 5  # one budget, not fifty
    assert NamePattern("ignore", ENDLESS).matches(NAMES[2] * 4 + "!")  # control: it is the names without a sign


CT_GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def ct_config(targets: list[str], ignore: list[str]) -> dict[str, Any]:
    groups = {"group_0": {"targets": targets, "weights": CT_GROUP}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ignore}


def gptq_config(pattern: str) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {pattern: {"bits": 8}}}


@pytest.mark.parametrize(
    "config, field",
    [
        (ct_config(["re:" + ENDLESS], []), r"config_groups\.group_0\.targets 're:"),
        (ct_config(["Linear"], ["re:" + ENDLESS]), "ignore 're:"),
    ],
    ids=["targets", "ignore"],
)
def test_a_checkpoint_with_such_a_pattern(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    """Every linear meets it; the load ends with one line naming field and pattern."""
    make_tiny(tmp_path, tokenizer=False, num_hidden_layers=1)
    write_json(tmp_path / "config.json", llama_config(num_hidden_layers=1, quantization_config=config))
    with pytest.raises(CheckpointError, match=f"{field}.*seconds"):
        plan_folder(tmp_path)


def test_gptq_with_such_a_rule() -> None:
    config = read_gptq(gptq_config("-:" + ENDLESS))
    with pytest.raises(ValueError, match=r"dynamic '-:.*seconds"):
        list(config.matches(NAMES[1] * 4))


PIECES = st.sampled_from(
    ["a", ".", "q", r"\w", "(", ")", "+", "*", "|", "?", "[a-z]", "{1,30}", r"\.", "$", "(?:", ".*"]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=20)


@FUZZ
@given(TEXTS)
def test_any_pattern_ends(text: str) -> None:
    start = time.thread_time()
    for read in (lambda t: read_ct(ct_config(["re:" + t], ["re:" + t])), lambda t: read_gptq(gptq_config(t))):
        try:
            config = read(text)
            for name in (*NAMES, "a" * 60, "qa." * 30 + "!"):
                if hasattr(config, "ignore"):
                    any(names_module(target, name) for target in (*config.ignore, *config.groups[0].targets))
                else:
                    list(config.matches(name))
        except ValueError as e:
            assert "is no regular expression" in str(e) or "seconds" in str(e)
    assert time.thread_time() - start < 3
