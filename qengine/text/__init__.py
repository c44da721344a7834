"""Text in and out: tokenizer, chat template, incremental detokeniser, stop matcher, end-of-sequence ids."""

from qengine.text.chat_template import ChatTemplate
from qengine.text.detokenizer import IncrementalDetokenizer
from qengine.text.eos import eos_ids
from qengine.text.stop import StopMatch, StopMatcher
from qengine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatch", "StopMatcher", "Tokenizer", "eos_ids"]
