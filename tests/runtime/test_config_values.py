"""Values of config.json that no model can have are refused by name, before anything is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from qengine.errors import CheckpointError
from qengine.runtime.config_checks import check_values

SOUND = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "head_dim": None, "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16", "dtype": "torch.float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0), ("head_dim", -64), ("rms_norm_eps", float("nan")), ("rms_norm_eps", -1e-5),
        ("torch_dtype", "foo"), ("dtype", "float17"), ("dtype", "nn"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inner", [False, True])
def test_what_cannot_be_is_refused_by_name(field: str, value: Any, inner: bool) -> None:
    check_values(SOUND | {"text_config": SOUND, "dtype": "auto"})
    wrong = SOUND | {field: value}
    with pytest.raises(CheckpointError, match=rf"config\.json: {'text_config.' if inner else ''}{field}"):
        check_values({"text_config": wrong} if inner else wrong)


def test_architectures_are_a_list() -> None:
    with pytest.raises(CheckpointError, match="architectures is not a list"):
        check_values(SOUND | {"architectures": "LlamaForCausalLM"})
