"""The optional part of the weight-format contract that runs all experts of a mixture as one operation.

A format that has none runs each expert's linears one after the other. A format that has one answers
`LinearScheme.bind_experts` with an `ExpertsOp`; on CUDA that is a few lines around `qengine_kernels.moe_gemm`, which
takes the very device function that the format gives the dense GEMM template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qengine.plugin.weights import LinearOp, LinearShard


@dataclass(frozen=True)
class ExpertPairs:
    """Which tokens go to which experts in one call.

    Every token takes `top_k` different experts; pair number p = token * top_k + choice, P pairs in all.
    order    int64 [P]: pair numbers, sorted by expert
    offsets  int32 [num_experts + 1]: where each expert's pairs begin in `order`, and the end
    weights  float32 [P], by pair number: what the expert's result counts
    """

    order: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor
    top_k: int


class ExpertsOp(ABC):
    """One linear of each expert (all of equal shape), held together and run as one grouped GEMM.

    Made empty by `LinearScheme.bind_experts`; `bind` fills it expert by expert, so that loading needs no more than one
    module beside the weights.
    """

    in_features: int
    out_features: int
    most_pairs: int = 1 << 62
    """Above so many pairs in a call, the experts' own linears run one after the other: per expert that is a large GEMM,
    which a library does faster."""

    @abstractmethod
    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        """Take one expert's tensors, as `LinearScheme.bind` does, and return the linear of that expert alone.

        Its buffers are views into this op's: reports and memory sums see the experts' linears. Its `kernel` says how
        the grouped op runs.
        """

    def buffers(self) -> dict[str, torch.Tensor]:
        """The tensors of all experts together, of which the experts' own buffers are views, by name.

        Offload moves both (`tensor.data = moved`). Empty, the default: the op can't be moved, and where its weights are
        to live in host memory, the experts are bound by `LinearScheme.bind` and run one after the other.
        """
        return {}

    def over(self, stacks: Mapping[str, torch.Tensor]) -> ExpertsOp | None:
        """The same operation over slots: `stacks` are other tensors under the names of `buffers`, alike but for their
        first dimension, the number of slots. Whoever calls puts experts there and names slots instead of experts in
        `ExpertPairs`: `offsets` has an entry for each slot, and one for the end.

        Called once every expert is bound and none has moved. What the result reads beside `stacks` must be its own:
        this op's tensors move away. A pair's result must have the same bits in any slot as from this op.
        None, the default: the op has no slots. With --expert-slots its experts then stay whole layers that are copied.
        Every tensor of `buffers` must be contiguous, and its first dimension the number of experts.
        """
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        """The linear of each pair's expert, [P, out_features] in x's dtype, float32 accumulation.

        combine False: x [tokens, in_features], result in the order of the experts (row i belongs to pair order[i]).
        combine True: x [P, in_features] in the order of the experts, result by pair number, each row times its weight.
        """
