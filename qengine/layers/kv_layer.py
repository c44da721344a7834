"""Binds a KV dtype to one layer's storage: picks what writes and reads the cache on this device."""

from __future__ import annotations

import torch

from qengine.layers.attention import KVLayer
from qengine.plugin import AttentionSpec, DeviceInfo, KVDtype, KVLayout, KVScales


def bind_kv_layer(
    plugin: KVDtype,
    spec: AttentionSpec,
    layout: KVLayout,
    storage: torch.Tensor,
    scales: KVScales,
    info: DeviceInfo,
    compute_dtype: torch.dtype,
) -> KVLayer:
    """The cache of one layer.

    storage is uint8 [num_blocks, at least layout.block_bytes] on the device where the layer runs. A plugin that has a
    `bind(spec, layout, storage, scales, info, compute_dtype)` of its own brings its own kernels; otherwise the shared
    ones run with the plugin's conversions: gather and float32 attention on a CPU, the Triton templates on CUDA.
    """
    own = getattr(plugin, "bind", None)
    if own is not None:
        layer: KVLayer = own(spec, layout, storage, scales, info, compute_dtype)
        return layer
    k_scale, v_scale = scales.k.to(storage.device), scales.v.to(storage.device)
    if info.type == "cpu":
        from qengine_kernels.cpu_attention import CpuPagedKV

        return CpuPagedKV(storage, layout, spec, k_scale, v_scale, plugin.encode, plugin.decode)
    from qengine_kernels.paged_attention import TritonPagedKV

    return TritonPagedKV(
        storage, layout, spec, k_scale, v_scale, plugin.functions(), native=info.sm >= 89, compute_dtype=compute_dtype
    )
