"""The tokenizer of a model folder. Cheap to import, safe to share between threads."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from qengine.errors import CheckpointError, RequestError
from qengine.text.chat_template import ChatTemplate, find_templates
from qengine.text.detokenizer import IncrementalDetokenizer
from qengine.text.token_plan import plan_tokens

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""What a hub name is asked for; weights never."""

CONVERTIBLE = ("tokenizer.*", "*.model", "vocab*", "merges*", "*.tiktoken", "tekken.json", "*.py")
"""At least one of these must be there for transformers to make a tokenizer of."""


class Tokenizer:
    """Text <-> ids, special tokens, chat template.

    All methods may be called from several threads. `vocab_size` counts ids (largest id + 1), which may be fewer than
    the model's rows: such ids decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`special_tokens`: names as in tokenizer_config.json ("bos_token", "eos_token", ...) and their text."""
        # Files saved after training may hold padding or truncation, which would change prompts silently.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        decoder = backend.decoder
        self.plan = plan_tokens(None if decoder is None else json.loads(decoder.__getstate__()))
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def load(
        cls,
        folder_or_name: str | Path,
        trust_remote_code: bool = False,
        *,
        revision: str | None = None,
        chat_template: str | None = None,
    ) -> Tokenizer:
        """From a local folder, or a hub name (only its tokenizer files are fetched).

        tokenizer.json is read directly and `tokenizer_class` ignored; without it transformers converts what is there.
        `chat_template` (a path or the template itself) replaces the model's. Raises CheckpointError, ConfigError.
        """
        folder = Path(folder_or_name)
        if not folder.is_dir():
            folder = _fetch(str(folder_or_name), revision)
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        if (folder / "tokenizer.json").is_file():
            backend = _read_backend(folder / "tokenizer.json")
        else:
            backend, more = _convert(folder, trust_remote_code)
            special = {**more, **special}
        template: ChatTemplate | None = None
        if chat_template is not None:
            template = ChatTemplate.from_option(chat_template, special)
        elif templates := find_templates(folder, config):
            template = ChatTemplate(templates, special)
        return cls(backend, special_tokens=special, chat_template=template)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Raises RequestError for text that is not valid Unicode (lone surrogates)."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as e:
            raise RequestError("the text is not valid Unicode", param="prompt", hint="no lone surrogates") from e
        self._warn_of_two_bos(ids)
        return ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation. To be encoded with `add_special_tokens=False`: the template writes them itself.

        `chat_template` replaces the tokenizer's for this call. Raises RequestError when there is none.
        """
        template = self.chat_template
        if chat_template is not None:
            template = ChatTemplate({"default": chat_template}, self.special_tokens)
        if template is None:
            raise RequestError(
                "this model's tokenizer has no chat template",
                param="messages",
                hint="serve with --chat-template FILE, or use /v1/completions",
            )
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the tokenizer lacks give nothing.

        Equal to the `tokenizers` library's own decoding, with one difference: where byte tokens spell invalid UTF-8,
        that turns the whole run of them into U+FFFD, whereas valid characters beside the damage are kept here.
        """
        stream = IncrementalDetokenizer(self, skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def decode_window(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library's own decoding, for decoders that `plan` cannot describe."""
        known = [i for i in token_ids if 0 <= i < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None when the tokenizer lacks the id."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds inside a text; may be part of a character. Empty when the tokenizer lacks the id."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.id_to_token(token_id)
            if token is None:
                found = b""
            elif self.plan is not None:
                found = self.plan.spell(token)
            else:
                found = self.decode_window([token_id], False).encode()
            self._bytes[token_id] = found
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out."""
        return token_id in self._special_ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of the tokens of a text, without tokenising it: its characters over the longest token's.

        A tokenizer that drops or joins characters (unknown ones, repeated blanks) can give fewer.
        """
        return -(-len(text) // self._longest_token)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def _warn_of_two_bos(self, ids: Sequence[int]) -> None:
        if self.bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            logger.warning(
                "the prompt starts with two %r tokens (id %d): the text spells one and the tokenizer adds one; "
                "leave it out of the text or encode with add_special_tokens=false",
                self.special_tokens["bos_token"],
                self.bos_id,
            )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names ending in _token with their text; a token may be given as text or as {"content": text, ...}."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}", hint="download it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wrong content", have=type(value).__name__, need="a JSON object")
    return value


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception for every kind of bad file
        raise CheckpointError(f"{path} cannot be read: {e}", hint="download it again") from e


def _convert(folder: Path, trust_remote_code: bool) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A folder without tokenizer.json (sentencepiece, tiktoken, vocab files): transformers converts it."""
    if not any(path for pattern in CONVERTIBLE for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} holds no tokenizer",
            need="tokenizer.json, or files that transformers converts",
            hint="the model's own tokenizer files in that folder, or serving with --tokenizer FOLDER",
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as e:  # whatever a converter or remote code raises is the folder's fault
        raise CheckpointError(
            f"no tokenizer could be made from {folder}: {_first_line(e)}",
            need="tokenizer.json, or files that transformers converts",
        ) from e
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(
            f"the tokenizer of {folder} runs only in Python",
            have=type(loaded).__name__,
            need="tokenizer.json",
            hint="convert it once with transformers and save_pretrained",
        )
    return backend, _special_tokens(loaded.special_tokens_map)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except Exception as e:  # network, name and access errors have no common base
        raise CheckpointError(
            f"no tokenizer at {name!r}: {_first_line(e)}", need="a local folder or a hub name that can be reached"
        ) from e
