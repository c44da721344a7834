"""Versions, processors and memory of this machine."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field

import psutil
import torch

from qengine import __version__
from qengine.plugin.discovery import installed_version
from qengine.runtime import device as devices
from qengine.runtime.gpus import known_gpu

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "matplotlib")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")


@dataclass
class GpuState:
    """One GPU as it is now. `known` is its name in the catalogue of `qengine plan`; `link` as nvidia-smi says."""

    name: str
    sm: int
    total: int
    free: int
    shared_memory: int
    usable: bool
    known: str | None
    link: str = ""
    neighbours: list[str] = field(default_factory=list)


@dataclass
class Environment:
    """`driver` is None where nvidia-smi can't be asked; `torch_cuda` the CUDA that torch was built for, None for a CPU
    build. Memory in bytes."""

    qengine: str
    python: str
    system: str
    packages: dict[str, str | None]
    driver: str | None
    torch_cuda: str | None
    cpu: str
    cpu_features: list[str]
    cores: int
    threads: int
    memory_total: int
    memory_free: int
    memory_neighbours: list[str]
    gpus: list[GpuState]


def look_around() -> Environment:
    cpu = devices.cpu_info()
    memory = devices.memory(torch.device("cpu"))
    return Environment(
        qengine=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        packages={name: installed_version(name) for name in PACKAGES},
        driver=next(iter(ask_driver("driver_version")), None),
        torch_cuda=torch.version.cuda,
        cpu=_cpu_name() or cpu.name,
        cpu_features=[f for f in CPU_FEATURES if f in cpu.features],
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_total=memory.total,
        memory_free=memory.free,
        memory_neighbours=devices.neighbours(torch.device("cpu")),
        gpus=[_gpu(i) for i in range(devices.cuda_count())],
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    except OSError:
        return ""


def ask_driver(fields: str) -> list[str]:
    """One line for each GPU, as nvidia-smi says; none where it can't be asked."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in out.splitlines() if line.strip()]


def _gpu(index: int) -> GpuState:
    device, info = torch.device("cuda", index), devices.cuda_info(index)
    memory, known = devices.memory(device), known_gpu(info)
    links = ask_driver("pcie.link.gen.max,pcie.link.width.max")
    return GpuState(
        info.name,
        info.sm,
        memory.total,
        memory.free,
        info.shared_memory,
        info.sm >= devices.MIN_SM,
        None if known is None else known.model,
        "PCIe {} x{}".format(*links[index].split(", ")) if index < len(links) and ", " in links[index] else "",
        devices.neighbours(device),
    )
