"""Token ids to text, a few tokens at a time, byte-exact."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from qengine.text.token_plan import TokenPlan
    from qengine.text.tokenizer import Tokenizer

_CONTEXT = 8
"""Tokens that a window keeps before the new ones, for decoders that look at neighbours."""


class IncrementalDetokenizer:
    """Joined pieces equal `tokenizer.decode` of all ids; a piece once given is never taken back.

    Only the bytes of an unfinished UTF-8 character are held. They come out as U+FFFD by `flush` when the ids end
    inside a character; otherwise U+FFFD appears only where the ids spell invalid UTF-8.

    `prompt_ids`: ids that stand before. Then a first space that a decoder drops at the start of a text is kept, so
    that prompt text + pieces is the whole text. Not thread-safe; one per sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._stream: _ByteStream | _WindowStream
        if tokenizer.plan is not None:
            opened = any(
                tokenizer.id_to_token(i) is not None and not (skip_special_tokens and tokenizer.is_special(i))
                for i in prompt_ids
            )
            self._stream = _ByteStream(tokenizer, tokenizer.plan, skip_special_tokens, opened)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens, prompt_ids[-_CONTEXT:])

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these further ids complete; may be empty."""
        return self._stream.push(token_ids)

    def push_token(self, token_id: int) -> str:
        """`push` of one id, at the price of a lookup for a token that was seen before."""
        return self._stream.push_token(token_id)

    def flush(self) -> str:
        """The held tail, at the end of the ids."""
        return self._stream.flush()


class _ByteStream:
    """For decoders that are sums over tokens: look up each token's bytes, decode UTF-8 incrementally."""

    def __init__(self, tokenizer: Tokenizer, plan: TokenPlan, skip_special_tokens: bool, opened: bool) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._skip = skip_special_tokens
        self._opened = opened
        self._strip_left = 0 if opened else plan.strip_count
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8 = cast(codecs.BufferedIncrementalDecoder, decoder)
        self._texts = plan.texts[skip_special_tokens]

    def push_token(self, token_id: int) -> str:
        between = self._opened and not self._strip_left and not self._utf8.buffer
        if between and (text := self._texts.get(token_id)) is not None:
            return text
        text = self.push((token_id,))
        if between and not self._utf8.buffer and not self._plan.separator:
            self._texts[token_id] = text
        return text

    def push(self, token_ids: Iterable[int]) -> str:
        tokenizer = self._tokenizer
        data = bytearray()
        for token_id in token_ids:
            if self._skip and tokenizer.is_special(token_id):
                continue
            if self._opened:
                if self._plan.separator and tokenizer.id_to_token(token_id) is not None:
                    data += self._plan.separator
                data += tokenizer.token_bytes(token_id)
            elif (token := tokenizer.id_to_token(token_id)) is not None:
                self._opened = True
                data += self._plan.spell(token, first=True)
        while self._strip_left and data:
            if not data.startswith(self._plan.strip):
                self._strip_left = 0
                break
            del data[: len(self._plan.strip)]
            self._strip_left -= 1
        return self._utf8.decode(bytes(data))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For other decoders (WordPiece and the like): decode a window of ids, give what is new in it."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self._decode = tokenizer.decode_window
        self._skip = skip_special_tokens
        self._ids = list(context)
        self._given = self._decode(self._ids, self._skip)

    def push_token(self, token_id: int) -> str:
        return self.push((token_id,))

    def push(self, token_ids: Iterable[int]) -> str:
        self._ids.extend(token_ids)
        text = self._decode(self._ids, self._skip)
        if text.endswith("�") or not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        if len(self._ids) > 2 * _CONTEXT:
            del self._ids[:-_CONTEXT]
            text = self._decode(self._ids, self._skip)
        self._given = text
        return new

    def flush(self) -> str:
        text = self._decode(self._ids, self._skip)
        new = text[len(self._given) :] if text.startswith(self._given) else ""
        self._given = text
        return new
