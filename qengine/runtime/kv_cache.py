"""The paged KV cache in memory: one storage tensor for each layer of a group, bound to every attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qengine.core.memory import storage_bytes
from qengine.core.step import KVGroupSpec
from qengine.errors import CapabilityError, PluginError
from qengine.layers.attention import Attention
from qengine.layers.kv_layer import bind_kv_layer
from qengine.plugin import DeviceInfo, KVDtype, KVLayout, KVScales, SideLayout
from qengine.runtime.kv_dtypes import KVDtypes


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
    layers: Sequence[Attention], kv: KVDtypes, block_size: int, dtype: torch.dtype, info: DeviceInfo
) -> list[KVLayout]:
    """Block layout of every layer. Raises CapabilityError for the first side of a layer that its plugin refuses here,
    PluginError for a layout whose rows do not fit into it."""
    out = []
    for layer in layers:
        k, v = (_side_layout(side, layer, block_size, info) for side in kv.formats(layer, dtype))
        out.append(KVLayout.of(block_size, k, v))
    return out


def _side_layout(side: KVDtype, layer: Attention, block_size: int, info: DeviceInfo) -> SideLayout:
    answer = side.capability(info)
    if not answer:
        raise CapabilityError(f"--kv-dtype {side.name} cannot run {layer.name}: {answer.reason}")
    layout = side.layout(block_size)
    if layout.last_byte(layer.spec, block_size) > layout.nbytes:
        raise PluginError(
            f"KV dtype {side.name}: the rows of a block do not fit into what its layout says",
            have=f"{layout.nbytes} bytes", need=f"{layout.last_byte(layer.spec, block_size)} bytes",
        )  # fmt: skip
    return layout


def allocate(
    layers: Sequence[Attention],
    groups: Sequence[KVGroupSpec],
    layouts: Sequence[KVLayout],
    num_blocks: int,
    kv: KVDtypes,
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
            k, v = kv.formats(layer, dtype)
            layer.cache = bind_kv_layer(k, v, layouts[i], storage[j], scales[layer.name], info)
    return KVCache(storage, layouts[0].block_size if layouts else 0)


def default_scales(layer: Attention) -> KVScales:
    one = torch.ones(layer.spec.num_kv_heads, dtype=torch.float32)
    return KVScales(one, one.clone(), "default 1.0")
