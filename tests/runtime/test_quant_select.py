"""Which plugin reads a checkpoint: the flag and the file must agree, unknown names list what exists."""

from __future__ import annotations

import pytest

from qengine.errors import CheckpointError, ConfigError, PluginError
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import select_quant

GPTQ = QuantConfig("gptq", {"quant_method": "gptq", "bits": 4}, "config.json quantization_config")
AWQ = QuantConfig(
    "awq",
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "quant_config.json",
)


def test_sixteen_bit_needs_no_plugin() -> None:
    for flag in (None, "dense"):
        choice = select_quant(flag, None)
        assert choice.quant is None and choice.dense.name == "dense"


@pytest.mark.parametrize("flag", [None, "awq"])
def test_the_file_names_the_format(flag: str | None) -> None:
    choice = select_quant(flag, AWQ)
    assert choice.quant is not None and choice.quant.name == "awq"
    assert "quant_config.json" in choice.reason


def test_the_flag_alone() -> None:
    choice = select_quant("awq", None)
    assert choice.quant is not None and choice.quant.name == "awq"


@pytest.mark.parametrize("flag", ["awq", "dense"])
def test_flag_against_file_names_both(flag: str) -> None:
    with pytest.raises(ConfigError) as e:
        select_quant(flag, GPTQ)
    assert flag in str(e.value) and "gptq" in str(e.value) and GPTQ.source in str(e.value)


def test_unknown_flag_lists_what_exists() -> None:
    with pytest.raises(PluginError, match=r"(?s)no plugin named 'nope'.*awq.*dense"):
        select_quant("nope", None)


def test_method_without_a_plugin_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)have: mxfp4; need: .*awq.*dense"):
        select_quant(None, QuantConfig("mxfp4", {"quant_method": "mxfp4"}, "config.json quantization_config"))


def test_a_plugin_may_read_other_methods_too() -> None:
    """A plugin that lists a method among its own is found, and a broken neighbour does not matter."""
    from qengine_awq.backend import AwqQuant
    from qengine_dense.backend import DenseQuant

    class Renamed(AwqQuant):
        name = "renamed"
        methods = ("renamed", "awq-again")

    def load(name: str) -> type:
        if name == "broken":
            raise PluginError("broken")
        return {"dense": DenseQuant, "renamed": Renamed}[name]

    stored = QuantConfig("awq-again", AWQ.config, "config.json")
    choice = select_quant(None, stored, load=load, names=lambda: ["broken", "dense", "renamed"])
    assert isinstance(choice.quant, Renamed)

    def two(name: str) -> type:
        return load("renamed" if name == "other" else name)

    names = ["broken", "dense", "other", "renamed"]
    with pytest.raises(PluginError, match=r"read 'awq-again' .config.json.: other, renamed; .*--quantization renamed"):
        select_quant(None, stored, load=two, names=lambda: names)
    assert isinstance(select_quant("renamed", stored, load=two, names=lambda: names).quant, Renamed)


def test_a_config_that_the_plugin_refuses_names_its_source() -> None:
    stored = QuantConfig("awq", {**AWQ.config, "bits": 8}, "config.json quantization_config")
    with pytest.raises(CheckpointError, match=r"(?s)config\.json quantization_config.*8"):
        select_quant(None, stored)
