"""The weight-format contract.

A format answers four questions about one linear module: which tensors it holds in a file (`LinearScheme.tensors`),
what they mean (`dequantize`), where it runs (`capability`) and how it runs (`bind` -> `LinearOp`). The core never
asks for a format by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from qengine.plugin.device import Capability, DeviceInfo

if TYPE_CHECKING:
    from qengine.plugin.experts import ExpertsOp
    from qengine.plugin.random_tensors import RandomTensors


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a checkpoint header states it; `dtype` is the safetensors code (F16, BF16, F32, I32, F8_E4M3...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorNeed:
    """A tensor that one linear of a scheme holds in the file.

    `leaf` is the last part of its name ("qweight"). `shape` must match exactly; a None entry matches any size.
    `dtypes` are the accepted safetensors codes. `output_dim` / `input_dim` name the dimension that runs along the
    linear's outputs / inputs (how the tensor splits for fused and sharded modules); None means it does not split.
    """

    leaf: str
    shape: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    output_dim: int | None = None
    input_dim: int | None = None
    required: bool = True


@dataclass(frozen=True)
class LinearSpec:
    """One linear module as the checkpoint names it: y[T, out] = x[T, in] @ W[out, in].T + bias."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False


@dataclass(frozen=True)
class WeightSample:
    """One linear as a file of the format holds it, with the config that goes with it; see `WeightQuant.samples`."""

    config: Mapping[str, Any] | None
    spec: LinearSpec
    tensors: Mapping[str, torch.Tensor]


