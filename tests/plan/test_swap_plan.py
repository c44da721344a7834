"""`--swap-space` in plans: host bytes counted, buffers on the device, refusals with what would work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from published_models import write_config
from qengine.cli.main import main
from qengine.config import EngineConfig
from qengine.core.host_tier import stage_bytes
from qengine.core.refusal import plan
from qengine.errors import ConfigError
from qengine.runtime.decide import Surveyed
from qengine.runtime.machine import catalogue_machine
from qengine.runtime.plan_input import HOST_RESERVE
from qengine.runtime.planning import look_at_model

GIB = 2**30
BLOCK = 16 * 32 * 8 * 128 * 2 * 2
"""Llama-3.1-8B: 16 tokens, 32 layers, 8 heads of 128, K and V, 16 bits."""


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Surveyed:
    folder = write_config(tmp_path_factory.mktemp("swap-plan"), "Llama-3.1-8B")
    config = EngineConfig(model=str(folder), max_model_len=4096)
    return look_at_model(config, catalogue_machine("a100-40"))[0]


def with_swap(s: Surveyed, gib: float, host: int | None = None) -> Surveyed:
    config = dataclasses.replace(s.config, swap_space=gib)
    return dataclasses.replace(s, config=config, machine=dataclasses.replace(s.machine, host_free=host))


def test_host_bytes_and_buffers_are_counted(surveyed: Surveyed) -> None:
    s = with_swap(surveyed, 10.001)
    without, found = plan(surveyed.inputs(surveyed.config)), plan(s.inputs(s.config))
    assert without.inputs.block_bytes == BLOCK and without.host_items() == []
    blocks = int(10.001 * GIB) // BLOCK
    assert found.host_items() == [(f"KV swap ({blocks:,} blocks)", blocks * BLOCK)]
    assert found.inputs.swap_buffers == stage_bytes(BLOCK) == 4 * 8 * BLOCK
    assert dict(found.items())["buffers of KV swap"] == stage_bytes(BLOCK)
    assert sum(size for _, size in found.items()[5:]) == found.planned
    assert without.num_blocks - found.num_blocks == stage_bytes(BLOCK) // BLOCK, "the pool makes room for the buffers"


@pytest.mark.parametrize(
    ("gib", "host", "parts"),
    [
        (8.0, 4 * GIB + HOST_RESERVE, ["more than host memory has free", "4.00 GiB", "8.00 GiB", "--swap-space 4"]),
        (8.0, HOST_RESERVE, ["more than host memory", "0 B", "--swap-space 0"]),
        (0.001, None, ["does not hold one KV block", "1.02 MiB", "2.00 MiB", "--swap-space 0.01"]),
    ],
)
def test_refusals_name_what_works(surveyed: Surveyed, gib: float, host: int | None, parts: list[str]) -> None:
    s = with_swap(surveyed, gib, host)
    with pytest.raises(ConfigError) as error:
        s.inputs(s.config)
    assert [part for part in parts if part not in str(error.value)] == []
    works = with_swap(surveyed, float(parts[-1].split()[1]), host)
    plan(works.inputs(works.config))


def test_offload_and_swap_share_host_memory(surveyed: Surveyed) -> None:
    s = with_swap(surveyed, 8.0, 20 * GIB + HOST_RESERVE)
    assert s.inputs(s.config).host_free == 12 * GIB


def test_the_command_shows_host_memory_and_refuses_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    flags = ["--max-model-len", "4096", "--swap-space", "4"]
    assert main(["plan", folder, "--gpu", "a100-40", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["host_lines"] == [["KV swap (2,048 blocks)", 4 * GIB]]
    assert main(["plan", folder, "--gpu", "a100-40", *flags]) == 0
    assert "pinned in host memory: KV swap (2,048 blocks)" in capsys.readouterr().out
    assert main(["plan", folder, "--device", "cpu", *flags, "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    for part in ("--swap-space moves KV blocks from a GPU", "--device cpu has them anyway", "--kv-cache-memory-bytes"):
        assert part in refused
