"""GPTQ linears: which tensors they hold, where they run, and how they are bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qengine.plugin import (
    Capability,
    DeviceInfo,
    ExpertsOp,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    RandomTensors,
    TensorInfo,
    TensorNeed,
    WeightQuant,
    WeightSample,
    dummy_samples,
    headers_of,
)
from qengine_gptq.config import GptqConfig, ModuleConfig, read_config
from qengine_gptq.cpu import bind_cpu, cpu_bytes
from qengine_gptq.dummy import dummy_tensors
from qengine_gptq.headers import bits_of, check_family, group_size_of, mismatch
from qengine_gptq.layout import words_for
from qengine_gptq.quantizer import GptqQuantizer
from qengine_gptq.reference import dequantize
from qengine_gptq.shards import Decoded, check_scales, decode, stack
from qengine_gptq.zeros import ZeroRule

FLOATS = ("F16", "BF16", "F32")


class SideBySide(LinearOp):
    """Shards whose inputs are sorted differently: one op each, outputs joined."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        self.ops = list(ops)
        self.in_features = ops[0].in_features
        self.out_features = sum(op.out_features for op in ops)
        self.kernel = f"{ops[0].kernel}, {len(ops)} shards apart (their g_idx differ)"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([op(x) for op in self.ops], dim=-1)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{name}": t for i, op in enumerate(self.ops) for name, t in op.buffers().items()}


