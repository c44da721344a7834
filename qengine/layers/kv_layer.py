"""Binds the KV dtypes of one layer to its storage: picks what writes and reads the cache on this device."""

from __future__ import annotations

import torch

from qengine.layers.attention import KVLayer
from qengine.plugin import DeviceInfo, KVDtype, KVLayout, KVScales


def bind_kv_layer(
    k: KVDtype, v: KVDtype, layout: KVLayout, storage: torch.Tensor, scales: KVScales, info: DeviceInfo
) -> KVLayer:
    """The cache of one layer, whose K is stored by `k` and whose V by `v`.

    storage is uint8 [num_blocks, at least layout.block_bytes] on the device where the layer runs. Where both sides are
    of one plugin with a `bind` of its own, that brings the kernels; otherwise the shared ones run with each side's
    conversions: gather and float32 attention on a CPU, the Triton templates on CUDA.
    """
    if type(k) is type(v):
        own: KVLayer | None = k.bind(v, layout, storage, scales, info)
        if own is not None:
            return own
    k_scale, v_scale = scales.k.to(storage.device), scales.v.to(storage.device)
    if info.type == "cpu":
        from qengine_kernels.cpu_attention import CpuPagedKV

        together = type(k) is type(v) and k.sides_alike and layout.k == layout.v
        return CpuPagedKV(storage, layout, k.spec, k_scale, v_scale, k, v, together)
    from qengine_kernels.paged_attention import TritonPagedKV

    return TritonPagedKV(
        storage, layout, k.spec, k_scale, v_scale, k.functions(), v.functions(), native=info.sm >= 89,
        compute_dtype=k.compute_dtype,
    )  # fmt: skip
