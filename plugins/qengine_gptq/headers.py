"""What a module's tensor headers say: that they are GPTQ's, and which bits and group size fit them."""

from __future__ import annotations

from collections.abc import Mapping

from qengine.plugin import LinearSpec, TensorInfo
from qengine_gptq.layout import BITS, words_for


def check_family(spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether these are GPTQ's tensors at all. Raises ValueError for another format's, naming it."""
    if {"B", "s"} <= tensors.keys():
        raise ValueError("tensors B and s are weights that AutoGPTQ repacked for Marlin; need: qweight, qzeros, scales")
    if not {"qweight", "qzeros", "scales"} & tensors.keys():
        return False
    k, n = spec.in_features, spec.out_features
    qweight = tensors.get("qweight")
    if qweight is not None and qweight.shape == (k, n // 8) and not n % 8:
        raise ValueError(
            f"qweight {list(qweight.shape)} is AWQ's gemm layout; gptq packs the {k} inputs: [{k} * bits / 32, {n}]"
        )
    return True


def mismatch(
    spec: LinearSpec, tensors: Mapping[str, TensorInfo], bits: int | None, group_size: int | None
) -> str | None:
    """Why `bits` and `group_size` (None: anything) can't be this module's, or None. A missing tensor is left to the
    accounting."""
    k, n = spec.in_features, spec.out_features
    qweight, scales = tensors.get("qweight"), tensors.get("scales")
    if bits is not None and qweight is not None and qweight.shape != (words_for(k, bits), n):
        held = bits_of(spec, tensors)
        meaning = f" ({held} bits)" if held is not None else ""
        return (
            f"bits {bits} means qweight [{words_for(k, bits)}, {n}] for {k} inputs and {n} outputs, the file has "
            f"{list(qweight.shape)}{meaning}"
        )
    if group_size is not None and scales is not None and scales.shape:
        need = 1 if group_size == -1 else -(-k // group_size)
        if scales.shape[0] != need:
            return (
                f"group_size {group_size} means {need} rows of scales for {k} inputs, the file has {scales.shape[0]}"
            )
    return None


def bits_of(spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> int | None:
    """The bits that the shapes of qweight and qzeros allow; None where no or more than one number fits."""
    k, n = spec.in_features, spec.out_features
    qweight, qzeros = tensors.get("qweight"), tensors.get("qzeros")
    found = [
        b
        for b in BITS
        if (qweight is not None and qweight.shape == (words_for(k, b), n))
        and (qzeros is None or qzeros.shape[-1:] == (words_for(n, b),))
    ]
    return found[0] if len(found) == 1 else None


def group_size_of(spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """The group size from the rows of scales, where no config states it; -1 is one group.

    A power of two is taken where one fits (that is what writers use), so that a short last group is read rightly;
    otherwise the inputs must divide evenly.
    """
    scales = tensors.get("scales") or tensors.get("qzeros")
    rows = scales.shape[0] if scales is not None and scales.shape else 1
    if rows == 1:
        return -1
    k = spec.in_features
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if -(-k // size) == rows:
            return size
    if rows and k % rows == 0:
        return k // rows
    raise ValueError(f"no group size fits {rows} rows of scales for {k} inputs; need: group_size in the config")