@dataclass
class LinearShard:
    """One checkpoint module's tensors (by leaf name, as read from the file) on their way into a possibly fused op."""

    spec: LinearSpec
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class LinearOp(ABC):
    """A bound linear: holds device buffers and runs. Built by `LinearScheme.bind`."""

    in_features: int
    out_features: int
    kernel: str
    """Which kernel runs and why, for the start-up report: "int4 M<=4, bf16 GEMM above (measured)"."""
    notes: Sequence[tuple[str, str]] = ()
    """(module, what `bind` found in its data that contradicts the config or was read other than stated). The report
    warns of each text once, with the number of modules. Data that cannot be used raises ValueError in `bind`."""
    rounds_activations: bool = False
    """Whether x is rounded (to 8 bits, say) before it is multiplied: then the result is `dequantize`'s product only up
    to that rounding."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] in the compute dtype -> [T, out_features] in the same dtype."""

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """As a call, in float32: where the op can, without rounding to 16 bits on the way. Logits come from here."""
        return self(x).float()

    @abstractmethod
    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor this op keeps (packed weights, zeros, scales, index maps, bias), by name.

        Memory reports and offload see exactly these: they are the very tensors that `__call__` reads, not copies, and
        no view of them is kept elsewhere, so that their contents may be moved (`tensor.data = moved`) between calls.
        """

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers().values())


class LinearScheme(ABC):
    """How one kind of linear is stored and run. Equal `key` means that shards may be fused into one op."""

    format: str
    """Short name for reports, such as "awq 4-bit g128"."""
    notes: Sequence[str] = ()
    """Contradictions between config and headers that did not keep `scheme_for` from deciding; warned of like those of
    a LinearOp, before anything is read."""
    splits_inputs: bool = True
    """Whether equal parts along `TensorNeed.input_dim` are linears of their own that add up. False where one part's
    inputs belong to groups of another (GPTQ's act-order). Scales that run along the inputs in groups split where the
    parts hold whole groups."""
    splits_outputs: bool = True
    """The same along `TensorNeed.output_dim`. False where a tensor states the whole's shape, for instance."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """Everything that must agree for two shards to run fused."""

    @abstractmethod
    def tensors(self, spec: LinearSpec) -> Sequence[TensorNeed]:
        """Names, shapes and dtypes that this linear holds in the file. Accounting uses exactly this list."""

    @abstractmethod
    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        """Bytes that `bind` will keep for this linear, single numbers aside; pure, used by the planner before anything
        is read.

        Of shards that run fused, `spec` is the whole: the first one's name, all their outputs.
        """

    @abstractmethod
    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        """Pure; needs no GPU."""

    def inputs_per_scale(self, spec: LinearSpec) -> int | None:
        """How many neighbouring inputs of this linear share a scale; the last ones may be fewer. None, the default:
        scales are shared in another way, or it is not said. Shapes alone do not tell."""
        return None

    def compact(self) -> LinearScheme | None:
        """A variant that keeps fewer bytes and is slower (no dense copy beside int4 on a CPU, for instance), or None.
        The engine takes it for every linear when memory is short, before anything is read."""
        return None

    def few_rows(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> LinearScheme | None:
        """A variant that keeps a rounded copy beside its weights, which runs where only a few rows are asked and is
        faster there; its `format` says so. None, the default: there is none, or it would not be faster on this device.
        The engine takes it for the output layer of models with quantised weights, unless told not to."""
        return None

    def of_experts(self) -> LinearScheme:
        """The variant that the experts of a mixture are bound as, grouped or not; itself by default. For formats that
        lay out a weight that runs alone in another way than those that run as one."""
        return self

    @abstractmethod
    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        """Repack one module (one or more shards stacked along outputs) and place it on `device`.

        `info` says what to run as. It describes `device`, but for tests of a CUDA op without a GPU: then its type is
        "cuda" while `device` is a CPU, and Triton kernels run in the interpreter (or are compiled only).
        Takes ownership of the tensors: entries may be popped as they are consumed, so that the peak is one module.
        Raises ValueError for data that no reading makes sense of (scales that are not finite, ...), naming the shard;
        the loader goes on and reports all such modules together.
        """

    def bind_experts(
        self, spec: LinearSpec, count: int, device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> ExpertsOp | None:
        """An empty grouped op for `count` experts of a mixture, all of this scheme's key and of `spec`'s shape (of
        shards that run fused, the whole, as in `resident_bytes`). It keeps `resident_bytes` for each expert.

        None, the default: the experts are bound by `bind` and run one after the other. See `qengine.plugin.experts`.
        """
        return None

    @abstractmethod
    def dequantize(self, spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The plain meaning of the stored tensors: float32 [out_features, in_features]. The reference of every test."""


def headers_of(scheme: LinearScheme, spec: LinearSpec) -> dict[str, TensorInfo]:
    """The headers of one linear of a scheme, by leaf name: the tensors that must be there, in the first dtype that is
    accepted."""
    return {
        need.leaf: TensorInfo(f"{spec.name}.{need.leaf}", need.dtypes[0], tuple(n or 1 for n in need.shape))
        for need in scheme.tensors(spec)
        if need.required
    }


class Quantizer(ABC):
    """Makes a format's tensors from a dense weight."""

    @abstractmethod
    def accepts(self, spec: LinearSpec) -> str | None:
        """None when this linear can be quantised, else the reason why it stays dense."""

    @abstractmethod
    def quantize(self, spec: LinearSpec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """weight [out, in] (any float dtype) -> tensors by leaf name, on the CPU, in the file's layout."""

    def work_bytes(self, spec: LinearSpec) -> int:
        """Bytes that quantising one linear takes at its peak beside its float32 weight and its statistics; for the plan
        that calibration states. The default: four float32 copies of the weight."""
        return 16 * spec.in_features * spec.out_features

    @abstractmethod
    def config(self, skipped: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` that describes the result; `skipped` are module names left dense."""


class WeightQuant(ABC):
    """A weight format: entry point of group `qengine.weight_quant`."""

    name: ClassVar[str]
    contract: ClassVar[int | str]
    """The contract version that the plugin was written for: a literal, so that it stays when qengine's moves on."""
    methods: ClassVar[tuple[str, ...]] = ()
    """`quant_method` values in a checkpoint's config that this plugin reads (its own `name` included)."""
    quantizes_at_load: ClassVar[bool] = False
    """Asked for on a 16-bit checkpoint, this format takes it as it is: `scheme_for` gives its dense modules a scheme
    whose `tensors` are the 16-bit ones and whose `bind` converts them. Otherwise a quantised copy is made first,
    through `quantizer`."""

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any] | None) -> WeightQuant:
        """Read the format's own config dict (None: the checkpoint has none). Raises ValueError naming field and value
        for what this plugin cannot do."""

    @abstractmethod
    def scheme_for(self, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> LinearScheme | None:
        """The scheme of one linear, decided from the tensors that the file holds under its name (by leaf name).

        The config is a cross-check: a contradiction raises ValueError naming both. None: this plugin does not store
        that module (the loader then asks the dense plugin).
        """

    def expected(self, spec: LinearSpec) -> Mapping[str, TensorInfo] | None:
        """The tensors, by leaf name, that a checkpoint with this config holds for one linear, for plans of a model that
        isn't here (`headers_of` makes them from a scheme). None: the config leaves it in 16 bits.

        Raises NotImplementedError, as it does by default, where the config alone does not tell.
        """
        raise NotImplementedError(f"{self.name} needs headers")

    def dummy(
        self, spec: LinearSpec, tensors: Mapping[str, TensorInfo], random: RandomTensors
    ) -> dict[str, torch.Tensor]:
        """Values for the tensors that `expected` names, by leaf name and on the device of `random`: random bits that
        the format could hold, of weights small enough for finite activations (`WEIGHT_STD`). For `--load-format dummy`.

        Raises NotImplementedError, as it does by default, where they are to be made through `quantizer`, slowly.
        """
        raise NotImplementedError(f"{self.name} makes no dummy weights")

    def unread(self, tensor: TensorInfo) -> str | None:
        """Asked about every tensor of the file that no module of the model takes: why the model would be wrong without
        it, or None. Reasons end the load; anything else is named in a warning."""
        return None

    @classmethod
    def quantizer(cls, **options: Any) -> Quantizer | None:
        """How this format is made from dense weights; None when it cannot be made here."""
        return None

    @classmethod
    def with_kv_scales(cls, config: Mapping[str, Any] | None, granularity: str) -> dict[str, Any] | None:
        """`config`, a quantization_config that this plugin reads (None: a 16-bit checkpoint has none), saying also that
        the file holds k_scale and v_scale tensors for an e4m3 KV cache, so that other engines use them. `granularity`
        is "tensor" ([1] each) or "head" ([num_kv_heads, 1, 1]). None: the format has no word for such scales."""
        return None

    @classmethod
    def samples(cls) -> Sequence[WeightSample]:
        """Small stored linears for the conformance kit, in every dialect that `quantizer` does not make."""
        return ()
