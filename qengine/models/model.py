"""What the runtime sees of a model, native or fallback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from qengine.layers.batch import Batch
from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext


def output_layer(ctx: ModelContext, name: str, embedding: str, hidden_size: int, vocab_size: int, bias: bool) -> Linear:
    """The output layer. Tied (config.tie_word_embeddings, which the loader has settled by what the checkpoint holds),
    it asks for the tensors of the embedding instead of its own, so it runs as a linear of its own either way."""
    head = Linear(ctx, name, hidden_size, vocab_size, bias=bias)
    head.output_layer = True
    if is_tied(ctx.config):
        head.specs = [replace(spec, name=embedding) for spec in head.specs]
    return head


def is_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


class Model(ABC):
    """A decoder built on a ModelContext; its leaves and attention layers are registered there.

    `max_position` is the longest context that the checkpoint's config claims, in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_position: int
    lm_head: Linear
    tied: bool
    """Whether the output layer reads the token embedding's matrix."""

    def __init__(self, ctx: ModelContext) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.leaves = ctx.leaves
        self.attention = ctx.attention

    def linears(self) -> list[Linear]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Linear)]

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """input_ids int64 [T] -> hidden states [T, hidden_size] in the compute dtype, final norm applied."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> float32 [R, vocab_size]."""
