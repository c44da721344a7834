"""Paged attention on a CPU: gather cached tokens, decode them, torch's fused attention in float32.

Objects that come from outside are duck-typed (a batch with the fields of `qengine.layers.batch.Batch`, a layout with
those of `qengine.plugin.KVLayout`, a spec with those of `qengine.plugin.AttentionSpec`).
"""

from qengine_kernels.cpu_attention.paged_kv import CpuPagedKV

__all__ = ["CpuPagedKV"]
