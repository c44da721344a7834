"""What a module's tensor headers say, held against what a group of the config says.

Headers decide. Raises ValueError naming both sides where the two contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from qengine.plugin import LinearSpec, TensorInfo
from qengine_compressed_tensors.arguments import Args
from qengine_compressed_tensors.config import WOULD_WORK, Group
from qengine_compressed_tensors.fp8 import Fp8Format
from qengine_compressed_tensors.integers import IntFormat
from qengine_compressed_tensors.layout import Packing, packing_of, words_of
from qengine_kernels.w8a16_gemm.layout import LEAST_BLOCK

Kind = Literal["packed", "int8", "fp8"]

MARKS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
"""Leaves that only a quantised module holds."""
FLOATS = ("F16", "BF16", "F32", "F64")
KINDS: dict[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8"}
FORMAT_KIND: dict[str, tuple[Kind, ...]] = {
    "pack-quantized": ("packed",),
    "int-quantized": ("int8",),
    "float-quantized": ("fp8",),
    "naive-quantized": ("int8", "fp8"),
}


def stored_kind(tensors: Mapping[str, TensorInfo]) -> Kind | None:
    """How the weight is stored; None for a plain float weight, or when no weight is there."""
    packed, weight = tensors.get("weight_packed"), tensors.get("weight")
    if packed is not None:
        if packed.dtype == "U8":
            name = "NVFP4" if "weight_global_scale" in tensors else "MXFP4"
            raise ValueError(f"weight_packed U8 holds 4-bit floats ({name}), which are not supported; {WOULD_WORK}")
        if weight is not None:
            raise ValueError("the file holds both weight_packed and weight; need: one of them")
        return "packed"
    if weight is None:
        return None
    if weight.dtype in KINDS:
        return KINDS[weight.dtype]
    if weight.dtype not in FLOATS:
        raise ValueError(f"weight {weight.dtype} is not supported; need: {', '.join(KINDS)} or a float type")
    if "weight_scale" in tensors:
        raise ValueError(
            f"weight {weight.dtype} with a weight_scale is not compressed (quantization_status frozen); need: "
            "I8 or F8_E4M3; the model saved with save_compressed=True would work"
        )
    return None


def is_marked(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(leaf in tensors for leaf in MARKS)


def check_kind(kind: Kind, group: Group) -> list[str]:
    """Notes on a kind that a group's format does not name but can only have got from a global default."""
    assert group.weights is not None
    kinds = FORMAT_KIND.get(group.format)
    is_float = group.weights.type == "float"
    if is_float != (kind == "fp8"):
        raise ValueError(f"{group.name}.weights says {group.weights}, the file holds {STORED[kind]}")
    if kinds is None or kind in kinds:
        return []
    if group.own_format:
        raise ValueError(f"{group.name}.format says {group.format}, the file holds {STORED[kind]}")
    return [f"format says {group.format}, the file holds {STORED[kind]}: the file counts"]


STORED: dict[Kind, str] = {"packed": "weight_packed I32", "int8": "weight I8", "fp8": "weight F8_E4M3"}


def int_format(
    kind: Kind, group: Group, spec: LinearSpec, tensors: Mapping[str, TensorInfo], likely: Packing
) -> tuple[IntFormat, list[str]]:
    """The format of integer weights, and notes. `likely` is the packing to take where both fit."""
    weights = group.weights
    assert weights is not None
    packing: Packing | Literal["bytes"] = "bytes"
    if kind == "packed":
        packing = packing_in(group, spec, tensors.get("weight_packed"), likely)
    group_size = weights.group_size or -1
    scalar, scale = scale_shape(group, spec, tensors.get("weight_scale"), group_size)
    zeros, notes = zero_points(group, spec, tensors.get("weight_zero_point"), likely if packing == "bytes" else packing)
    reordered = "weight_g_idx" in tensors
    if reordered and weights.actorder is None:
        notes.append("weight_g_idx is there although actorder is not group: the file counts")
    reordered = reordered or weights.actorder == "group"
    return IntFormat(weights.bits, group_size, scalar, packing, zeros, reordered, scale), notes


def packing_in(group: Group, spec: LinearSpec, packed: TensorInfo | None, likely: Packing) -> Packing:
    assert group.weights is not None
    if packed is None:
        return likely
    bits, k = group.weights.bits, spec.in_features
    words = packed.shape[-1] if packed.shape else 0
    packing = packing_of(words, k, bits, likely)
    if packing is None:
        need = sorted({words_of(k, bits, "dense"), words_of(k, bits, "padded")})
        means = " or ".join(map(str, need))
        raise ValueError(
            f"{group.name}.weights.num_bits {bits} means {means} words of weight_packed for {k} inputs, "
            f"the file has weight_packed {list(packed.shape)}"
        )
    return packing


