"""The Python API: what it gives, what it refuses in one line, and that it goes on afterwards."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from qengine import LLM, BeamSearchParams, SamplingParams
from qengine.config import EngineConfig
from qengine.errors import CapacityError, CheckpointError, ConfigError, QEngineError, RequestError
from qengine.runtime.chat_messages import flatten_messages
from toy_models import llama_config, llama_tensors, make_bytetok, write_model

LONGEST = 64
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20, "verbose": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    config = llama_config()
    write_model(path, config, llama_tensors(config))
    return make_bytetok(path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_model_len=LONGEST, **SMALL)


@pytest.fixture(autouse=True)
def goes_on(llm: LLM) -> Any:
    yield
    assert len(llm.generate("abc", GREEDY)[0].outputs[0].token_ids) == 8
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (5, "prompt has the wrong type; have: int"),
        (None, "have: NoneType"),
        (b"abc", "have: bytes"),
        ({"a"}, "have: set"),
        ([], "prompt is empty"),
        ("", "no tokens"),
        (["a", [1]], "mixes texts and ids"),
        ({"text": "a"}, "no field 'text'"),
        ([{"prompt": "a", "multi_modal_data": 1}], "no field 'multi_modal_data'"),
        ([["a"]], "not a token id"),
        (["ok", "\ud800"], "Unicode"),
    ],
    ids=str,
)
def test_odd_prompts(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 3}, "sampling_params has the wrong type; have: dict"),
        ("greedy", "have: str"),
        ([GREEDY, None], "have: NoneType"),
        (BeamSearchParams(2, 3), "have: BeamSearchParams"),
        ([GREEDY], "one each; have: 1; need: 2"),
    ],
    ids=str,
)
def test_odd_sampling_params(llm: LLM, params: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"priority": [1]}, "first come, first served"),
        ({"priority": ["x"]}, "list of integers"),
        ({"priority": 1}, "list of integers"),
        ({"priority": [0, 0]}, "have: 2; need: 1"),
        ({"cache_salt": 5}, "cache_salt is a text"),
    ],
    ids=str,
)
def test_odd_keywords_of_generate(llm: LLM, keywords: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(["a"], GREEDY, **keywords)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ({"role": "user", "content": "x"}, "messages has the wrong type; have: dict"),
        ("hi", "messages has the wrong type; have: str"),
        (["hi"], "messages has the wrong type; have: str"),
        ([], "no messages"),
        ([HI, HI[0]], "messages has the wrong type; have: dict"),
        ([[]], "messages is empty"),
    ],
    ids=str,
)
def test_odd_messages_of_chat(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat(messages, GREEDY)


def test_without_params_the_rest_of_the_context_is_used(llm: LLM) -> None:
    for results in (llm.generate("abc"), llm.chat(HI)):
        out, prompt = results[0].outputs[0], results[0].prompt_token_ids
        assert out.finish_reason == "stop" or len(out.token_ids) + len(prompt) == LONGEST


def test_a_model_default_that_does_not_fit_is_no_error(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"max_new_tokens": 5000, "temperature": 0}))
    try:
        llm = LLM(str(folder), max_model_len=LONGEST, **SMALL)
    finally:
        path.unlink()
    assert llm.default_sampling_params().max_tokens == 5000
    assert llm.generate("abc")[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate("abc", SamplingParams(max_tokens=5000))


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), 1e9, None, True], ids=str)
def test_length_penalty_is_a_number(value: Any) -> None:
    with pytest.raises(RequestError, match="length_penalty"):
        BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(n=2), "have: SamplingParams; need: BeamSearchParams"),
        (BeamSearchParams(beam_width=11, max_tokens=3), "beam_width is too large; have: 11; need: at most 10"),
        (BeamSearchParams(beam_width=2, max_tokens=1000), "longer than the model's context"),
    ],
    ids=["sampling", "wide", "long"],
)
def test_a_beam_search_that_cannot_end_does_not_begin(llm: LLM, params: Any, words: str) -> None:
    steps = llm.engine.steps
    with pytest.raises(RequestError, match=words):
        llm.beam_search(["a", "b"], params)
    assert llm.engine.steps == steps


def test_threads_share_one_model(llm: LLM) -> None:
    prompts = [[i, i + 1, 2 * i] for i in range(6)]
    alone = [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = [llm.generate([prompts[i]], GREEDY)[0].outputs[0].token_ids for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [ids] * 3 for i, ids in enumerate(alone)}


def test_an_interrupted_call_leaves_the_model_as_it_was(llm: LLM) -> None:
    prompts = [[i] * 20 for i in range(8)]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = [r.outputs[0].token_ids for r in llm.generate(prompts, long)]
    steps = llm.engine.steps

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.005, 0.006, 0.007, 0.008, 0.01, 0.013, 0.017, 0.02, 0.05):
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    llm.generate(prompts, long)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert llm.engine.steps > steps
    assert [r.outputs[0].token_ids for r in llm.generate(prompts, long)] == whole


def test_ctrl_c_waits_for_the_end_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ran = llm.engine.step, []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        ran.append(real())
        return ran[-1]

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", GREEDY)
    assert len(ran) == 1
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 5),
        ("tokenizer", 5),
        ("revision", 3),
        ("quantization", 5),
        ("kv_cache_dtype", None),
        ("load_format", None),
        ("trust_remote_code", "no"),
        ("enforce_eager", None),
        ("enable_prefix_caching", "yes"),
        ("seed", "x"),
        ("seed", 2**70),
        ("seed", 1.5),
        ("block_size", "16"),
        ("max_num_seqs", 2.5),
        ("max_model_len", "512"),
        ("max_model_len", 1),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", float("nan")),
        ("kv_cache_memory_bytes", "4G"),
        ("kv_cache_memory_bytes", True),
        ("kv_cache_memory_bytes", 0),
        ("swap_space", None),
        ("model", ""),
        ("tokenizer", ""),
        ("quantization", ""),
    ],
    ids=str,
)
def test_wrong_options_name_their_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        EngineConfig(**{name: value})


def test_keywords_may_be_named_as_flags_are(folder: Path) -> None:
    llm = LLM(folder, kv_dtype="fp8", quant=None, max_model_len=LONGEST, **SMALL)
    assert llm.config.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="kv_dtype and kv_cache_dtype are two names"):
        LLM(folder, kv_dtype="fp8", kv_cache_dtype="fp8_e5m2", **SMALL)
    with pytest.raises(ConfigError, match="unknown keyword 'kv_cachedtype'; what would work: kv_cache_dtype"):
        LLM(folder, kv_cachedtype="fp8", **SMALL)
    assert LLM(folder, cpu_offload_gb=None, expert_slots=None, **SMALL).config.cpu_offload_gb == 0
    with pytest.raises(QEngineError, match="offload"):  # taken, and then refused on a CPU
        LLM(folder, cpu_offload_gb="auto", **SMALL)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_tokens": 2**32}, r"have: 4294967296; need: 1\.\.2\*\*31"), ({"max_tokens": "5"}, "have: '5'"),
        ({"temperature": 1e308}, r"need: 0\.\.100"), ({"repetition_penalty": 1e-10}, r"need: 1e-6\.\.1e6"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_outside_of_what_is_needed(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**given)


def test_a_message_needs_a_content_unless_it_is_the_assistants() -> None:
    assert flatten_messages([{"role": "assistant"}])[0]["content"] == ""
    with pytest.raises(RequestError, match=r"messages\[0\] has no content"):
        flatten_messages([{"role": "user"}])


def test_whole_numbers_are_numbers() -> None:
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_a_revision_is_for_hub_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--revision is for hub models; have: the local folder"):
        LLM(str(folder), revision="main", **SMALL)
    with pytest.raises(ConfigError, match="--revision is for hub models, and no model is named"):
        EngineConfig(revision="main")


def test_a_chat_template_of_the_wrong_kind(folder: Path) -> None:
    for template in (5, "{% for", "nope.jinja"):
        with pytest.raises(ConfigError, match=r"chat.template"):
            LLM(str(folder), chat_template=template, **SMALL)  # type: ignore[arg-type]


def test_texts_are_read_before_weights(tmp_path: Path) -> None:
    config = llama_config()
    write_model(tmp_path, config, llama_tensors(config))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        LLM(str(tmp_path), **SMALL)


def test_a_model_of_one_position_has_no_room_for_an_answer(tmp_path: Path) -> None:
    config = llama_config(max_position_embeddings=1)
    write_model(tmp_path, config, llama_tensors(config))
    with pytest.raises(CapacityError, match="no room for an answer"):
        LLM(str(make_bytetok(tmp_path)), **SMALL)
