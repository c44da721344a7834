"""The grammar of --kv-dtype: what counts where, and what is refused."""

from __future__ import annotations

import pytest

from qengine.core.kv_map import KVMap, read_kv_map
from qengine.errors import ConfigError


def pairs(asked: KVMap, layers: int = 4, windows: tuple[int, ...] = ()) -> list[str]:
    """The dtypes of K and V of each layer, as "k/v"."""
    return ["/".join(asked.find(i, i in windows, side).dtype for side in ("k", "v")) for i in range(layers)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8", ["fp8/fp8"] * 4),
        ("k=a,v=b", ["a/b"] * 4),
        ("v=b", ["auto/b"] * 4),
        ("fp8,layers.0=auto", ["auto/auto", *["fp8/fp8"] * 3]),
        ("fp8,layers.1-2.v=b", ["fp8/fp8", "fp8/b", "fp8/b", "fp8/fp8"]),
        ("fp8, layers.0-3=a , layers.3.k=b", ["a/a"] * 3 + ["b/a"]),
        ("fp8,sliding_window=a,layers.2=b", ["fp8/fp8", "a/a", "b/b", "fp8/fp8"]),
        ("layers.0=a,fp8", ["fp8/fp8"] * 4),
        ("fp8,sliding_window.k=a", ["fp8/fp8", "a/fp8", "a/fp8", "fp8/fp8"]),
        ("my-type_1.5", ["my-type_1.5/my-type_1.5"] * 4),
    ],
)
def test_later_entries_overrule_earlier_ones(text: str, expected: list[str]) -> None:
    assert pairs(read_kv_map(text, "auto"), windows=(1, 2)) == expected


@pytest.mark.parametrize("skip", ["0,3", "0 3", "0, 3"])
def test_skipped_layers_get_the_default(skip: str) -> None:
    asked = read_kv_map("k=a,v=b,layers.0=c", "auto", skip)
    assert pairs(asked) == ["auto/auto", "a/b", "a/b", "auto/auto"]
    assert pairs(read_kv_map("a", "auto", "sliding_window"), windows=(1,)) == ["a/a", "auto/auto", "a/a", "a/a"]
    assert pairs(read_kv_map("a", "auto", "1-2")) == ["a/a", "auto/auto", "auto/auto", "a/a"]


def test_only_names_that_count_are_asked_for() -> None:
    assert read_kv_map("fp8", "auto").dtypes == ["fp8"]
    assert read_kv_map("v=b", "auto").dtypes == ["auto", "b"]
    assert read_kv_map("k=a,v=b", "auto").dtypes == ["a", "b"]
    assert read_kv_map("fp8,layers.0=auto,layers.1.v=c", "auto").dtypes == ["fp8", "auto", "c"]
    assert read_kv_map("fp8", "auto", "0").dtypes == ["fp8", "auto"]


@pytest.mark.parametrize(
    "text",
    ["", "fp8,", "=fp8", "k=", "q=fp8", "layers=a", "layers.x=a", "layers.3-1=a", "layers.0.q=a", "layers.-1=a",
     "a=b=c", "fp8;int8", "k=a v=b", "layers.1-=a", "-fp8"],
)  # fmt: skip
def test_odd_spellings_are_refused_by_what_is_odd(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_kv_map(text, "auto")
    assert f"--kv-dtype {text}" in str(caught.value) and "layers.N=NAME" in str(caught.value)


def test_layers_that_are_not_there() -> None:
    asked = read_kv_map("fp8,layers.2-4=auto", "auto")
    asked.check([False] * 5)
    with pytest.raises(ConfigError, match=r"there is no layer 4.*have: 4 layers.*layers\.0 to layers\.3"):
        asked.check([False] * 4)
    with pytest.raises(ConfigError, match="sliding window"):
        read_kv_map("fp8", "auto", "sliding_window").check([False, False])
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype-skip-layers full.*names no layers"):
        read_kv_map("fp8", "auto", "full")


def test_skipped_layers_that_are_not_there_are_said_of_their_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype-skip-layers 99: there is no layer 99.*need: 0 to 3"):
        read_kv_map("fp8", "auto", "99").check([False] * 4)
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype-skip-layers sliding_window: no layer of this model"):
        read_kv_map("fp8", "auto", "sliding_window").check([False] * 4)
