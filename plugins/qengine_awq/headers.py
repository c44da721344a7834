"""What a module's tensor headers say: that it is AWQ's gemm layout, and its group size."""

from __future__ import annotations

from collections.abc import Mapping

from qengine.plugin import LinearSpec, TensorInfo


def check_shapes(spec: LinearSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises ValueError naming both sides when the tensors are another format's or another AWQ layout's.

    Leaf names alone do not tell: GPTQ has the same three. A missing tensor is left to the accounting.
    """
    k, n = spec.in_features, spec.out_features
    if n % 8:
        raise ValueError(f"{n} outputs do not pack into AWQ's words of 8")
    need = f"awq reads qweight I32 [{k}, {n // 8}]"
    if "g_idx" in tensors:
        raise ValueError(f"these are GPTQ tensors (g_idx is there), {need}; need: a reader for gptq")
    qweight, scales = tensors.get("qweight"), tensors.get("scales")
    if qweight is not None and qweight.shape != (k, n // 8):
        have = f"qweight {qweight.dtype} {list(qweight.shape)}"
        raise ValueError(f"{have} is {layout_of(k, n, qweight.shape)}, {need}")
    if scales is not None and (len(scales.shape) != 2 or scales.shape[1] != n):
        raise ValueError(f"scales {list(scales.shape)} are not AWQ gemm's [groups, {n}] (gemv stores them so); {need}")


def layout_of(k: int, n: int, shape: tuple[int, ...]) -> str:
    """A name for the layout that a 4-bit weight [n, k] with a qweight of this shape has."""
    known: dict[tuple[int, ...], str] = {
        (-(-k // 8), n): "GPTQ's layout",
        (n, k // 8): "AWQ's gemv layout",
        (n // 4, k): "AWQ's gemv_fast (llm-awq) layout",
        (k // 16, n * 2): "the marlin layout",
    }
    return known.get(shape, "not the gemm layout")


def group_size_of(spec: LinearSpec, tensors: Mapping[str, TensorInfo], stated: int | None) -> int:
    """The group size from the rows of scales; the config's is a cross-check. -1 is one group.

    Without a config a power of two is taken where one fits (that is what writers use), so that a short last group is
    read rightly; otherwise the inputs must divide evenly.
    """
    k = spec.in_features
    scales = tensors.get("scales") or tensors.get("qzeros")
    if scales is None:
        return 128 if stated is None else stated
    rows = scales.shape[0]
    if stated is not None:
        need = 1 if stated == -1 else -(-k // stated)
        if rows != need:
            raise ValueError(
                f"group_size {stated} in the config means {need} rows of scales for {k} inputs, the file has {rows}"
            )
        return stated
    if rows == 1:
        return -1
    sizes = [g for g in (16, 32, 64, 128, 256, 512, 1024) if -(-k // g) == rows]
    if sizes:
        return sizes[0]
    if rows and k % rows == 0:
        return k // rows
    raise ValueError(f"no group size fits {rows} rows of scales for {k} inputs; need: group_size in the config")
