"""Needs against headers: missing, extra and wrong tensors, with the names and numbers in the message."""

from __future__ import annotations

import pytest

from qengine.errors import CheckpointError
from qengine.plugin import TensorInfo, TensorNeed
from qengine.runtime.accounting import balance


def need(leaf: str = "weight", shape: tuple[int | None, ...] = (4, 8), required: bool = True) -> TensorNeed:
    return TensorNeed(leaf, shape, ("F16", "BF16"), required=required)


def infos(*names: str, dtype: str = "F16", shape: tuple[int, ...] = (4, 8)) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape) for name in names}


def test_balanced() -> None:
    books = balance([("a.weight", need()), ("b.weight", need())], infos("a.weight", "b.weight"))
    assert books.take == {"a.weight", "b.weight"} and not books.extra and not books.notes


def test_missing_lists_ten_and_counts_the_rest() -> None:
    needs = [(f"m{i:02}.weight", need()) for i in range(14)]
    with pytest.raises(CheckpointError) as e:
        balance(needs, infos("m00.weight"))
    text = str(e.value)
    assert "13 tensor(s)" in text and "m10.weight and 3 more" in text and "m11" not in text
    assert "unfinished download" in text


def test_a_missing_name_counts_once() -> None:
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\)"):
        balance([("tied.weight", need()), ("tied.weight", need())], {})


def test_a_wrong_tensor_counts_once() -> None:
    with pytest.raises(CheckpointError, match=r"^1 tensor\(s\) do not fit the model: tied.weight: have F16 5x8"):
        balance([("tied.weight", need()), ("tied.weight", need())], infos("tied.weight", shape=(5, 8)))


def test_optional_tensors_may_be_missing() -> None:
    assert balance([("a.g_idx", need("g_idx", required=False))], {}).take == set()


def test_extra_tensors_are_named_unless_somebody_reads_them() -> None:
    provided = infos("a.weight", "a.k_scale", "a.ghost")
    books = balance([("a.weight", need())], provided, consumed={"a.k_scale"})
    assert books.extra == ["a.ghost"]


def test_known_extras_are_a_note() -> None:
    frequencies = [f"l.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)]
    provided = infos("a.weight") | infos(*frequencies, shape=(8,))
    books = balance([("a.weight", need())], provided)
    assert books.extra == [] and books.notes == ["ignored: rotary frequencies, computed from the config"]
    # A bias of attention is no mask buffer: only the four-dimensional one is.
    mask = infos("h.0.attn.bias", shape=(1, 1, 8, 8))
    assert balance([], mask).extra == []
    assert balance([], infos("h.0.attn.bias", shape=(8,))).extra == ["h.0.attn.bias"]


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (TensorInfo("a.weight", "F16", (8, 4)), "a.weight: have F16 8x4, need F16 or BF16 4x8"),
        (TensorInfo("a.weight", "I32", (4, 8)), "a.weight: have I32 4x8"),
        (TensorInfo("a.weight", "F16", (4, 8, 1)), "a.weight: have F16 4x8x1"),
    ],
    ids=["transposed", "dtype", "rank"],
)
def test_wrong_tensors_show_have_and_need(info: TensorInfo, problem: str) -> None:
    with pytest.raises(CheckpointError) as e:
        balance([("a.weight", need())], {"a.weight": info})
    assert problem in str(e.value)


def test_any_size_matches_a_wildcard() -> None:
    assert balance([("a.weight", need(shape=(None, 8)))], infos("a.weight")).take == {"a.weight"}


def test_quantised_tensors_instead_of_a_weight_point_at_the_flag() -> None:
    with pytest.raises(CheckpointError, match=r"stored quantised: --quantization"):
        balance([("a.weight", need())], infos("a.qweight", "a.scales"))
