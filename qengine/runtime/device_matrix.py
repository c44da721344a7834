"""What weight formats and KV dtypes answer on every kind of device, asked with no such device present."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from qengine.errors import PluginError, UserError
from qengine.plugin import AttentionSpec, Capability, DeviceInfo, KVDtype, LinearScheme, Side
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime.device import choose_dtype, cpu_info
from qengine_kernels.launch import SHARED_MEMORY

SIDES: tuple[Side, Side] = ("k", "v")
GENERATIONS = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities x 10, one for each GPU generation with kernels of its own."""


@dataclass(frozen=True)
class Answer:
    """How something runs on one device: `kind` is native, emulated or refused; `dtype` the compute dtype there."""

    device: str
    dtype: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Target:
    """One device of the matrix with the compute dtype that a checkpoint would get there, or why it gets none."""

    name: str
    info: DeviceInfo
    dtype: torch.dtype | None
    problem: str = ""

    def ask(self, capability: Callable[[DeviceInfo, torch.dtype], Capability]) -> Answer:
        if self.dtype is None:
            return Answer(self.name, "", "refused", self.problem)
        try:
            found = capability(self.info, self.dtype)
        except Exception as e:  # one plugin's fault is its own answer, and no other's
            found = Capability.refused(f"it fails: {type(e).__name__}: {e}")
        return Answer(self.name, str(self.dtype).removeprefix("torch."), found.kind, found.reason)


def gpu(sm: int) -> DeviceInfo:
    return DeviceInfo("cuda", f"sm_{sm}", divmod(sm, 10), SHARED_MEMORY[sm] << 10, 1 << 40)


def targets(asked: str, stored: torch.dtype) -> list[Target]:
    """Every GPU generation and this machine's CPU. `asked` is --dtype, `stored` the checkpoint's own dtype."""
    out = []
    for name, info in [*((f"sm_{sm}", gpu(sm)) for sm in GENERATIONS), ("cpu", cpu_info())]:
        try:
            out.append(Target(name, info, choose_dtype(asked, stored, info)[0]))
        except UserError as e:
            out.append(Target(name, info, None, str(e)))
    return out


def scheme_answers(schemes: Iterable[LinearScheme], devices: list[Target]) -> dict[str, list[Answer]]:
    """By format, for each device."""
    first = {scheme.format: scheme for scheme in reversed(list(schemes))}
    return {name: [d.ask(scheme.capability) for d in devices] for name, scheme in sorted(first.items())}


def kv_plugins() -> list[tuple[str, type[KVDtype]]]:
    """Installed KV dtypes that load, each once, under its own name where it is registered under several."""
    found: dict[type[KVDtype], str] = {}
    for record in list_plugins("kv"):
        try:
            plugin = load_plugin("kv", record.name)
        except PluginError:
            continue  # `qengine plugins` shows broken ones
        if plugin not in found or record.name == plugin.name:
            found[plugin] = record.name
    return sorted(((name, plugin) for plugin, name in found.items()), key=lambda pair: pair[0])


def kv_answers(spec: AttentionSpec, devices: list[Target]) -> dict[str, list[Answer]]:
    """By KV dtype, for each device."""

    def asking(plugin: type[KVDtype]) -> Callable[[DeviceInfo, torch.dtype], Capability]:
        def answer(info: DeviceInfo, dtype: torch.dtype) -> Capability:
            k, v = (plugin(spec, side, dtype).capability(info) for side in SIDES)
            return v if k else k

        return answer

    return {name: [d.ask(asking(plugin)) for d in devices] for name, plugin in kv_plugins()}
