"""Everything that can be refused is refused before the engine sees it; what passes is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qengine.errors import RequestError
from qengine.messages import NewRequest
from qengine.runtime.facts import EngineFacts
from qengine.runtime.input_processor import InputProcessor, ModelFacts, prompt_list
from qengine.runtime.sampling_checks import default_sampling
from qengine.sampling_params import SamplingParams
from qengine.text import Tokenizer
from toy_models import BOS, EOS, VOCAB, make_bytetok

LONGEST = 100
FACTS = ModelFacts(vocab_size=VOCAB, max_model_len=LONGEST, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_bytetok(tmp_path_factory.mktemp("bytetok")))


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_bytetok(tmp_path_factory.mktemp("bos"), add_bos=True))


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, FACTS)


def process(inputs: InputProcessor, prompt: Any, **sampling: Any) -> Any:
    return inputs.process(prompt, SamplingParams(**sampling), request_id="r")


def test_text_ids_and_mappings_are_prompts(inputs: InputProcessor) -> None:
    for prompt, text in (("abc", "abc"), ([97, 98, 99], None), ({"prompt": "abc"}, "abc")):
        got = process(inputs, prompt)
        assert (got.prompt, got.prompt_token_ids) == (text, [97, 98, 99])
    assert process(inputs, {"prompt_token_ids": [300], "prompt": "x"}).prompt_token_ids == [300]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([-1], "have: -1; need: integers 0..319"),
        ([320], "have: 320"),
        ([2**70], "not a token id"),
        ([True], "not a token id"),
        ([1.0], "not a token id"),
        (["a", 1], "not a token id"),
        ([], "no tokens"),
        ("", "no tokens"),
        (None, "have: NoneType"),
        (7, "have: int"),
        ({"text": "a"}, "no field 'text'; need: prompt or prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {}}, "no field 'multi_modal_data'"),
        ({}, "have: NoneType"),
        ([5] * LONGEST, "have: 100 tokens; need: at most 99"),
        ("a" * LONGEST, "longer than the model's context"),
        ("a\ud800", "Unicode"),
    ],
    ids=str,
)
def test_odd_prompts_are_refused(inputs: InputProcessor, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as e:
        process(inputs, prompt)
    assert e.value.param == "prompt"


def test_an_id_beyond_the_tokenizer_is_fine(inputs: InputProcessor) -> None:
    assert process(inputs, [300]).prompt_token_ids == [300]


def test_an_empty_text_is_a_bos_where_the_tokenizer_adds_one(bos_tokenizer: Tokenizer) -> None:
    assert process(InputProcessor(bos_tokenizer, FACTS), "").prompt_token_ids == [BOS]


def test_twenty_megabytes_are_refused_without_tokenising(inputs: InputProcessor) -> None:
    huge = "x y " * (5 << 20)

    def encode(*_: Any) -> list[int]:
        raise AssertionError("tokenised")

    inputs.tokenizer.least_tokens("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode", encode)
        for give in (
            lambda: process(inputs, huge),
            lambda: inputs.process_chat([{"role": "user", "content": huge}], SamplingParams(), request_id="r"),
        ):
            with pytest.raises(RequestError, match=r"at least \d+ tokens \(20971520 characters\); need: at most 99"):
                give()
        with pytest.raises(AssertionError, match="tokenised"):
            process(inputs, "short")


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {999: 5.0}}, "logit_bias"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"logit_bias": {"x": 5.0}}, "logit_bias"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 98}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": 98}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": [i for i in range(VOCAB) if i != EOS]}, "min_tokens"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"n": 1.5}, "n"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop": ["a"], "detokenize": False}, "stop"),
    ],
    ids=str,
)
def test_odd_sampling_is_refused_with_its_field(inputs: InputProcessor, sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        process(inputs, "abc", **sampling)
    assert e.value.param == param


def test_a_default_max_tokens_takes_what_fits_and_a_wish_does_not(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=16)
    with pytest.raises(RequestError, match="90 \\+ 16 tokens"):
        inputs.process([5] * 90, params, request_id="r")
    got = inputs.process([5] * 90, params, request_id="r", shorten=True)
    assert got.sampling.max_tokens == LONGEST - 90
    assert inputs.process([5], params, request_id="r", shorten=True).sampling.max_tokens == 16


def test_one_stop_id_fewer_than_the_vocabulary_leaves_min_tokens_a_token(inputs: InputProcessor) -> None:
    ids = [i for i in range(VOCAB) if i not in (EOS, 5)]
    assert process(inputs, [7], min_tokens=1, stop_token_ids=ids).sampling.min_tokens == 1


def test_a_field_changed_after_the_checks_is_checked_again(inputs: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = float("nan")
    with pytest.raises(RequestError, match="temperature"):
        inputs.process("abc", params, request_id="r")


def test_max_tokens_have_and_need(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match=r"have: 3 \+ 98 tokens; need: at most 100; .*max_tokens up to 97"):
        process(inputs, "abc", max_tokens=98)
    assert process(inputs, "abc", max_tokens=97).requests[0].sampling.max_tokens == 97
    assert process(inputs, "abc", max_tokens=None).requests[0].sampling.max_tokens == 97


def test_params_of_the_caller_stay_as_they_were(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=None, bad_words=["x"], n=2, seed=1)
    before = msgspec.structs.asdict(params)
    inputs.process("abc", params, request_id="r")
    assert msgspec.structs.asdict(params) == before


def test_bad_words_become_ids_at_a_start_and_after_a_blank(inputs: InputProcessor) -> None:
    sampling = process(inputs, "abc", bad_words=["no", " yes"]).sampling
    spelled = [bytes(ids).decode() for ids in sampling.bad_words_token_ids]
    assert spelled == ["no", " no", "yes", " yes"]


def test_choices_share_the_prompt_and_have_their_own_seeds(inputs: InputProcessor) -> None:
    got = inputs.process(
        "abc",
        SamplingParams(n=3, seed=7, prompt_logprobs=1),
        request_id="r",
        priority=-2,
        cache_salt="salt",
        arrival=5.0,
    )
    assert [r.request_id for r in got.requests] == ["r-0", "r-1", "r-2"]
    assert [r.fork_of for r in got.requests] == [None, "r-0", "r-0"]
    assert [r.sampling.n for r in got.requests] == [1, 1, 1]
    assert len({r.sampling.seed for r in got.requests}) == 3 and got.requests[0].sampling.seed == 7
    assert [r.sampling.prompt_logprobs for r in got.requests] == [1, None, None]
    for r in got.requests:
        assert (r.priority, r.cache_salt, r.arrival, r.eos_token_ids) == (-2, "salt", 5.0, [EOS])
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(r), type=NewRequest) == r
    assert [r.sampling.seed for r in process(inputs, "abc", n=2).requests] == [None, None]
    assert process(inputs, "abc").requests[0].request_id == "r"


def test_chat_goes_through_the_template_with_exactly_one_bos(tmp_path: Path) -> None:
    template = "<bos>{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    folder = make_bytetok(tmp_path, add_bos=True, chat_template=template)
    inputs = InputProcessor(Tokenizer.load(folder), FACTS)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = inputs.process_chat([{"role": "user", "content": parts}], SamplingParams(), request_id="r")
    assert got.prompt == "<bos>user:a\nb;"
    assert got.prompt_token_ids == [BOS, *b"user:a\nb;"]
    assert process(inputs, got.prompt).prompt_token_ids[:2] == [BOS, BOS]  # what plain tokenising would do


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("hello", "messages has the wrong type"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": "a"}, 3], r"messages\[1\] has no role"),
        ([{"role": "user", "content": 3}], "have: int"),
        ([{"role": "", "content": "a"}], r"messages\[0\].role is no role"),
        ([{"role": "user;assistant:yes", "content": "a"}], r"messages\[0\].role is no role"),
        ({"role": "user", "content": "a"}, "messages has the wrong type; have: dict"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "have: 'image_url'; need: type: text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "not JSON"),
    ],
    ids=str,
)
def test_odd_messages_are_refused(inputs: InputProcessor, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as e:
        inputs.process_chat(messages, SamplingParams(), request_id="r")
    assert e.value.param == "messages"


def test_tool_call_arguments_reach_the_template_as_objects(tmp_path: Path) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}{{ messages[0].content }}"
    inputs = InputProcessor(Tokenizer.load(make_bytetok(tmp_path, chat_template=template)), FACTS)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    assert inputs.chat_text([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Rome"


def test_a_model_without_template_names_the_flag(tmp_path: Path) -> None:
    inputs = InputProcessor(Tokenizer.load(make_bytetok(tmp_path, chat_template=None)), FACTS)
    with pytest.raises(RequestError, match="--chat-template"):
        inputs.process_chat([{"role": "user", "content": "a"}], SamplingParams(), request_id="r")


def test_without_tokenizer_ids_still_work() -> None:
    inputs = InputProcessor(None, FACTS)
    assert process(inputs, [5, 6], detokenize=False).prompt_token_ids == [5, 6]
    for prompt, sampling in (("abc", {}), ([5], {}), ([5], {"detokenize": False, "bad_words": ["x"]})):
        with pytest.raises(RequestError, match="no tokenizer"):
            process(inputs, prompt, **sampling)


@pytest.mark.parametrize(
    ("prompt", "single"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
    ids=str,
)
def test_prompt_list(prompt: Any, single: list[Any]) -> None:
    assert prompt_list(prompt) == single


@pytest.mark.parametrize("prompt", [[], None, {}, 5, ["a", 1], ["a", [1]], [[1], 2]], ids=str)
def test_prompt_list_refuses(prompt: Any) -> None:
    with pytest.raises(RequestError):
        prompt_list(prompt)


def test_a_running_engine_gives_eos_and_defaults(tmp_path: Path) -> None:
    make_bytetok(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    ends = [300, EOS, 10**9, -1]  # the last two are no tokens
    generation = {"eos_token_id": ends, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    facts = EngineFacts(
        model_folder=str(tmp_path),
        tokenizer_folder=str(tmp_path),
        vocab_size=VOCAB,
        max_model_len=50,
        kv_tokens=512,
        block_size=16,
    )
    inputs = InputProcessor.from_engine(facts)
    assert inputs.facts.eos_token_ids == (5, EOS, 300)
    p = inputs.default_params(temperature=0.1)
    assert (p.temperature, p.top_k, p.top_p, p.max_tokens) == (0.1, 20, 1.0, 9)
    assert default_sampling({"do_sample": True, "temperature": None}) == {}