def scale_shape(
    group: Group, spec: LinearSpec, scale: TensorInfo | None, group_size: int
) -> tuple[tuple[int, ...] | None, str]:
    """(the shape where one scale is for all, else None; the scales' dtype)."""
    assert group.weights is not None
    if scale is None:  # the accounting names it as missing
        return ((1,) if group.weights.strategy == "tensor" else None), "BF16"
    if group.weights.strategy == "tensor":
        if scale.shape not in ((), (1,), (1, 1)):
            raise ValueError(f"{group.name}.weights says one scale per tensor, the file has {describe(scale)}")
        return scale.shape, scale.dtype
    columns = 1 if group_size == -1 else -(-spec.in_features // group_size)
    need = (spec.out_features, columns)
    if scale.shape != need:
        raise ValueError(
            f"{group.name}.weights says {group.weights}, which means weight_scale {list(need)} for "
            f"{spec.in_features} inputs, the file has {describe(scale)}"
        )
    return None, scale.dtype


def zero_points(
    group: Group, spec: LinearSpec, zeros: TensorInfo | None, likely: Packing
) -> tuple[Packing | Literal["plain"] | None, list[str]]:
    """How zero points are stored, and notes. Those of one scale per tensor are never packed."""
    assert group.weights is not None
    if zeros is None:
        return (None if group.weights.symmetric else likely), []
    notes = []
    if group.weights.symmetric:
        notes.append("weight_zero_point is there although the config says symmetric: the file counts")
    rows = zeros.shape[0] if zeros.shape else 1
    if group.weights.strategy == "tensor" or rows == spec.out_features:
        return "plain", notes
    packing = packing_of(rows, spec.out_features, group.weights.bits, likely)
    if packing is None or zeros.dtype != "I32":
        raise ValueError(
            f"{describe(zeros)} does not hold zero points of {group.weights.bits} bits for {spec.out_features} outputs"
        )
    return packing, notes


def fp8_format(group: Group, spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> tuple[Fp8Format, list[str]]:
    """The format of e4m3 weights, and notes."""
    weights, inputs, notes = group.weights, group.inputs, []
    assert weights is not None
    scale = tensors.get("weight_scale")
    scalar = None
    if weights.block is not None:
        check_blocks(group, spec, scale, weights.block)
    else:
        scalar, _ = scale_shape(group, spec, scale, -1)
    rounded = inputs is not None and rounds_to_fp8(weights, inputs)
    if inputs is not None and not rounded:
        notes.append(f"activations are kept in 16 bits or more, where the config asks for {inputs}")
    static, unused = None, [leaf for leaf in ("weight_zero_point", "input_zero_point") if leaf in tensors]
    if rounded and inputs is not None and not inputs.dynamic:
        static = static_scale_shape(group, tensors)
    elif "input_scale" in tensors:
        unused.append("input_scale")
    return Fp8Format(scalar, weights.block, rounded, static, tuple((u, tensors[u].shape) for u in unused)), notes


def static_scale_shape(group: Group, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    """The shape of the stored activation scale, which is one number."""
    scale = tensors.get("input_scale")
    if scale is None:  # the accounting names it as missing
        return (1,)
    if math.prod(scale.shape) != 1:
        raise ValueError(f"{group.name}.input_activations says {group.inputs}, the file has {describe(scale)}")
    return scale.shape


def check_blocks(group: Group, spec: LinearSpec, scale: TensorInfo | None, block: tuple[int, int]) -> None:
    columns = -(-spec.in_features // block[1])
    if columns > 1 and block[1] % LEAST_BLOCK:
        need = f"a multiple of {LEAST_BLOCK} inputs"
        raise ValueError(f"{group.name}.weights.block_structure {list(block)} is not supported; need: {need}")
    grid = (-(-spec.out_features // block[0]), columns)
    if scale is not None and scale.shape != grid:
        raise ValueError(
            f"{group.name}.weights says blocks of {list(block)}, which means weight_scale {list(grid)} for a weight "
            f"[{spec.out_features}, {spec.in_features}], the file has {describe(scale)}"
        )


def rounds_to_fp8(weights: Args, inputs: Args) -> bool:
    """Whether activations can be rounded as asked: stored scales, one a token, or one a token and block of weights."""
    if inputs.type != "float" or inputs.bits != 8 or not inputs.symmetric:
        return False
    if not inputs.dynamic:
        return inputs.strategy == "tensor" and weights.block is None
    if weights.block is not None:
        return inputs.strategy == "group" and inputs.group_size == weights.block[1]
    return inputs.strategy in ("token", "tensor")


def describe(info: TensorInfo) -> str:
    return f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)}"
