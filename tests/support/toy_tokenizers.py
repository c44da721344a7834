"""Small tokenizers of every decoder family, trained in a second on a few lines of mixed text."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "né世界😀 — 日本語の文章、そして絵文字 👩‍👩‍👧‍👦 🇫🇷!",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(1, 22))",
    "Ça va? Привет, мир. مرحبا   spaces   and\ttabs",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen and SmolLM."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL[1:], initial_alphabet=alphabet)
    )
    tok.add_tokens(["  ordinary added  ", "日本"])
    return tok


def _byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """BPE with byte fallback over U+2581 for blanks; half of the alphabet is left to the byte tokens."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for b in range(256):
        vocab[f"<0x{b:02X}>"] = len(vocab)
    words = sorted({w for line in TEXT for w in line.replace(" ", "▁").split("▁")})
    pieces = ["▁", "▁▁", *sorted({c for w in words for c in w if c < "É"}), "▁the", "▁The", "th", "an", "Paris", "▁P"]
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "▁"), ("t", "h"), ("a", "n"), ("▁", "P")]
    tok = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoder
    tok.add_special_tokens(SPECIAL)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tok


def llama2() -> Tokenizer:
    """Llama 2 and Mistral: the first blank of a text vanishes."""
    return _byte_fallback(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def gemma() -> Tokenizer:
    """Gemma: no blank vanishes."""
    return _byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Tokenizer:
    """Unigram with a Metaspace decoder: all blanks of the first token vanish."""
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return tok


def word_level() -> Tokenizer:
    """No decoder at all: tokens joined by blanks."""
    tok = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    return tok


def word_piece() -> Tokenizer:
    """A decoder that is no sum over tokens."""
    tok = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return tok


ALL: dict[str, Callable[[], Tokenizer]] = {
    f.__name__: f for f in (byte_level, llama2, gemma, metaspace, word_level, word_piece)
}