@dataclass(frozen=True)
class GptqScheme(LinearScheme):
    """`bits` 2, 3, 4 or 8; group_size -1 is one group, the last group may be short.

    act_order   the config says that g_idx scatters the groups over the inputs; the file decides when it is read
    keep_dense  keep the dense copy for large batches on a CPU (8 bits: keep nothing else)
    """

    bits: int
    group_size: int
    zeros: ZeroRule
    act_order: bool = False
    keep_dense: bool = True
    tiles: bool = True
    notes: Sequence[str] = field(default=(), compare=False)
    splits_inputs = False  # g_idx names groups of the whole

    @property
    def format(self) -> str:  # type: ignore[override]
        extra = " asymmetric" if self.zeros.symmetric is False else ""
        return f"gptq {self.bits}-bit g{self.group_size}{extra}" + (" act-order" if self.act_order else "")

    @property
    def key(self) -> tuple[Any, ...]:
        return ("gptq", self.bits, self.group_size, self.zeros, self.act_order, self.keep_dense, self.tiles)

    def group(self, in_features: int) -> int:
        """Inputs in a group, at least 1."""
        return in_features if self.group_size == -1 else min(self.group_size, in_features)

    def ordered(self, in_features: int) -> bool:
        """Whether inputs are expected to be permuted."""
        return self.act_order and self.group(in_features) < in_features

    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        k, n = spec.in_features, spec.out_features
        groups = -(-k // self.group(k))
        split: dict[str, Any] = {"output_dim": 1, "input_dim": 0}
        needs = [
            TensorNeed("qweight", (words_for(k, self.bits), n), ("I32",), **split),
            TensorNeed("qzeros", (groups, words_for(n, self.bits)), ("I32",), **split),
            TensorNeed("scales", (groups, n), FLOATS, **split),
            TensorNeed("g_idx", (k,), ("I32", "I64"), input_dim=0, required=self.ordered(k)),
        ]
        if spec.bias:
            needs.append(TensorNeed("bias", (n,), FLOATS, output_dim=0))
        return needs

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        n, k = spec.out_features, spec.in_features
        ordered = self.ordered(k)
        if device.type == "cpu":
            return cpu_bytes(
                self.bits, n, k, self.group(k), spec.bias, dtype, ordered=ordered, keep_dense=self.keep_dense
            )
        from qengine_kernels.launch import Chip
        from qengine_kernels.wna16_gemm import held_bytes

        held, chip = 4 if self.bits == 3 else self.bits, Chip.known(device.sm)
        zeros = self.zeros.symmetric is not True
        weight = held_bytes(k, n, self.group(k), zeros, dtype, chip, bits=held, tiles=self.tiles)
        return weight + spec.bias * n * dtype.itemsize + ordered * k * 4

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        if device.type == "cpu":
            return self._on_a_cpu(dtype)
        if device.sm < 75:
            return Capability.refused(f"compute capability 7.5 or newer is needed, this GPU has {device.capability}")
        if device.sm < 80 and dtype is torch.bfloat16:
            return Capability.refused(
                f"bfloat16 needs compute capability 8.0, this GPU has {device.capability}; --dtype half works"
            )
        if self.bits == 3:
            return Capability.native("Triton W4A16: 3-bit codes are held in 4 bits")
        return Capability.native(f"Triton W{self.bits}A16")

    def _on_a_cpu(self, dtype: torch.dtype) -> Capability:
        name = str(dtype).removeprefix("torch.")
        if dtype is not torch.bfloat16:
            packed = "two int4 halves when memory is short" if self.bits == 8 else "4 bits"
            return Capability.emulated(f"dequantised to {name} at load; --dtype bfloat16 runs in {packed}")
        if self.bits == 8:
            if self.keep_dense:
                return Capability.emulated(f"dequantised to {name} at load, for want of an 8-bit GEMM with groups")
            return Capability.native("two int4 halves")
        return Capability.native("int4 GEMM" + ("" if self.bits == 4 else f", {self.bits}-bit codes held in 4 bits"))

    def compact(self) -> GptqScheme | None:
        """Without dense weights: about 0.56 (8 bits: 1.1) instead of 2.56 (2) bytes a weight on a CPU."""
        return dataclasses.replace(self, keep_dense=False) if self.keep_dense else None

    def of_experts(self) -> GptqScheme:
        return dataclasses.replace(self, tiles=False)

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        check_scales(shards)
        group = self.group(shards[0].spec.in_features)
        decoded = [decode(shard, self.bits, group, self.zeros, self.act_order, device) for shard in shards]
        notes = [note for _, own in decoded for note in own]
        parts = stack([part for part, _ in decoded])
        del decoded
        bias = torch.cat([s.tensors.pop("bias") for s in shards]).to(device) if shards[0].spec.bias else None
        ops, first = [], 0
        while parts:
            part = parts.pop(0)
            last = first + part.codes.shape[1]
            ops.append(self._op(part, None if bias is None else bias[first:last], info, dtype))
            first = last
        op = ops[0] if len(ops) == 1 else SideBySide(ops)
        op.notes = notes
        return op

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        if info.type == "cpu" or spec.bias:
            return None
        from qengine_gptq.kernels import GptqCudaExperts, chip_of

        def bind_one(shards: Sequence[LinearShard]) -> LinearOp:
            return self.of_experts().bind(shards, device, info, dtype)

        return GptqCudaExperts(spec, count, self.ordered(spec.in_features), chip_of(device, info), bind_one)

    def _op(self, part: Decoded, bias: torch.Tensor | None, info: DeviceInfo, dtype: torch.dtype) -> LinearOp:
        if info.type == "cpu":
            return bind_cpu(part, bias, dtype, keep_dense=self.keep_dense)
        from qengine_gptq.kernels import GptqCudaLinear

        return GptqCudaLinear(part, bias, self.zeros.symmetric is True, dtype, info, tiles=self.tiles)

    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        k = spec.in_features
        return dequantize(tensors, self.bits, k, self.group(k), self.zeros, self.act_order)


class GptqQuant(WeightQuant):
    """Reads AutoGPTQ's, GPTQModel's and optimum's files."""

    name = "gptq"
    contract = 1
    methods = ("gptq",)

    def __init__(self, config: GptqConfig) -> None:
        self.config = config

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> GptqQuant:
        return cls(read_config(config))

    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        if not check_family(spec, tensors):
            return None
        settings, notes = self._settings(spec, tensors)
        bits = settings.bits if settings.bits is not None else bits_of(spec, tensors)
        if bits is None:
            raise ValueError("the config states no bits, and no number of them fits the shapes of qweight and qzeros")
        group_size = settings.group_size if settings.group_size is not None else group_size_of(spec, tensors)
        return GptqScheme(bits, group_size, settings.zero_rule, settings.act_order, notes=notes)

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        settings = next(self.config.matches(spec.name), self.config.base)
        if settings is None or self.config.leaves_out(spec.name):
            return None
        bits = 4 if settings.bits is None else settings.bits
        size = 128 if settings.group_size is None else settings.group_size
        return headers_of(GptqScheme(bits, size, settings.zero_rule, settings.act_order), spec)

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        settings = next(self.config.matches(spec.name), self.config.base) or self.config.base
        bits = 4 if settings.bits is None else settings.bits
        size = 128 if settings.group_size is None else settings.group_size
        return dummy_tensors(tensors, bits, spec.in_features if size == -1 else size, settings.zero_rule, random)

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """Widths, zeros and an order of channels that the quantizer does not make."""
        config = {"quant_method": "gptq", "group_size": 64, "desc_act": False, "sym": False}
        ways = ({"bits": 2}, {"bits": 3}, {"bits": 8}, {"bits": 4, "desc_act": True, "checkpoint_format": "gptq_v2"})
        return dummy_samples(cls, [{**config, **way} for way in ways])

    def _settings(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]
    ) -> tuple[ModuleConfig, tuple[str, ...]]:
        """What holds for a quantised module: its first dynamic rule, else the config's own settings. Where the file
        contradicts that rule, a later one that fits: sorting the keys on saving puts rules out of order."""
        notes = list(self.config.notes)
        if self.config.leaves_out(spec.name):
            notes.append("modules_in_block_to_quantize leaves out what the file holds quantised: the file counts")
        matches = list(self.config.matches(spec.name))
        if matches and matches[0] is None:
            notes.append("a dynamic rule takes out what the file holds quantised: the file counts")
        wanted = [match for match in matches if match is not None] or [self.config.base]
        problems = [mismatch(spec, tensors, one.bits, one.group_size) for one in wanted]
        if None not in problems:
            raise ValueError(f"{problems[0]} (by {wanted[0].source})")
        chosen = problems.index(None)
        if chosen:
            notes.append(f"{wanted[chosen].source} is the one that fits the file, not {wanted[0].source} before it")
        return wanted[chosen], tuple(notes)

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        """Options: bits (4), group_size (128; -1: one group), symmetric (True), act_order (True), damping (0.01)."""
        return GptqQuantizer(**options)
