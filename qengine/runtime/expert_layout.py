"""Shows experts under one set of names, whichever way a checkpoint holds them.

The model families' own files name every expert's linears ("...block_sparse_moe.experts.3.w1.weight"), and so does
transformers when it saves in the original format. Asked not to, transformers 5 saves what it holds in memory: one
tensor [experts, 2 * inner, hidden] for all gates and ups of a layer and one [experts, hidden, inner] for the downs,
under names of its own. Those tensors are cut into the experts' here, without reading them: the pieces lie one after the
other.
"""

from __future__ import annotations

import re
from typing import Any

from qengine.errors import CheckpointError
from qengine.layers.moe import ExpertNames
from qengine.models.registry import EXPERTS
from qengine.plugin import TensorInfo
from qengine.runtime.checkpoint import FLOATS, Checkpoint

COMMON = ExpertNames()
"""transformers' own names, of modules and of what it holds in memory."""
BLOCK = re.compile(r"(?P<layer>.*layers\.\d+)\.(?P<block>\w+)\.(?P<rest>(gate|experts)\..+)")
FUSED = re.compile(r"experts\.(gate_up_proj|down_proj)(\.weight)?")


def settle_experts(config: Any, checkpoint: Checkpoint) -> list[str]:
    """Give the experts of `checkpoint` the names that its family uses; returns notes. Does nothing for other models.

    Raises CheckpointError for fused tensors that are quantised or have an odd shape.
    """
    names = EXPERTS.get(getattr(config, "model_type", None) or "")
    if names is None:
        return []
    cut = 0
    for name in list(checkpoint.tensors):
        found = BLOCK.fullmatch(name)
        if found is None or found["block"] not in (COMMON.block, names.block):
            continue
        block, rest = f"{found['layer']}.{names.block}", found["rest"]
        if fused := FUSED.fullmatch(rest):
            checkpoint.split(name, expert_pieces(checkpoint.tensors[name], block, names, fused[1] == "gate_up_proj"))
            cut += 1
        elif (own := f"{block}.{own_name(rest, names)}") != name:
            info = checkpoint.tensors[name]
            checkpoint.split(name, [TensorInfo(own, info.dtype, info.shape)])
    return [f"{cut} tensors hold all experts of a layer each: read expert by expert"] if cut else []


def own_name(rest: str, names: ExpertNames) -> str:
    """The family's name of what transformers calls `rest` ("experts.3.gate_proj.weight")."""
    parts = rest.split(".")
    if parts[0] == "experts" and len(parts) > 2:
        parts[2] = {COMMON.gate: names.gate, COMMON.up: names.up, COMMON.down: names.down}.get(parts[2], parts[2])
    return ".".join(parts)


def expert_pieces(info: TensorInfo, block: str, names: ExpertNames, gate_up: bool) -> list[TensorInfo]:
    """The linears that lie one after the other in a fused tensor."""
    if info.dtype not in FLOATS or len(info.shape) != 3 or (gate_up and info.shape[1] % 2):
        raise CheckpointError(
            f"{info.name} holds all experts of a layer in one tensor",
            have=f"{info.dtype} {list(info.shape)}",
            need="a float tensor [experts, outputs, inputs]",
            hint="a checkpoint that names every expert's linears",
        )
    experts, outputs, inputs = info.shape
    leaves = [names.gate, names.up] if gate_up else [names.down]
    shape = (outputs // len(leaves), inputs)
    return [
        TensorInfo(f"{block}.experts.{e}.{leaf}.weight", info.dtype, shape) for e in range(experts) for leaf in leaves
    ]
