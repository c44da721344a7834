"""The pieces that turn a transformers model into leaves: its linears, its embedding, everything else.

A transformers model is built with parameters on the meta device, so that nothing is allocated, and buffers for real,
so that its own code computes them. Then every nn.Linear gives way to one that runs through qengine's weight schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from qengine.layers.embedding import Embedding
from qengine.layers.linear import Linear
from qengine.layers.module import FLOAT_CODES, Leaf, ModelContext
from qengine.plugin import DeviceInfo, TensorNeed


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made inside get their parameters moved to the meta device as they are registered; buffers stay."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        return None if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


class FallbackLinear(nn.Module):
    """nn.Linear's signature over a qengine Linear; computes in the compute dtype, answers in its input's dtype."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if x.is_meta:
            return x.new_empty(shape)
        return self.linear(x.reshape(-1, self.in_features).to(self.linear.dtype)).view(shape).to(x.dtype)


class FallbackEmbedding(nn.Module):
    """nn.Embedding's signature over a qengine Embedding; answers in the residual dtype."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shape = (*input_ids.shape, self.embedding.hidden_size)
        if input_ids.is_meta:
            return torch.empty(shape, dtype=self.embedding.residual_dtype, device="meta")
        return self.embedding(input_ids.flatten()).view(shape)


class ModuleTensors(Leaf):
    """The parameters (and saved buffers) of one transformers module that is no linear: norms, odd embeddings.

    They are kept in the residual dtype, like the stream they work on.
    """

    def __init__(self, ctx: ModelContext, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.device, self.dtype = ctx.device, ctx.residual_dtype
        saved = {n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
        self.tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False)) | saved
        if self.tensors:
            ctx.add(self)

    def _full_name(self, leaf: str) -> str:
        return f"{self.name}.{leaf}" if self.name else leaf

    def needs(self) -> list[tuple[str, TensorNeed]]:
        return [(self._full_name(n), TensorNeed(n, tuple(t.shape), FLOAT_CODES)) for n, t in self.tensors.items()]

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for leaf in self.tensors:
            value = tensors.pop(self._full_name(leaf)).to(device=self.device, dtype=self.dtype)
            if leaf in self.module._parameters:
                self.module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                self.module._buffers[leaf] = value
            self.tensors[leaf] = value

    def resident_bytes(self, info: DeviceInfo) -> dict[str, int]:
        return {"other": sum(t.numel() for t in self.tensors.values()) * self.dtype.itemsize}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {n: t for n, t in self.tensors.items() if not t.is_meta}


class Passthrough(nn.Module):
    """Stands in for the decoder inside the ...ForCausalLM model, so that the model's own code turns ready hidden
    states into logits, with whatever scaling or capping it does."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None
        self.output: Callable[..., Any] | None = None
        """The decoder's own kind of output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.output is not None
        return self.output(last_hidden_state=self.hidden)


def replace_module(root: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, new)


def freeze_rope(root: nn.Module, length: int) -> None:
    """Fix rotary embeddings whose frequencies depend on the length of the text, for texts of up to `length` tokens
    (see qengine.layers.rotary): each is asked once for the last position, and counts as plain from then on."""
    for module in root.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {None: kind}
        if not any(isinstance(k, str) and (k == "longrope" or "dynamic" in k) for k in kinds.values()):
            continue
        last = torch.tensor([[length - 1]])
        for layer_type in kinds:
            module(torch.zeros(1), last, **({} if layer_type is None else {"layer_type": layer_type}))
        plain: Any = dict.fromkeys(kinds, "default") if isinstance(kind, dict) else "default"
        module.rope_type = plain
