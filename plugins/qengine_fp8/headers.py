"""What a module's tensor headers say about its FP8 weight: granularity, names, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from qengine.plugin import LinearSpec, TensorInfo
from qengine_fp8.config import Fp8Config

Granularity = Literal["tensor", "channel", "block"]

FLOATS = ("F16", "BF16", "F32", "F64")
SCALE_LEAVES = ("weight_scale", "weight_scale_inv", "scale")
"""AutoFP8's and ModelOpt's; DeepSeek's and transformers' (a multiplier, in spite of its name); DeepSeek V4's."""
INPUT_LEAVES = ("input_scale", "activation_scale")
"""AutoFP8's and ModelOpt's; transformers'."""
FOREIGN_LEAVES = {
    "weight_scale_2": "NVFP4",
    "pre_quant_scale": "AWQ",
    "weight_packed": "compressed-tensors",
    "qweight": "GPTQ or AWQ",
    "weight_zero_point": "compressed-tensors",
}
USUAL_BLOCK = (128, 128)


@dataclass(frozen=True)
class Stored:
    """How one module's weight lies in the file. `rank` is that of its scale, `input_rank` that of a static
    scale; `divides`: the file holds the scale's inverse. `notes`: what the config says otherwise."""

    granularity: Granularity
    scale_leaf: str
    rank: int
    block: tuple[int, int] | None = None
    input_leaf: str | None = None
    input_rank: int = 0
    divides: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)

    def multiplier(self, scale: torch.Tensor) -> torch.Tensor:
        """float32, of the stored shape: what weights are multiplied by."""
        wide = scale.to(torch.float32)
        return wide.reciprocal() if self.divides else wide

    def scale_shape(self, spec: LinearSpec) -> tuple[int, ...]:
        if self.block is not None:
            return grid(spec, self.block)
        first = spec.out_features if self.granularity == "channel" else 1
        return (first, 1)[: self.rank] if self.rank else ()


def grid(spec: LinearSpec, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of block scales: the last block of either side may be short."""
    return -(-spec.out_features // block[0]), -(-spec.in_features // block[1])


def read_headers(spec: LinearSpec, tensors: Mapping[str, TensorInfo], config: Fp8Config) -> Stored | None:
    """None for a 16-bit weight. Raises ValueError naming both sides for another format's tensors or a contradiction.

    A scale that is not there is left to the accounting, under the name that the config makes likely.
    """
    weight = tensors.get("weight")
    for leaf, owner in FOREIGN_LEAVES.items():
        if leaf in tensors:
            raise ValueError(f"{leaf} belongs to {owner} weights; need: an FP8 weight with {SCALE_LEAVES[0]}")
    scales = [leaf for leaf in SCALE_LEAVES if leaf in tensors]
    if weight is None:
        if scales:
            raise ValueError(f"{scales[0]} is there without a weight")
        return None
    if weight.dtype in FLOATS:
        if scales:
            raise ValueError(f"weight is {weight.dtype} and {scales[0]} is there: scales belong to F8_E4M3 weights")
        return None
    if weight.dtype != "F8_E4M3":
        raise ValueError(f"weight is {weight.dtype}; fp8 reads F8_E4M3, or 16-bit weights of modules left unquantised")
    if len(scales) > 1:
        raise ValueError(f"{' and '.join(scales)} are both there; which of them scales the weight is not known")
    block = config.of(spec.name)[0][0].block
    leaf = scales[0] if scales else SCALE_LEAVES[0 if block is None and not config.divides else 1]
    input_leaf, input_rank = _static(tensors, config, leaf)
    divides = config.divides and leaf == "weight_scale_inv"
    if not scales:
        return Stored("tensor" if block is None else "block", leaf, 0, block, input_leaf, input_rank, divides)
    granularity, block, notes = _by_first_that_fits(spec, tensors[leaf], config)
    return Stored(granularity, leaf, len(tensors[leaf].shape), block, input_leaf, input_rank, divides, notes)


def _by_first_that_fits(
    spec: LinearSpec, scale: TensorInfo, config: Fp8Config
) -> tuple[Granularity, tuple[int, int] | None, tuple[str, ...]]:
    """What `granularity_of` says by the module's rule, or by a later one that fits the file, which a note names."""
    settings = config.of(spec.name)
    problems: list[ValueError] = []
    for own, source in settings:
        try:
            found = granularity_of(spec, scale, own)
        except ValueError as e:
            problems.append(e)
            continue
        first = settings[0][1]
        return *found, (f"{source} is the one that fits the file, not {first} before it",) if problems else ()
    raise problems[0] if own is config else ValueError(f"{problems[0]} (by {settings[0][1]})")


def _static(tensors: Mapping[str, TensorInfo], config: Fp8Config, scale_leaf: str) -> tuple[str | None, int]:
    """Name and rank of the static activation scale. One that the config promises and the file lacks is left to the
    accounting."""
    found = [leaf for leaf in INPUT_LEAVES if leaf in tensors]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are both there; which of them scales activations is not known")
    if found:
        shape = tensors[found[0]].shape
        if shape not in ((), (1,)):
            raise ValueError(f"{found[0]} has shape {list(shape)}; need: one number for the whole tensor")
        return found[0], len(shape)
    if not config.static:
        return None, 0
    return INPUT_LEAVES[1 if scale_leaf == "weight_scale_inv" else 0], 0


def granularity_of(
    spec: LinearSpec, scale: TensorInfo, config: Fp8Config
) -> tuple[Granularity, tuple[int, int] | None]:
    """What a scale's shape means for this weight. The block size is never derived by dividing: short blocks at the
    edges would be read with the wrong size."""
    shape, n = scale.shape, spec.out_features
    if config.block is not None:
        need = grid(spec, config.block)
        if shape != need:
            raise ValueError(
                f"weight_block_size {list(config.block)} in the config means {scale.name.rpartition('.')[2]} "
                f"{list(need)} for a weight [{n}, {spec.in_features}], the file has {list(shape)}"
            )
        return "block", config.block
    if shape in ((), (1,), (1, 1)):
        return "tensor", None
    if shape in ((n,), (n, 1)):
        return "channel", None
    if shape == grid(spec, USUAL_BLOCK):
        return "block", USUAL_BLOCK
    raise ValueError(
        f"scales {list(shape)} fit a weight [{n}, {spec.in_features}] neither per tensor nor per channel nor by blocks "
        f"of {USUAL_BLOCK[0]}x{USUAL_BLOCK[1]}; need: weight_block_size in the config"
    )
