"""What a plugin author imports: the two contracts, device descriptions and discovery.

Nothing here imports another part of qengine, and only `discovery` touches `importlib.metadata`.
"""

from qengine.plugin.device import Capability, DeviceInfo
from qengine.plugin.kv import (
    AttentionSpec,
    KVDtype,
    KVFunctions,
    KVLayout,
    KVScales,
)
from qengine.plugin.weights import (
    CONTRACT_VERSION,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    Quantizer,
    TensorInfo,
    TensorNeed,
    WeightQuant,
)

__all__ = [
    "CONTRACT_VERSION",
    "AttentionSpec",
    "Capability",
    "DeviceInfo",
    "KVDtype",
    "KVFunctions",
    "KVLayout",
    "KVScales",
    "LinearOp",
    "LinearScheme",
    "LinearShard",
    "LinearSpec",
    "Quantizer",
    "TensorInfo",
    "TensorNeed",
    "WeightQuant",
]
