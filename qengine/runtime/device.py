"""The only module that asks about CUDA: which device, what it can do, how much memory is free and who holds it."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

import psutil
import torch

from qengine.errors import CapabilityError, ConfigError
from qengine.plugin import DeviceInfo

MIN_SM = 75
LARGE_PROCESS, MOST_NEIGHBOURS = 256 << 20, 3
"""On a CPU: processes that a refusal names."""
HALF_NAMES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device now."""

    total: int
    free: int


def select_device(name: str) -> tuple[torch.device, DeviceInfo]:
    """`auto` takes CUDA when a usable GPU is there. Raises ConfigError / CapabilityError naming what was found."""
    settle_vector_math()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu"), cpu_info()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device", hint="--device cpu, or a CUDA build of torch")
    info = cuda_info(0)
    if info.sm < MIN_SM:
        raise CapabilityError(
            f"{info.name} is too old", have=f"sm_{info.sm}", need=f"sm_{MIN_SM} or newer", hint="--device cpu"
        )
    return torch.device("cuda", 0), info


@lru_cache(maxsize=1)
def settle_vector_math() -> None:
    """Make the process's first call of MKL's vector mathematics here, on one thread, before anything depends on it.

    torch (2.13 with MKL 2024.2, AVX-512) computes cos, sin, exp and others by it. When two threads made the first call
    together, one of them now and then computed its share in the low accuracy mode: cosines of rotary angles were off by
    1.5e-4 in 4 of 24 processes on a quiet machine, and nothing was wrong in any later call (with this: in 0 of 30).
    """
    torch.cos(torch.zeros(1))


def cuda_count() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_info(index: int) -> DeviceInfo:
    p = torch.cuda.get_device_properties(index)
    shared = getattr(p, "shared_memory_per_block_optin", 0) or 48 * 1024
    return DeviceInfo("cuda", p.name, (p.major, p.minor), int(shared), int(p.total_memory))


def cpu_info() -> DeviceInfo:
    """The host CPU with the instruction sets that decide between kernels."""
    flags = frozenset(_cpu_flags())
    return DeviceInfo("cpu", platform.processor() or platform.machine(), None, 0, psutil.virtual_memory().total, flags)


def _cpu_flags() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith(("flags", "Features")):
                return line.split(":", 1)[1].split()
    return [str(torch.backends.cpu.get_cpu_capability()).lower()]


def memory(device: torch.device) -> DeviceMemory:
    """Total and free bytes; on a CPU, free is what the system says is available to new work."""
    if device.type == "cpu":
        vm = psutil.virtual_memory()
        limit = _cgroup_limit()
        total = min(vm.total, limit) if limit else vm.total
        return DeviceMemory(total, min(vm.available, total))
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


def _cgroup_limit() -> int | None:
    """Memory limit of this container in bytes, None when there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as f:
            value = int(f.read())
            return value if value < 1 << 60 else None
    return None


def neighbours(device: torch.device) -> list[str]:
    """Other processes that hold memory on the device, the largest first: "python (pid 4711) 3.25 GiB". On a CPU the few
    largest of all."""
    found = _gpu_processes(device) if device.type == "cuda" else _large_processes()
    found.sort(key=lambda row: -row[2])
    return [f"{name} (pid {pid}) {size / (1 << 30):.2f} GiB" for pid, name, size in found if pid != os.getpid()]


def _large_processes() -> list[tuple[int, str, int]]:
    found = []
    for process in psutil.process_iter(("pid", "name", "memory_info")):
        memory = process.info["memory_info"]
        if memory is not None and process.pid != os.getpid() and memory.rss >= LARGE_PROCESS:
            found.append((process.pid, str(process.info["name"]), int(memory.rss)))
    return sorted(found, key=lambda row: -row[2])[:MOST_NEIGHBOURS]


def _gpu_processes(device: torch.device) -> list[tuple[int, str, int]]:
    """As nvidia-smi tells; none where it can't be asked (then a report is still right, and only lacks names)."""
    fields = "gpu_uuid,pid,process_name,used_memory"
    query = ["nvidia-smi", f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    return [
        (int(pid), os.path.basename(name), int(mib) << 20)
        for gpu, pid, name, mib in (row for row in rows if len(row) == 4)
        if uuid in gpu and pid.isdigit() and mib.isdigit()
    ]


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a CUDA device; resident set size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def start_peak(device: torch.device) -> None:
    """Forget a CUDA device's peak so far; a process's own can't be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors on a CUDA device since `start_peak`; on a CPU the process's largest resident set."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_host_bytes()


def limit_memory(device: torch.device, most: int | None) -> None:
    """Make a CUDA device's allocator raise OutOfMemoryError beyond `most` bytes, None for no limit; does nothing on
    a CPU."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if most is None else min(1.0, most / total), device)


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def choose_dtype(name: str, stored: torch.dtype, info: DeviceInfo) -> tuple[torch.dtype, str]:
    """The compute dtype and the reason for it. `stored` is the checkpoint's own dtype."""
    bf16_gpu = info.type == "cuda" and info.sm >= 80
    if name != "auto":
        dtype = HALF_NAMES[name]
        if dtype is torch.bfloat16 and info.type == "cuda" and not bf16_gpu:
            raise CapabilityError(
                f"{info.name} has no bfloat16", have=f"sm_{info.sm}", need="sm_80 or newer", hint="--dtype half"
            )
        if dtype is torch.float16 and info.type == "cpu":
            raise CapabilityError("float16 is not run on a CPU", hint="--dtype bfloat16 or --dtype float32")
        return dtype, "asked for"
    if info.type == "cpu":
        if stored is torch.float32:
            return torch.float32, "the checkpoint's own"
        return torch.bfloat16, "16-bit checkpoint on a CPU; residual, norms and softmax in float32"
    if bf16_gpu and stored is not torch.float16:
        return torch.bfloat16, "the checkpoint's own" if stored is torch.bfloat16 else "16-bit copy of float32"
    return torch.float16, "the checkpoint's own" if stored is torch.float16 else f"sm_{info.sm} has no bfloat16"


def residual_dtype(dtype: torch.dtype, info: DeviceInfo) -> torch.dtype:
    """float32 where 16 bits would lose range (float16) or where it costs nothing (CPU)."""
    return torch.float32 if info.type == "cpu" or dtype is torch.float16 else dtype
