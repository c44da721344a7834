"""g_idx: which group each input channel belongs to.

qweight's rows keep the inputs' own order; with act-order the groups are scattered over them. At load the rows are
sorted by group, once, and the op permutes its activations instead. Whether there is anything to permute is decided by
g_idx alone: the flag `desc_act` is also true for files with static groups, whose map is the plain one.
"""

from __future__ import annotations

import torch

ALL_ZERO = (
    "g_idx is all zeros although there are several groups and desc_act is false: "
    "it is taken as not filled in, and groups follow one another"
)
SHUFFLED = "g_idx is shuffled although desc_act is false: g_idx counts"


def read_order(
    g_idx: torch.Tensor | None, in_features: int, group_size: int, groups: int, act_order: bool
) -> tuple[torch.Tensor | None, str | None]:
    """g_idx int [K] -> (order int32 [K] that sorts the inputs by group, or None where they are sorted; a note).

    `act_order` is whether the config says that inputs are reordered. Raises ValueError for maps that no writer makes.
    """
    if g_idx is None or (groups == 1 and not g_idx.any()):
        return None, None
    g_idx = g_idx.to("cpu", torch.int64)
    plain = torch.arange(in_features) // group_size
    if torch.equal(g_idx, plain):
        return None, None
    if not g_idx.any():
        if act_order:
            raise ValueError(f"g_idx is all zeros, but desc_act is true and there are {groups} groups")
        return None, ALL_ZERO
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx names groups {low}..{high}, but there are {groups} rows of scales")
    sizes, need = torch.bincount(g_idx, minlength=groups), torch.bincount(plain, minlength=groups)
    if not torch.equal(sizes, need):
        g = int((sizes != need).nonzero()[0, 0])
        raise ValueError(f"g_idx gives group {g} {int(sizes[g])} inputs; need {int(need[g])} (group_size {group_size})")
    order = torch.argsort(g_idx, stable=True).to(torch.int32)
    return order, None if act_order else SHUFFLED
