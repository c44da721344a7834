"""Text, stops, logprobs and usage: whatever the cut into steps, streamed and whole agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from qengine.messages import RequestOutput, TokenLogprobs
from qengine.runtime.input_processor import InputProcessor, ModelFacts
from qengine.runtime.output_processor import OutputProcessor
from qengine.runtime.results import Delta, RequestResult
from qengine.sampling_params import SamplingParams
from qengine.text import Tokenizer
from toy_models import EOS, VOCAB, make_bytetok

FACTS = ModelFacts(vocab_size=VOCAB, max_model_len=200, eos_token_ids=(EOS,))
WORLD = "né世界😀"
LETTERS = "abcdefghij"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_bytetok(tmp_path_factory.mktemp("bytetok")))


@dataclass
class Answer:
    """What came of one request: its deltas, its result, what was aborted."""

    deltas: list[Delta] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    result: RequestResult | None = None

    @property
    def text(self) -> str:
        return self.result.outputs[0].text


def answer(
    tokenizer: Tokenizer,
    script: Sequence[int],
    size: int = 1,
    late: int = 0,
    end: tuple[str | None, int | None] | None = None,
    **sampling: Any,
) -> Answer:
    """Run a scripted engine: `script` in steps of `size` tokens, cut at max_tokens or the end-of-sequence id.

    `late` more steps come after an abort, as from an engine that has not heard of it yet.
    """
    sampling.setdefault("max_tokens", 60)
    request = InputProcessor(tokenizer, FACTS).process("p", SamplingParams(**sampling), request_id="r")
    outputs, got = OutputProcessor(tokenizer), Answer()
    outputs.add(request)
    limit = sampling["max_tokens"]
    ids, reason = list(script[:limit]), "length" if len(script) >= limit else "stop"
    if EOS in ids and not sampling.get("ignore_eos"):
        ids, reason = ids[: ids.index(EOS) + 1], "stop"
    for at in range(0, len(ids), size):
        last = at + size >= len(ids)
        done = outputs.process(
            [
                RequestOutput(
                    request_id="r",
                    new_token_ids=ids[at : at + size],
                    logprobs=[TokenLogprobs(i, -1.0, 2, [7, i], [-0.5, -1.0]) for i in ids[at : at + size]],
                    finish_reason=reason if last else None,
                    num_cached_tokens=3 if at == 0 else 0,
                )
            ]
        )
        got.deltas += done.deltas
        got.aborts += done.aborts
        if got.aborts:
            late -= 1
            if late < 0:
                break
    got.result = outputs.result("r")
    assert "".join(d.text for d in got.deltas) == got.text
    assert [i for d in got.deltas for i in d.token_ids] == got.result.outputs[0].token_ids
    assert got.deltas[-1].finish_reason == got.result.outputs[0].finish_reason is not None
    assert [d.finished for d in got.deltas] == [False] * (len(got.deltas) - 1) + [True] and got.result.finished
    return got


CHAIN_1 = [*WORLD.encode(), EOS]
CHAIN_2 = [*LETTERS.encode(), EOS]


@pytest.mark.parametrize("size", [1, 2, 5, 50])
def test_a_whole_answer(tokenizer: Tokenizer, size: int) -> None:
    got = answer(tokenizer, CHAIN_1, size)
    assert got.text == WORLD and all("�" not in d.text for d in got.deltas)
    output = got.result.outputs[0]
    assert (output.finish_reason, output.stop_reason, got.aborts) == ("stop", None, [])
    assert output.token_ids == CHAIN_1 and got.result.num_output_tokens == 14
    assert got.result.num_cached_tokens == 3 and got.result.prompt == "p" and got.result.prompt_token_ids == [112]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("limit", range(1, 14))
def test_cut_by_max_tokens(tokenizer: Tokenizer, limit: int, size: int) -> None:
    got = answer(tokenizer, CHAIN_1, size, max_tokens=limit)
    assert got.text == WORLD.encode()[:limit].decode(errors="replace")
    assert got.result.outputs[0].finish_reason == "length"
    inside = limit not in (1, 3, 6, 9, 13)
    assert ("�" in got.text) == inside and got.text.count("�") <= 1
    assert all("�" not in d.text for d in got.deltas[:-1])


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize(
    ("stop", "text", "stop_reason"),
    [
        (["def"], "abc", "def"),
        (["efX"], LETTERS, None),
        (["hi", "gh"], "abcdef", "gh"),
        (["j"], "abcdefghi", "j"),
        (["ij\u0000", "j!"], LETTERS, None),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, stop: list[str], text: str, stop_reason: str | None, size: int) -> None:
    got = answer(tokenizer, CHAIN_2, size, late=3, stop=stop)
    output = got.result.outputs[0]
    assert (got.text, output.stop_reason, output.finish_reason) == (text, stop_reason, "stop")
    counted = len(text) + len(stop_reason) if stop_reason else len(CHAIN_2)
    assert len(output.token_ids) == counted
    assert got.aborts == (["r"] if stop_reason and len(CHAIN_2) > -(-counted // size) * size else [])


def test_a_held_tail_is_flushed_at_the_length(tokenizer: Tokenizer) -> None:
    got = answer(tokenizer, CHAIN_2, max_tokens=5, stop=["efX"])
    assert [d.text for d in got.deltas] == ["a", "b", "c", "d", "e"] and got.text == "abcde"
    held = answer(tokenizer, CHAIN_2, max_tokens=7, stop=["fghX"])
    assert [d.text for d in held.deltas] == ["a", "b", "c", "d", "e", "", "fg"]


def test_the_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    got = answer(tokenizer, CHAIN_2, stop=["def"], include_stop_str_in_output=True)
    assert got.text == "abcdef" and got.result.outputs[0].stop_reason == "def"


@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (3, "abc_ab"), (4, "abc_ab"), (7, "abc_abc_")])
def test_min_tokens_holds_stop_strings_off(tokenizer: Tokenizer, least: int, text: str) -> None:
    assert answer(tokenizer, b"abc_abc_", max_tokens=8, stop=["c"], min_tokens=least).text == text


def test_the_stop_token_counts_but_is_not_shown(tokenizer: Tokenizer) -> None:
    plain = answer(tokenizer, CHAIN_2, skip_special_tokens=False)
    assert plain.text == LETTERS and plain.result.outputs[0].token_ids[-1] == EOS
    kept = answer(tokenizer, CHAIN_2, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == LETTERS + "<eos>"
    on = answer(tokenizer, [97, EOS, 98], max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert on.text == "a<eos>b"


def test_without_detokenising_there_is_no_text(tokenizer: Tokenizer) -> None:
    got = answer(tokenizer, CHAIN_2, detokenize=False)
    assert got.text == "" and got.result.outputs[0].token_ids == CHAIN_2


def test_logprobs_have_strings_and_bytes_and_end_with_the_stop(tokenizer: Tokenizer) -> None:
    got = answer(tokenizer, CHAIN_1, 4, logprobs=2, stop=["世"])
    output = got.result.outputs[0]
    assert output.text == "né" and len(output.logprobs) == len(output.token_ids) == 6
    assert output.cumulative_logprob == -6.0
    assert [next(iter(p)) for p in output.logprobs] == output.token_ids
    first, second = output.logprobs[:2]
    assert list(first) == [110, 7] and first[110].token_bytes == b"n" and first[110].rank == 2
    assert first[7].rank == 1 and first[7].logprob == -0.5
    assert second[195].token_bytes == b"\xc3" and second[195].decoded_token == "�"
    assert answer(tokenizer, CHAIN_1).result.outputs[0].logprobs is None


def test_prompt_logprobs(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    outputs.add(InputProcessor(tokenizer, FACTS).process("pq", SamplingParams(prompt_logprobs=1), request_id="r"))
    given = [None, TokenLogprobs(113, -3.0, 9, [5], [-0.1])]
    outputs.process([RequestOutput(request_id="r", prompt_logprobs=given)])
    first, second = outputs.result("r").prompt_logprobs
    assert first is None and list(second) == [113, 5] and second[113].decoded_token == "q"


def test_choices_are_gathered(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    outputs.add(InputProcessor(tokenizer, FACTS).process("p", SamplingParams(n=2, stop=["b"]), request_id="r"))

    def step(name: str, ids: list[int], reason: str | None = None) -> tuple[list[Delta], list[str]]:
        done = outputs.process([RequestOutput(request_id=name, new_token_ids=ids, finish_reason=reason)])
        return done.deltas, done.aborts

    (a,), _ = step("r-1", [97])
    (b,), aborts = step("r-0", [98])
    assert (a.index, a.finished, b.index, b.finished, aborts) == (1, False, 0, False, ["r-0"])
    assert step("r-0", [99, 99], "abort") == ([], [])
    (c,), aborts = step("r-1", [99], "length")
    assert c.finished and aborts == []
    result = outputs.pop("r")
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [(0, "", "stop"), (1, "ac", "length")]
    assert result.num_output_tokens == 3
    with pytest.raises(KeyError):
        outputs.result("r")


def test_an_error_ends_only_its_choice(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    for name in ("x", "y"):
        outputs.add(InputProcessor(tokenizer, FACTS).process("p", SamplingParams(), request_id=name))
    bad = RequestOutput(request_id="x", finish_reason="error", error="logits were not finite")
    (delta,) = outputs.process([bad]).deltas
    assert (delta.finish_reason, delta.error, delta.finished) == ("error", "logits were not finite", True)
    assert outputs.result("x").outputs[0].error == "logits were not finite"
    (delta,) = outputs.process([RequestOutput(request_id="y", new_token_ids=[97])]).deltas
    assert delta.text == "a" and not delta.finished


def test_a_client_that_left_is_forgotten(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    outputs.add(InputProcessor(tokenizer, FACTS).process("p", SamplingParams(n=3), request_id="r"))
    outputs.process([RequestOutput(request_id="r-1", new_token_ids=[97], finish_reason="length")])
    assert sorted(outputs.abort("r")) == ["r-0", "r-2"]
    assert outputs.abort("r") == [] and outputs.abort("never") == []
    assert outputs.process([RequestOutput(request_id="r-0", new_token_ids=[97])]).deltas == []
