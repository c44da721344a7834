"""A model one decoder layer at a time: load a layer, run all text through it, forget it.

Only the native families (`qengine.models.blocks.Decoder`) are built of layers that can be run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qengine.errors import CheckpointError, ConfigError
from qengine.layers.batch import Batch
from qengine.layers.linear import Linear
from qengine.layers.module import Leaf, ModelContext
from qengine.layers.moe import ExpertLinear
from qengine.models.blocks import Decoder, DecoderLayer
from qengine.models.registry import NATIVE, build_model
from qengine.plugin import DeviceInfo
from qengine.runtime import device as devices
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.host_memory import Trimmer
from qengine.runtime.kv_scales import LOOKS_LIKE
from qengine.runtime.loader import resolve
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import QuantChoice, select_quant
from qengine_calibration.hidden import HiddenFile
from qengine_calibration.observe import PlainKV

TOKENS_AT_ONCE = 4096
"""Tokens of a micro-batch that are tried first."""


class Reader(Protocol):
    """Where a layer's tensors come from: the checkpoint, or what calibration made of them."""

    def __call__(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class MicroBatch:
    """Equally long sequences, `first` is the first one's first token."""

    first: int
    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


class LayerStream:
    """The layers of one checkpoint, and text on its way through them."""

    def __init__(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], device: torch.device, info: DeviceInfo,
        dtype: torch.dtype, tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        """Builds the model and checks it against the checkpoint's headers; reads no weights.

        Raises CheckpointError for models of other than the native families and for incomplete checkpoints, ConfigError
        for sequences longer than the model's context.
        """
        self.checkpoint, self.sequences = checkpoint, sequences
        self.device, self.info, self.dtype = device, info, dtype
        self.tokens_at_once = tokens_at_once
        self._trim = Trimmer()
        config = load_config(checkpoint)
        longest = max(map(len, sequences))
        ctx = ModelContext(config, device, info, dtype, torch.float32, max_model_len=longest)
        model = build_model(ctx)
        if not isinstance(model, Decoder):
            raise CheckpointError(
                f"{type(model).__name__}: calibration runs models layer by layer, which the transformers fallback "
                "does not offer", have=getattr(config, "model_type", None), need=" | ".join(NATIVE),
            )  # fmt: skip
        if longest > model.max_position:
            raise ConfigError(
                "sequences are longer than the model's context", have=f"{longest} tokens",
                need=f"at most {model.max_position} tokens",
            )  # fmt: skip
        self.model = model
        self.choice: QuantChoice = select_quant(None, checkpoint.quant)
        # A tied head is not loaded, so the embedding keeps its own rows.
        model.embedding.head = None
        for leaf in ctx.leaves:
            if isinstance(leaf, ExpertLinear):
                leaf.group.run_apart()
        resolve(
            model.leaves, checkpoint, self.choice.quant, self.choice.dense, info, dtype,
            consumed=[n for n in checkpoint.tensors if LOOKS_LIKE.search(n)],
        )  # fmt: skip
        for layer in model.attention:
            layer.cache = PlainKV(layer.spec)

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def kv(self, index: int) -> PlainKV:
        """The attention of one layer, where an observer can be put."""
        cache = self.layers[index].attention.attention.cache
        assert isinstance(cache, PlainKV)
        return cache

    def embed(self, out: HiddenFile) -> None:
        """Write the embeddings of all tokens. Of the table, only the rows that the text has are read."""
        embedding = self.model.embedding
        rows, place = torch.tensor([i for s in self.sequences for i in s]).unique(return_inverse=True)
        if int(rows[-1]) >= embedding.vocab_size:
            raise CheckpointError(
                "the tokenizer makes ids that the model has no embedding for", have=int(rows[-1]),
                need=f"below {embedding.vocab_size}", hint="the model's own tokenizer",
            )  # fmt: skip
        table = self.checkpoint.read_rows(f"{embedding.name}.weight", rows.tolist())
        embedding.weight = table.to(self.device, self.dtype)
        for batch in self.batches():
            out.write(batch.first, embedding(place[batch.first : batch.first + batch.tokens].to(self.device)))
        embedding.weight = None
        self.tidy()

    def load(self, leaves: Sequence[Leaf], read: Reader | None = None) -> None:
        """Fill leaves, one after the other."""
        read = read or self.checkpoint.read
        for leaf in leaves:
            names = dict.fromkeys(name for name, _ in leaf.needs() if name in self.checkpoint.tensors)
            leaf.load({name: read(name) for name in names})

    def forget(self, layer: DecoderLayer) -> None:
        """Drop a layer's weights. Norms, a few kilobytes, stay."""
        for leaf in layer.leaves:
            if isinstance(leaf, Linear):
                leaf.ops = []
        self.tidy()

    def run(
        self, layer: DecoderLayer, source: HiddenFile, each: Callable[[MicroBatch, torch.Tensor, torch.Tensor], None],
        most: int | None = None,
    ) -> None:
        """Run the (loaded) layer over all text, or the first `most` micro-batches. `each` gets the micro-batch, the
        hidden states before the layer and those after it, float32 [tokens, hidden_size]."""
        for i, batch in enumerate(self.batches()):
            if i == most:
                break
            before = source.read(batch.first, batch.tokens).to(self.device)
            each(batch, before, self.forward(layer, before.clone(), batch))

    def forward(self, layer: DecoderLayer, residual: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """residual float32 [tokens, hidden_size], changed in place -> the residual stream after the layer."""
        plan = step(batch, self.device)
        rotary = layer.attention.rotary
        with torch.inference_mode():
            x = layer(layer.input_norm(residual), residual, {rotary: rotary.angles(plan.positions)}, plan)
            return residual.add_(x)

    def batches(self) -> Iterator[MicroBatch]:
        """All sequences in micro-batches of at most `tokens_at_once` tokens, equally long ones together."""
        first = start = 0
        while start < len(self.sequences):
            length = len(self.sequences[start])
            room = max(1, self.tokens_at_once // length)
            stop = start
            while stop < len(self.sequences) and stop - start < room and len(self.sequences[stop]) == length:
                stop += 1
            yield MicroBatch(first, stop - start, length)
            first += (stop - start) * length
            start = stop

    def halve(self) -> bool:
        """Smaller micro-batches from now on; False when a single sequence is already too much."""
        length = max(map(len, self.sequences))
        if self.tokens_at_once < 2 * length:
            return False
        self.tokens_at_once = min(self.tokens_at_once, length * len(self.sequences)) // 2
        self.tidy()
        return True

    def tidy(self) -> None:
        """Give freed memory back to the system."""
        devices.empty_cache(self.device)
        self._trim()


def step(batch: MicroBatch, device: torch.device) -> Batch:
    """What the layers need to know of a micro-batch; there is no cache to page."""
    lens = [batch.length] * batch.count
    return Batch(
        num_tokens=batch.tokens,
        num_seqs=batch.count,
        num_decodes=0,
        positions=torch.arange(batch.length, device=device).repeat(batch.count),
        query_start=torch.arange(batch.count + 1, dtype=torch.int32, device=device) * batch.length,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        host_query_lens=lens,
        host_seq_lens=lens,
        groups=[],
        block_size=0,
    )
