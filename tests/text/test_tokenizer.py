"""Loading a folder, special tokens, chat templates, threads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import toy_tokenizers
from qengine.errors import CheckpointError, ConfigError, RequestError
from qengine.text import ChatTemplate, Tokenizer, eos_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def save(folder: Path, make=toy_tokenizers.byte_level, **config: object) -> Path:
    make().save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in named.items() if v is not None}))
    return folder


def test_a_folder_loads_whatever_its_tokenizer_class_says(tmp_path: Path) -> None:
    tok = Tokenizer.load(save(tmp_path, tokenizer_class="TokenizersBackendFast"))
    assert tok.id_to_token(tok.bos_id) == "<s>" and tok.id_to_token(tok.eos_id) == "</s>"
    assert tok.decode(tok.encode("né世界😀")) == "né世界😀"
    assert tok.vocab_size == tok._backend.get_vocab_size()


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    save(tmp_path, bos_token=None, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    tok = Tokenizer.load(tmp_path)
    assert tok.bos_id is None and tok.id_to_token(tok.eos_id) == "<|im_end|>"


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = toy_tokenizers.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "The capital of France is Paris"
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode(text)) == text


@pytest.mark.parametrize(
    ("content", "words"), [("{", "tokenizer_config.json"), ("[]", "JSON object")], ids=["cut", "list"]
)
def test_a_damaged_config_is_named(tmp_path: Path, content: str, words: str) -> None:
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.load(tmp_path)


def test_a_damaged_or_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer; need: tokenizer\.json.*--tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no tokenizer could be made.*need: tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_without_tokenizer_json_transformers_converts(tmp_path: Path) -> None:
    """GPT-2's vocab.json and merges.txt stand for every older form."""
    save(tmp_path, tokenizer_class="GPT2Tokenizer", bos_token="<s>", eos_token="</s>", unk_token="<s>")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    expected = Tokenizer.load(tmp_path).encode("The capital of France")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tok = Tokenizer.load(tmp_path)
    assert tok.encode("The capital of France") == expected and tok.id_to_token(tok.eos_id) == "</s>"


@pytest.mark.parametrize("where", ["config", "list", "jinja", "json", "option file", "option text"])
def test_chat_template_from_each_place_renders_as_transformers_does(tmp_path: Path, where: str) -> None:
    from transformers import PreTrainedTokenizerFast

    option = None
    wrong = "{{ 'wrong' }}"
    if where == "config":
        save(tmp_path, chat_template=CHATML)
    elif where == "list":
        both = [{"name": "tool_use", "template": wrong}, {"name": "default", "template": CHATML}]
        save(tmp_path, chat_template=both)
    elif where == "jinja":
        save(tmp_path, chat_template=wrong)
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    elif where == "json":
        save(tmp_path)
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    else:
        save(tmp_path, chat_template=wrong)
        option = CHATML
        if where == "option file":
            option = str(tmp_path / "mine.jinja")
            Path(option).write_text(CHATML)
    tok = Tokenizer.load(tmp_path, chat_template=option)
    hf = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = tok.apply_chat_template(MESSAGES)
    assert text == hf.apply_chat_template(MESSAGES, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tok.encode(text, add_special_tokens=False)
    assert ids[0] == tok._backend.token_to_id("<|im_start|>")


def test_tools_choose_the_tool_template(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "{{ tools[0].name }}"}, {"name": "default", "template": CHATML}]
    tok = Tokenizer.load(save(tmp_path, chat_template=templates))
    assert tok.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "f"


def test_a_missing_template_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--chat-template"):
        Tokenizer.load(save(tmp_path)).apply_chat_template(MESSAGES)
    with pytest.raises(ConfigError, match="--chat-template"):
        Tokenizer.load(tmp_path, chat_template="no/such/file")


def test_a_template_that_refuses_is_a_request_error(tmp_path: Path) -> None:
    tok = Tokenizer.load(save(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(RequestError, match="roles must alternate"):
        tok.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% for i in range(10**7) %}{% endfor %}", "{{ messages[9].x }}"])
def test_whatever_a_template_raises_is_a_request_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages"):
        Tokenizer.load(save(tmp_path, chat_template=template)).apply_chat_template([{"role": "user", "content": "a"}])


def test_variables_cannot_take_the_place_of_the_messages(tmp_path: Path) -> None:
    tok = Tokenizer.load(save(tmp_path, chat_template="{{ messages[0].content }}{{ thinking }}"))
    one = [{"role": "user", "content": "a"}]
    assert tok.apply_chat_template(one, variables={"thinking": "yes"}) == "ayes"
    for name in ("messages", "conversations", "chat_template", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"cannot set {name}") as e:
            tok.apply_chat_template(one, variables={name: "x"})
        assert e.value.param == "chat_template_kwargs"


def test_a_template_option_with_broken_syntax_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    for option in ("{% for", "{{ 1 +", str(tmp_path / "broken.jinja")):
        with pytest.raises(ConfigError, match="--chat-template is not valid Jinja"):
            ChatTemplate.from_option(option)
    for option in ("{{ raise_exception('only with tools') }}", "{% generation %}a{% endgeneration %}", "{{ x.y.z }}"):
        assert ChatTemplate.from_option(option).templates == {"default": option}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": {"default": 1}}'),
    ],
    ids=str,
)
def test_a_damaged_template_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    save(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match="chat_template"):
        Tokenizer.load(tmp_path)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    tok = Tokenizer.load(save(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(RequestError):
        tok.apply_chat_template(MESSAGES)


def test_bos_of_template_and_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The template writes bos, the tokenizer would add one: exactly one, and a warning for who does it by hand."""
    tok = Tokenizer.load(save(tmp_path, toy_tokenizers.llama2, chat_template="{{ bos_token }}" + CHATML))
    with caplog.at_level(logging.WARNING):
        ids = tok.encode(tok.apply_chat_template(MESSAGES), add_special_tokens=False)
    assert ids.count(tok.bos_id) == 1 and ids[0] == tok.bos_id and not caplog.records
    with caplog.at_level(logging.WARNING):
        assert tok.encode("<s>Hi").count(tok.bos_id) == 2
    assert "two '<s>' tokens" in caplog.text


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        Tokenizer.load(save(tmp_path)).encode("a\ud800b")


def test_threads_agree(tmp_path: Path) -> None:
    tok = Tokenizer.load(save(tmp_path))
    texts = [t * 20 for t in toy_tokenizers.TEXT] * 4
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda t: tok.decode(tok.encode(t)), texts))
    assert got == texts


@pytest.mark.parametrize("make", [toy_tokenizers.byte_level, toy_tokenizers.llama2, toy_tokenizers.metaspace])
def test_least_tokens_is_a_lower_bound(make) -> None:
    tok = Tokenizer(make())
    for text in [*toy_tokenizers.TEXT, "", "a", "the " * 100, "  ordinary added  " * 7]:
        assert tok.least_tokens(text) <= len(tok.encode(text))
    assert tok.least_tokens("the " * 1000) > 100


def test_eos_is_the_union_of_three_places() -> None:
    class Tok:
        eos_id = 257

    assert eos_ids({"eos_token_id": 2}, {"eos_token_id": [300, 257]}, Tok()) == (2, 257, 300)
    assert eos_ids({"eos_token_id": None, "text_config": {"eos_token_id": [1, 106]}}) == (1, 106)
    assert eos_ids({}, {}, None) == ()


def test_importing_text_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, qengine.text; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
