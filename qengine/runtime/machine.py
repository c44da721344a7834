"""What a plan is made for: this machine, or a GPU that isn't here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qengine.errors import ConfigError
from qengine.plugin import DeviceInfo
from qengine.runtime import device as devices
from qengine.runtime.gpus import CONTEXT, find_gpu, known_gpu

AUTO = "auto"


@dataclass(frozen=True)
class Machine:
    """`device` is where tensors would go: the CPU stands in for a GPU that isn't here, `info` is still the GPU's.

    `bandwidths` of memory and from the host, bytes a second, None where they are not known; `host_free` is what a GPU's
    host has free, likewise.
    """

    device: torch.device
    info: DeviceInfo
    memory: devices.DeviceMemory
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    neighbours: Callable[[], Sequence[str]] = tuple
    here: bool = True
    host_free: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.info.type == "cuda"


def this_machine(device_name: str) -> Machine:
    """`device_name` is --device. Raises ConfigError or CapabilityError when there is no such device."""
    device, info = devices.select_device(device_name)
    known = known_gpu(info) if info.type == "cuda" else None
    return Machine(
        device,
        info,
        devices.memory(device),
        known.memory_bandwidth if known else None,
        known.link_bandwidth if known else None,
        lambda: devices.neighbours(device),
        host_free=devices.memory(torch.device("cpu")).free if info.type == "cuda" else None,
    )


def catalogue_machine(name: str) -> Machine:
    """A GPU of the catalogue with nobody else on it. Raises ConfigError for an unknown name."""
    gpu = find_gpu(name)
    memory = devices.DeviceMemory(gpu.total, gpu.total - CONTEXT)
    return Machine(
        torch.device("cpu"), gpu.info, memory, gpu.memory_bandwidth, gpu.link_bandwidth, here=False
    )


def machine_for(gpu: str | None, device_name: str) -> Machine:
    """`gpu` is --gpu; auto, or nothing, is this machine. Raises ConfigError for a GPU where --device says cpu."""
    if gpu is None or gpu == AUTO:
        return this_machine(device_name)
    machine = catalogue_machine(gpu)
    if device_name == "cpu":
        raise ConfigError(
            f"--gpu {gpu} and --device cpu contradict each other", need="one of them",
            hint=f"--gpu {gpu} alone plans for that GPU, --device cpu alone for this machine's CPU",
        )  # fmt: skip
    return machine
