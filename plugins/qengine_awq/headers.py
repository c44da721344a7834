"""What a module's tensor headers say: which of AWQ's layouts it has, and its group size."""

from __future__ import annotations

from collections.abc import Mapping

from qengine.plugin import LinearSpec, TensorInfo
from qengine_awq.layouts import GEMM, LAYOUTS, Layout


def layout_of(spec: LinearSpec, tensors: Mapping[str, TensorInfo], stated: str | None) -> Layout:
    """The layout that the shapes and dtypes fit; of several (some tensor is missing) the stated one, else gemm first.

    Raises ValueError naming what is there and what AWQ has when none fits. A missing tensor is left to the accounting.
    """
    k, n = spec.in_features, spec.out_features
    if "g_idx" in tensors:
        raise ValueError(f"these are GPTQ tensors (g_idx is there), {need(k, n)}; need: a reader for gptq")
    fitting = [layout for layout in LAYOUTS if layout.fits(k, n, tensors)]
    if not fitting:
        leaves = ("qweight", "qzeros", "scaled_zeros", "scales")
        have = ", ".join(f"{t} {tensors[t].dtype} {list(tensors[t].shape)}" for t in leaves if t in tensors)
        raise ValueError(f"{have}: {looks_like(k, n, tensors.get('qweight'))}, {need(k, n)}")
    return next((layout for layout in fitting if stated in layout.stated), fitting[0])


def need(k: int, n: int) -> str:
    if n % 8:
        return f"and AWQ packs outputs by 8; have: {n} outputs; need: a multiple of 8"
    return f"awq reads qweight I32 [{k}, {n // 8}] and scales [groups, {n}], or its gemv, gemv_fast and marlin layouts"


def looks_like(k: int, n: int, qweight: TensorInfo | None) -> str:
    """What a qweight for a weight [n, k] is that no 4-bit layout of AWQ has, or what is odd beside it."""
    names: dict[tuple[int, ...], str] = {
        (-(-k // 8), n): "GPTQ's layout",
        (-(-k // 4), n): "GPTQ's layout with 8 bits",
        (k, n // 4): "8-bit weights, which awq does not read",
    }
    whole = [(k, n // 8), (n, k // 8), (n // 4, k), (k // 16, n * 2)]
    shape = () if qweight is None else qweight.shape
    return names.get(shape, "these do not belong together" if shape in whole else "no layout of AWQ")


def group_size_of(
    spec: LinearSpec, tensors: Mapping[str, TensorInfo], layout: Layout, stated: int | None
) -> int:
    """The group size from the shape of scales; the config's is a cross-check. -1 is one group.

    Without a config a power of two is taken where one fits (that is what writers use), so that a short last group is
    read rightly; otherwise the inputs must divide evenly.
    """
    k = spec.in_features
    scales = tensors.get("scales")
    if scales is None and layout is GEMM:
        scales = tensors.get("qzeros")
    if stated is not None:
        wanted = layout.slots(k, stated)
        if scales is not None and scales.shape[layout.group_dim] != wanted:
            raise ValueError(
                f"group_size {stated} in the config means {wanted} rows of scales for {k} inputs, "
                f"the file has {scales.shape[layout.group_dim]} ({layout.name})"
            )
        return stated
    if scales is None:
        return 128
    rows = scales.shape[layout.group_dim]
    for size in layout.guesses:
        if holds(layout, k, size) == rows:
            return size
    if layout.slots(k, -1) == 1 and rows and k % rows == 0:
        return k // rows
    raise ValueError(f"no group size fits {rows} rows of scales for {k} inputs; need: group_size in the config")


def holds(layout: Layout, k: int, size: int) -> int | None:
    """Slots of scales, or None where the layout has no such groups."""
    try:
        return layout.slots(k, size)
    except ValueError:
        return None
