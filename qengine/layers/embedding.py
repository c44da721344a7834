"""Token embedding: a gather of rows."""

from __future__ import annotations

import torch

from qengine.layers.linear import Linear
from qengine.layers.module import FLOAT_CODES, Leaf, ModelContext
from qengine.plugin import DeviceInfo, TensorNeed


class Embedding(Leaf):
    """Rows of a [vocab_size, hidden_size] table, kept in the compute dtype, out in the residual dtype.

    `scale` multiplies the rows (Gemma: sqrt(hidden_size)); it is rounded to the compute dtype first, as the models
    were trained.
    """

    def __init__(
        self, ctx: ModelContext, name: str, vocab_size: int, hidden_size: int, scale: float | None = None
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = None if scale is None else float(torch.tensor(scale).to(ctx.dtype))
        self.device, self.info, self.dtype, self.residual_dtype = ctx.device, ctx.info, ctx.dtype, ctx.residual_dtype
        self.weight: torch.Tensor | None = None
        self.head: Linear | None = None
        ctx.add(self)

    def share(self, head: Linear) -> None:
        """Gather from a tied output layer's weight instead of keeping a copy.

        On CUDA a dense weight stays [vocab_size, hidden_size] in the compute dtype. On a CPU it is repacked for its
        GEMM and cannot be gathered from, so there the embedding keeps its own rows.
        """
        if self.info.type == "cuda":
            self.head = head

    def needs(self) -> list[tuple[str, TensorNeed]]:
        if self.head is not None:
            return []
        shape = (self.vocab_size, self.hidden_size)
        return [(f"{self.name}.weight", TensorNeed("weight", shape, FLOAT_CODES))]

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.head is None:
            self.weight = tensors.pop(f"{self.name}.weight").to(device=self.device, dtype=self.dtype)

    def resident_bytes(self, info: DeviceInfo) -> dict[str, int]:
        if self.head is not None:
            return {}
        return {"embedding": self.vocab_size * self.hidden_size * self.dtype.itemsize}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {} if self.weight is None else {"weight": self.weight}

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [T] -> [T, hidden_size] in the residual dtype; fresh memory."""
        if self.weight is None:
            self.weight = self._shared_weight()
        rows = self.weight.index_select(0, input_ids).to(self.residual_dtype)
        return rows if self.scale is None else rows.mul_(self.scale)

    def _shared_weight(self) -> torch.Tensor:
        found = self.head.ops[0].buffers().get("weight") if self.head is not None and self.head.ops else None
        if found is None or found.shape != (self.vocab_size, self.hidden_size):
            raise RuntimeError(f"{self.name}: not loaded, and the tied output layer keeps no plain weight to share")
        return found
