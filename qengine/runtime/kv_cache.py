"""The paged KV cache in memory: one storage tensor for each layer of a group, bound to every attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qengine.core.memory import storage_bytes
from qengine.core.step import KVGroupSpec
from qengine.errors import CapabilityError
from qengine.layers.attention import Attention
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import DeviceInfo, KVDtype, KVLayout, KVScales


@dataclass
class KVCache:
    """`storage[j]` is uint8 [num_blocks, block_bytes]: layer j of every group lives in it."""

    storage: list[torch.Tensor]
    block_size: int

    @property
    def nbytes(self) -> int:
        return sum(t.numel() for t in self.storage)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every storage tensor; sources are read before any is written."""
        if not pairs:
            return
        sources, targets = self._index([s for s, _ in pairs]), self._index([t for _, t in pairs])
        for t in self.storage:
            t.index_copy_(0, targets, t.index_select(0, sources))

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        index = self._index(blocks)
        for t in self.storage:
            t.index_fill_(0, index, 0)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """On the device, without waiting for the step that runs there."""
        return torch.tensor(blocks, dtype=torch.int64).to(self.storage[0].device, non_blocking=True)


def layer_layouts(
    layers: Sequence[Attention], plugin: KVDtype, block_size: int, dtype: torch.dtype, info: DeviceInfo
) -> list[KVLayout]:
    """Block layout of every layer. Raises CapabilityError for the first layer that the plugin refuses here."""
    out = []
    for layer in layers:
        answer = plugin.capability(info, layer.spec, dtype)
        if not answer:
            raise CapabilityError(f"--kv-dtype {plugin.name} cannot run {layer.name}: {answer.reason}")
        out.append(plugin.layout(layer.spec, block_size, dtype))
    return out


def allocate(
    layers: Sequence[Attention],
    groups: Sequence[KVGroupSpec],
    layouts: Sequence[KVLayout],
    num_blocks: int,
    plugin: KVDtype,
    scales: Mapping[str, KVScales],
    device: torch.device,
    info: DeviceInfo,
    dtype: torch.dtype,
) -> KVCache:
    """Allocate zeroed storage for `num_blocks` blocks (the null block included) and bind every attention layer."""
    sizes = storage_bytes(groups, [layout.block_bytes for layout in layouts])
    storage = [torch.zeros(num_blocks, size, dtype=torch.uint8, device=device) for size in sizes]
    for g, group in enumerate(groups):
        for j, i in enumerate(group.layers):
            layer = layers[i]
            layer.group = g
            layer.cache = bind_kv_layer(
                plugin, layer.spec, layouts[i], storage[j], scales[layer.name], info, dtype
            )
    return KVCache(storage, layouts[0].block_size if layouts else 0)


def default_scales(layer: Attention) -> KVScales:
    one = torch.ones(layer.spec.num_kv_heads, dtype=torch.float32)
    return KVScales(one, one.clone(), "default 1.0")
