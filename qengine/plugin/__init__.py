"""What a plugin author imports: the contracts for weight formats, KV dtypes and other kernels, and device descriptions.

`CONTRACT_VERSION` is MAJOR.MINOR. Stable are the names in `__all__`, their signatures, what their docstrings say, and
the entry-point groups `qengine.weight_quant`, `qengine.kv_dtype` and `qengine.weight_kernels`. A greater minor number
adds what has a default; a greater major one may change or remove, and may ask plugins for more. A plugin states the
version that it was written for in `contract`, and is taken where the major numbers are equal and its minor one is not
above ours; else `qengine plugins` shows it as "other contract" with both numbers, and a run that asks for it ends with
them. docs/plugins.md is the tutorial and says the same at length.

Nothing here imports another part of qengine, and only `discovery` touches `importlib.metadata`; `conformance` is a door
to the room where the checks live. Names are imported on first use, so that listing plugins doesn't pay for torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qengine.plugin.calibrator import CalibratedQuantizer, InputStats, tie
    from qengine.plugin.device import Capability, DeviceInfo
    from qengine.plugin.experts import ExpertPairs, ExpertsOp
    from qengine.plugin.kernels import KernelScheme, WeightKernels
    from qengine.plugin.kv import (
        AttentionSpec,
        KVDtype,
        KVFunctions,
        KVLayout,
        KVRowFunctions,
        KVScales,
        Side,
        SideLayout,
    )
    from qengine.plugin.random_tensors import E4M3_MAX, E4M3_STD, WEIGHT_STD, RandomTensors
    from qengine.plugin.samples import dummy_samples
    from qengine.plugin.version import CONTRACT_VERSION
    from qengine.plugin.weights import (
        LinearOp,
        LinearScheme,
        LinearShard,
        LinearSpec,
        Quantizer,
        TensorInfo,
        TensorNeed,
        WeightQuant,
        WeightSample,
        headers_of,
    )

__all__ = [
    "CONTRACT_VERSION",
    "E4M3_MAX",
    "E4M3_STD",
    "WEIGHT_STD",
    "AttentionSpec",
    "CalibratedQuantizer",
    "Capability",
    "DeviceInfo",
    "ExpertPairs",
    "ExpertsOp",
    "InputStats",
    "KVDtype",
    "KVFunctions",
    "KVLayout",
    "KVRowFunctions",
    "KVScales",
    "KernelScheme",
    "LinearOp",
    "LinearScheme",
    "LinearShard",
    "LinearSpec",
    "Quantizer",
    "RandomTensors",
    "Side",
    "SideLayout",
    "TensorInfo",
    "TensorNeed",
    "WeightKernels",
    "WeightQuant",
    "WeightSample",
    "dummy_samples",
    "headers_of",
    "tie",
]

_MODULES = {
    "CONTRACT_VERSION": "version",
    **dict.fromkeys(("CalibratedQuantizer", "InputStats", "tie"), "calibrator"),
    **dict.fromkeys(("Capability", "DeviceInfo"), "device"),
    **dict.fromkeys(("KernelScheme", "WeightKernels"), "kernels"),
    **dict.fromkeys(("ExpertPairs", "ExpertsOp"), "experts"),
    **dict.fromkeys(("AttentionSpec", "KVDtype", "KVFunctions", "KVLayout", "KVRowFunctions", "KVScales"), "kv"),
    **dict.fromkeys(("Side", "SideLayout"), "kv"),
    "dummy_samples": "samples",
    **dict.fromkeys(("E4M3_MAX", "E4M3_STD", "WEIGHT_STD", "RandomTensors"), "random_tensors"),
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f"qengine.plugin.{_MODULES.get(name, 'weights')}"), name)
    raise AttributeError(f"module 'qengine.plugin' has no attribute {name!r}")
