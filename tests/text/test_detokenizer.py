"""Pieces joined equal the whole, for every decoder family; nothing is taken back; only unfinished characters wait."""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as Backend

import toy_tokenizers
from qengine.text import IncrementalDetokenizer, Tokenizer

TOKENIZERS = {name: Tokenizer(make()) for name, make in toy_tokenizers.ALL.items()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def backend(tokenizer: Tokenizer) -> Backend:
    return tokenizer._backend


def id_lists(tokenizer: Tokenizer, count: int = 300) -> Iterator[list[int]]:
    """Random ids (special ones and ids beyond the vocabulary among them) and encoded text cut anywhere."""
    rng = random.Random(7)
    texts = [tokenizer.encode(t, add_special_tokens=False) for t in toy_tokenizers.TEXT]
    for i in range(count):
        if i % 2:
            yield [rng.randrange(tokenizer.vocab_size + 5) for _ in range(rng.randrange(40))]
        else:
            ids = rng.choice(texts)
            cut = rng.randrange(len(ids) + 1)
            yield ids[rng.randrange(cut + 1) : cut] + [rng.randrange(5)] * rng.randrange(3)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool, rng: random.Random) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip)
    out, at = [], 0
    while at < len(ids):
        step = rng.choice((1, 1, 1, 2, 5))
        out.append(stream.push(ids[at : at + step]))
        at += step
    return [*out, stream.flush()]


def valid_byte_runs(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether every run of byte tokens is valid UTF-8: else the library gives up the whole run."""
    run = b""
    for i in [*ids, None]:
        token = None if i is None else tokenizer.id_to_token(i)
        if i is not None and (token is None or (skip and tokenizer.is_special(i))):
            continue
        if token is not None and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(1)
    compared = 0
    for ids in id_lists(tokenizer):
        got = "".join(pieces(tokenizer, ids, skip, rng))
        assert got == tokenizer.decode(ids, skip)
        if valid_byte_runs(tokenizer, ids, skip):
            compared += 1
            assert got == backend(tokenizer).decode(ids, skip_special_tokens=skip)
    assert compared > 100


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_decoding_token_by_token_would_not_do(name: str) -> None:
    """The wrong way, which the comparison above must be able to see."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("né世界😀 the end", add_special_tokens=False)
    assert "".join(tokenizer.decode([i]) for i in ids) != backend(tokenizer).decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
def test_only_an_unfinished_character_waits(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("né世界😀 ok", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    seen, shown = b"", ""
    for i in ids:
        shown += stream.push([i])
        seen += tokenizer.token_bytes(i)
        whole = codecs.getincrementaldecoder("utf-8")("strict").decode(seen)
        assert shown == (whole.removeprefix(" ") if name == "llama2" else whole)
    assert stream.flush() == "" and data.decode().strip() == "né世界😀 ok"


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_cut_character_is_flushed_as_one_replacement(name: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    ids = [by_bytes[bytes([b])] for b in "😀".encode()[:cut]]
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(ids) == ""
    assert stream.flush() == "�"


def test_after_a_prompt_the_first_blank_stays() -> None:
    tokenizer = TOKENIZERS["llama2"]
    prompt = tokenizer.encode("The capital of France is")
    ids = tokenizer.encode("Paris", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(ids) == "Paris"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=prompt).push(ids) == " Paris"
    bos = [tokenizer.encode("x")[0]]
    assert IncrementalDetokenizer(tokenizer, prompt_ids=bos).push(ids) == "Paris"
    assert IncrementalDetokenizer(tokenizer, False, prompt_ids=bos).push(ids) == " Paris"


def test_word_pieces_after_a_prompt_keep_their_blank() -> None:
    tokenizer = TOKENIZERS["word_piece"]
    prompt = tokenizer.encode("The capital", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    text = "".join(stream.push([i]) for i in tokenizer.encode("of France is Paris " * 20)) + stream.flush()
    assert text == " of France is Paris" * 20


def test_valid_characters_survive_beside_a_broken_byte() -> None:
    tokenizer = TOKENIZERS["llama2"]
    ids = [tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in "é".encode() + b"\xff"]
    assert tokenizer.decode(ids) == "é�"
    assert backend(tokenizer).decode(ids) == "���"


def test_ids_beyond_the_vocabulary_are_silent(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
