"""Toy models on GPU operations that run on a CPU, their layers in "host memory" behind lanes that tests choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qengine.layers.linear import Linear
from qengine.layers.module import ModelContext
from qengine.layers.moe import ExpertNames, MoESpec, SparseMoE
from qengine.models.model import Model
from qengine.models.registry import build_model
from qengine.plugin import DeviceInfo, ExpertPairs, ExpertsOp, LinearOp, LinearShard, LinearSpec
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.dummy_weights import dummy_source
from qengine.runtime.loader import load, resolve
from qengine.runtime.model_config import load_config
from qengine.runtime.offload_store import OffloadStore
from qengine.runtime.offload_units import expert_units, layer_linears, offload_units
from qengine.runtime.quant_select import select_quant
from qengine.runtime.weight_stream import Lane, WeightStream
from qengine_kernels.moe_gemm.reference import grouped_reference
from torch_linear import TorchLinearOp, TorchLinearScheme
from toy_models import awq_config, llama_config, write_json

CPU = torch.device("cpu")


class AtOnce:
    """Copies before anything that is started later."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def copy(self, buffer: int, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append(buffer)
        to.copy_(source)

    def wait(self, buffer: int) -> None:
        pass


class AtItsWorst(AtOnce):
    """A copy destroys the buffer when it starts and is done when somebody waits, not before. Shows a layer whose buffer
    is taken while it is in use, and one that is used without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.due: dict[int, Callable[[], object]] = {}

    def copy(self, buffer: int, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append(buffer)
        to.zero_()
        self.due[buffer] = lambda: to.copy_(source)

    def wait(self, buffer: int) -> None:
        self.due.pop(buffer)()


class NeverWaiting(AtItsWorst):
    """The control: waits for nothing."""

    def wait(self, buffer: int) -> None:
        self.due.pop(buffer)


TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
MOE = TOY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "16-bit": (TOY | {"num_hidden_layers": 5}, None),
    "awq": (TOY | {"attention_bias": True}, awq_config(32)),
    "gptq act-order": (TOY, GPTQ),
    "fp8": (TOY, FP8),
    "awq experts": (MOE, awq_config(32)),
    "16-bit experts": (MOE, None),
}
TURING = DeviceInfo("cuda", "T4", (7, 5), 65536, 15 << 30)


class StackedOp(ExpertsOp):
    """One linear of all experts in one tensor, multiplied by torch, with slots: a third party's."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense
        _, self.out_features, self.in_features = dense.shape

    def bind(self, expert: int, shards: Sequence[LinearShard]) -> LinearOp:
        self.dense[expert] = torch.cat([shard.tensors["weight"] for shard in shards])
        return TorchLinearOp(self.dense[expert], None)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"dense": self.dense}

    def over(self, stacks: Mapping[str, torch.Tensor]) -> ExpertsOp:
        return StackedOp(stacks["dense"])

    def __call__(self, x: torch.Tensor, pairs: ExpertPairs, combine: bool) -> torch.Tensor:
        weights = pairs.weights if combine else None
        return grouped_reference(x, self.dense, pairs.order, pairs.offsets, pairs.top_k, weights)


class StackedScheme(TorchLinearScheme):
    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp:
        return StackedOp(torch.full((count, spec.out_features, spec.in_features), torch.nan))


class Tower:
    """Sparse layers one upon the other and nothing else: experts of a format in little time."""

    LAYERS, EXPERTS, TOP_K, WIDTH = 3, 4, 2, 32

    def __init__(
        self,
        folder: Path,
        quant: dict[str, Any] | None,
        lane: Lane | None = None,
        slots: int = 0,
        torch_only: bool = False,
    ) -> None:
        """Random weights; with a lane, the experts of all layers offloaded, with so many slots each. The format is that
        of `quant` (None: 16 bits) in the interpreter, or `StackedScheme`."""
        write_json(folder / "config.json", llama_config(**MOE, **({"quantization_config": quant} if quant else {})))
        checkpoint = Checkpoint.config_only(folder)
        choice = select_quant(None, checkpoint.quant)
        ctx = ModelContext(load_config(checkpoint), CPU, TURING, torch.float32, torch.float32, max_model_len=64)
        spec = MoESpec(self.EXPERTS, self.TOP_K, self.WIDTH, self.WIDTH, "silu", True)
        self.layers = [SparseMoE(ctx, f"model.layers.{i}.mlp", spec, ExpertNames()) for i in range(self.LAYERS)]
        source = dummy_source(ctx.leaves, choice.quant, checkpoint.quant, torch.float16, 0, CPU)
        plan = resolve(ctx.leaves, source, choice.quant, choice.dense, TURING, torch.float32)
        experts: list[list[Linear]] = [[*layer.gate_up.leaves, *layer.down.leaves] for layer in self.layers]
        if torch_only:
            for leaf in (leaf for own in experts for leaf in own):
                leaf.resolve([StackedScheme()] * len(leaf.specs))
        self.store = None if lane is None else OffloadStore(experts, CPU, slots)
        load(plan, store=self.store)
        self.stream: WeightStream | None = None
        if self.store is not None and lane is not None:
            hooked = [[layer.router, *own] for layer, own in zip(self.layers, experts, strict=True)]
            self.stream = self.store.stream(lane, hooked)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """One forward pass over [tokens, WIDTH]."""
        if self.stream is not None:
            self.stream.begin(len(x))
        for layer in self.layers:
            x = x + 8 * layer(x)
        if self.stream is not None:
            self.stream.finish()
        return x


def loaded(
    folder: Path, name: str, lane: Lane | None, patterns: str | None = None, slots: int = 0
) -> tuple[Model, OffloadStore | None]:
    """Random weights on GPU operations that run on a CPU; with a lane, every layer that `patterns` name offloaded, or
    the experts of all layers with so many slots."""
    config, quant = MODELS[name]
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", llama_config(**config, **({"quantization_config": quant} if quant else {})))
    checkpoint = Checkpoint.config_only(folder)
    choice = select_quant(None, checkpoint.quant)
    model = build_model(
        ModelContext(load_config(checkpoint), CPU, TURING, torch.float32, torch.float32, max_model_len=64)
    )
    source = dummy_source(model.leaves, choice.quant, checkpoint.quant, torch.float16, 0, CPU)
    plan = resolve(model.leaves, source, choice.quant, choice.dense, TURING, torch.float32)
    if lane is None:
        load(plan)
        return model, None
    units = (expert_units if slots else offload_units)(model, patterns)
    store = OffloadStore(list(units.values()), CPU, slots)
    load(plan, store=store)
    planned = sum(sum(leaf.resident_bytes(TURING).values()) for leaves in units.values() for leaf in leaves)
    assert 0.98 * planned <= store.nbytes <= 1.1 * planned
    hooked = layer_linears(model)
    stream = store.stream(lane, [hooked[unit] for unit in units])
    forward = model.forward

    def forward_and_finish(ids: torch.Tensor, *args: Any) -> torch.Tensor:
        stream.begin(len(ids))
        hidden = forward(ids, *args)
        stream.finish()
        return hidden

    model.forward = forward_and_finish  # type: ignore[method-assign]
    return model, store
