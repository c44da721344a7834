"""Which kernels run a format's linears where packages offer others: priority, refusals, faults, and what is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from load_model import plan_folder
from qengine.layers.linear import Linear
from qengine.plugin import (
    Capability,
    DeviceInfo,
    KernelScheme,
    LinearOp,
    LinearScheme,
    LinearShard,
    LinearSpec,
    WeightKernels,
)
from qengine.plugin.discovery import PluginRecord
from qengine.runtime.kernel_choice import Found, prefer_kernels
from toy_models import make_tiny_awq

H100 = DeviceInfo("cuda", "H100", (9, 0), 227 * 1024, 80 << 30)


class Fast(KernelScheme):
    label = "fast"

    def capability(self, device: DeviceInfo, dtype: torch.dtype) -> Capability:
        return Capability.native() if device.type == "cuda" else Capability.refused("GPUs only")

    def resident_bytes(self, spec: LinearSpec, device: DeviceInfo, dtype: torch.dtype) -> int:
        return 7

    def bind(
        self, shards: Sequence[LinearShard], device: torch.device, info: DeviceInfo, dtype: torch.dtype
    ) -> LinearOp:
        raise NotImplementedError


class Faster(Fast):
    label = "faster"


class FastKernels(WeightKernels):
    name, contract = "fast", 1

    def scheme(self, base: LinearScheme, spec: LinearSpec) -> KernelScheme | None:
        return Fast(base) if base.format.startswith("awq") else None


class FasterKernels(FastKernels):
    """For the MLP alone."""

    name, priority = "faster", 5

    def scheme(self, base: LinearScheme, spec: LinearSpec) -> KernelScheme | None:
        return Faster(base) if base.format.startswith("awq") and "mlp" in spec.name else None


def record(name: str, error: str | None = None) -> PluginRecord:
    return PluginRecord("kernels", "awq", f"dist-{name}", "2.0", "m:C", error=error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_awq(tmp_path_factory.mktemp("awq") / "model", num_hidden_layers=1)[0]


def chosen(folder: Path, info: DeviceInfo, found: Found) -> tuple[dict[str, LinearScheme], list[str], list[str], int]:
    """Schemes by name, notes, warnings and the planned bytes of quantised linears."""
    model, _, _ = plan_folder(folder, dtype=torch.float16, info=info)
    schemes: dict[str, LinearScheme] = {}
    notes, warnings = prefer_kernels(
        model.leaves, schemes, ["awq"], info, torch.float16, lambda name: found if name == "awq" else ([], [])
    )
    linears = [leaf for leaf in model.leaves if isinstance(leaf, Linear)]
    by_name = {spec.name: s for leaf in linears for spec, s in zip(leaf.specs, leaf.schemes, strict=True)}
    assert schemes == {name: s for name, s in by_name.items() if isinstance(s, KernelScheme)}
    return by_name, notes, warnings, sum(sum(leaf.resident_bytes(info).values()) for leaf in linears)


def test_the_greatest_priority_runs_first_and_the_rest_goes_down(folder: Path) -> None:
    both = [(record("faster"), FasterKernels), (record("fast"), FastKernels)]
    schemes, notes, warnings, planned = chosen(folder, H100, (both, []))
    kinds = {name.split(".")[3] if "layers" in name else name: type(s).__name__ for name, s in schemes.items()}
    assert kinds == {"self_attn": "Fast", "mlp": "Faster", "lm_head": "DenseScheme"}
    assert notes == [
        "3 linears run on the kernels of faster (dist-faster 2.0)",
        "4 linears run on the kernels of fast (dist-fast 2.0)",
    ]
    assert warnings == []
    assert planned == 7 * 4 + 320 * 256 * 2  # q/k/v and gate/up are planned fused; the head is as it was


def test_a_refusal_is_said_and_changes_nothing(folder: Path) -> None:
    cpu = DeviceInfo("cpu")
    schemes, notes, _, _ = chosen(folder, cpu, ([(record("fast"), FastKernels)], []))
    assert not any(isinstance(s, KernelScheme) for s in schemes.values())
    assert notes == ["Kernels of fast (dist-fast 2.0) are not used: GPUs only"]


def test_kernels_that_do_not_load_are_warned_of(folder: Path) -> None:
    schemes, notes, warnings, _ = chosen(folder, H100, ([], [record("broken", "ImportError: gone")]))
    assert not any(isinstance(s, KernelScheme) for s in schemes.values())
    assert notes == []
    assert warnings == ["kernels of dist-broken 2.0 for awq are not used: they do not load: ImportError: gone"]


class FailingKernels(FastKernels):
    """Raises for the MLP, after it has taken attention."""

    def scheme(self, base: LinearScheme, spec: LinearSpec) -> KernelScheme | None:
        if "mlp" in spec.name:
            raise KeyError("tables")
        return super().scheme(base, spec)


def test_kernels_that_raise_are_asked_no_more(folder: Path) -> None:
    pair = [(record("failing"), FailingKernels), (record("fast"), FastKernels)]
    schemes, notes, warnings, _ = chosen(folder, H100, (pair, []))
    assert sum(isinstance(s, KernelScheme) for s in schemes.values()) == 7
    assert notes[1] == "3 linears run on the kernels of fast (dist-fast 2.0)"
    assert warnings == ["kernels of fast (dist-failing 2.0) for awq fail and are asked no more: KeyError: 'tables'"]
