"""Rotary frequencies of every type against transformers' own functions, and the rotation itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_reference import context
from qengine.layers.rotary import REQUIRED_PARAMETERS, RopeSpec, Rotary, inverse_frequencies
from qengine.models.settings import read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(32)],
    "long_factor": [1.0 + 0.9 * i for i in range(32)],
    "original_max_position_embeddings": 512,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_type": "linear", "factor": 3.0}, 4096),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 5000),
    "dynamic-short": ({"rope_type": "dynamic", "factor": 2.0}, 100),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        2048,
    ),
    "yarn": (YARN, 2048),
    "yarn-factor-from-lengths": (YARN | {"factor": None}, 2048),
    "yarn-mscale": (YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}, 2048),
    "yarn-no-truncate": (YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2}, 2048),
    "longrope-long": (LONGROPE, 513),
    "longrope-short": (LONGROPE, 512),
    "longrope-factor": (LONGROPE | {"factor": 8.0}, 2048),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: str) -> None:
    parameters, length = CASES[case]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 5e5, **parameters},
    )
    want, want_scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
    got, scale = inverse_frequencies(read_rope(config, 64), length)
    assert torch.allclose(got, want, rtol=1e-5, atol=0) and scale == pytest.approx(want_scale, rel=1e-6)
    plain, _ = inverse_frequencies(RopeSpec("default", 5e5, 64, 2048, 2048), length)
    assert case == "dynamic-short" or not torch.allclose(plain, want, rtol=1e-3)


def test_every_known_type_is_tested() -> None:
    assert {p["rope_type"] for p, _ in CASES.values()} | {"default"} == set(REQUIRED_PARAMETERS)


def rotated_by_hand(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """The definition, pair by pair, in float64."""
    out, half = x.double().clone(), len(inv_freq)
    for t, p in enumerate(positions.tolist()):
        for i, f in enumerate(inv_freq.double().tolist()):
            c, s = (
                torch.cos(torch.tensor(p * f, dtype=torch.double)),
                torch.sin(torch.tensor(p * f, dtype=torch.double)),
            )
            a, b = x[t, :, i].double(), x[t, :, i + half].double()
            out[t, :, i], out[t, :, i + half] = a * c - b * s, b * c + a * s
    return out.float()


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation_is_the_definition(rotary_dim: int) -> None:
    rotary = Rotary(context(None), RopeSpec("default", 100.0, rotary_dim, 64, 64))
    positions = torch.tensor([0, 1, 7, 63, 7])
    qk = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    q, k = rotary(qk.clone(), 2, rotary.angles(positions))
    want = rotated_by_hand(qk, positions, rotary.inv_freq)
    assert torch.allclose(torch.cat((q, k), 1), want, atol=1e-5)
    wrong = rotated_by_hand(qk, positions + 1, rotary.inv_freq)
    assert not torch.allclose(torch.cat((q, k), 1), wrong, atol=1e-2)


def test_strided_bfloat16_input_is_rotated_without_rounding() -> None:
    rotary = Rotary(context(None, dtype=torch.bfloat16), RopeSpec("default", 100.0, 16, 64, 64))
    qkv = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k = rotary(qkv[:, :4], 3, rotary.angles(torch.arange(4)))
    assert (q.dtype, q.shape, k.shape) == (torch.float32, (4, 3, 16), (4, 1, 16))
    want = rotated_by_hand(qkv[:, :4].float(), torch.arange(4), rotary.inv_freq)
    assert torch.allclose(torch.cat((q, k), 1), want, atol=1e-5)
    assert not torch.allclose(torch.cat((q, k), 1), want.bfloat16().float(), atol=1e-5)
