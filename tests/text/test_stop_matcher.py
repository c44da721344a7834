"""Stop strings: earliest complete one, longest on a tie, whatever the cut into pieces; nothing leaks or is lost."""

from __future__ import annotations

import random

import pytest

from qengine.text import StopMatcher


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, over the whole text."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    shown, stop = [], None
    for part in parts:
        match = matcher.push(part)
        shown.append(match.text)
        stop = stop or match.stop
    return [*shown, matcher.flush()], stop


def cut(text: str, rng: random.Random) -> list[str]:
    parts = []
    while text:
        n = rng.randrange(0, 4)
        parts.append(text[:n])
        text = text[n:]
    return parts


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["def"], "abc", "def"),
        (["efX"], "abcdefghij", None),
        (["hi", "gh"], "abcdef", "gh"),
        (["j"], "abcdefghi", "j"),
        (["gh", "fgh"], "abcde", "fgh"),
        (["abcdefghijk", "c"], "ab", "c"),
        ([], "abcdefghij", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_known_answers(stops: list[str], text: str, stop: str | None, size: int) -> None:
    whole = "abcdefghij"
    shown, found = run(StopMatcher(stops), [whole[i : i + size] for i in range(0, 10, size)])
    assert ("".join(shown), found) == (text, stop)


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_against_the_slow_reference(include: bool) -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        stops = [s + rng.choice(["", "c"]) for s in stops]
        text = "".join(rng.choices("abc", weights=(5, 5, 1), k=rng.randrange(20)))
        shown, found = run(StopMatcher(stops, include), cut(text, rng))
        assert ("".join(shown), found) == reference(text, stops, include)
        hits += found is not None
    assert 500 < hits < 2900


def test_only_a_proper_prefix_is_held_back() -> None:
    rng = random.Random(4)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randrange(2, 6))) + "!" for _ in range(2)]
        matcher, fed, shown = StopMatcher(stops), "", ""
        for part in cut("".join(rng.choices("ab", k=15)), rng):
            fed += part
            shown += matcher.push(part).text
            longest = max((n for s in stops for n in range(len(s)) if fed.endswith(s[:n])), default=0)
            assert shown == fed[: len(fed) - longest]
        assert shown + matcher.flush() == fed


def test_with_include_nothing_is_held_back() -> None:
    matcher = StopMatcher(["abc"], include=True)
    assert [matcher.push(c).text for c in "xabcd"] == ["x", "a", "b", "c", ""]


def test_matching_each_piece_alone_would_leak() -> None:
    """The wrong way: searching only the newest piece misses a stop string that spans two."""
    parts = ["ab", "cd"]
    assert not any("bc" in part for part in parts)
    assert run(StopMatcher(["bc"]), parts) == (["a", "", ""], "bc")


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b").text == "a"
    assert matcher.push("c").text == "" and matcher.flush() == "" and matcher.matched == "."
