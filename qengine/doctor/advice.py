"""What is worth doing about what was found."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import Requirement

from qengine.core.memory import format_bytes
from qengine.doctor.bandwidth import Bandwidth
from qengine.doctor.environment import Environment, GpuState
from qengine.doctor.self_test import Result
from qengine.plugin.discovery import OWN_DISTRIBUTION, requirements_of
from qengine.runtime.device import MIN_SM
from qengine.runtime.gpus import GPUS

MOSTLY_FREE = 0.9
SLOW_LINK = 0.6
"""Share of what a card's PCIe generation reaches, below which something is wrong with slot or power."""
FEW_BYTES = 2 << 30


def advice(e: Environment, bandwidth: Bandwidth | None, results: list[Result]) -> list[str]:
    """Most serious first; empty when there is nothing to do."""
    return [*_failures(results), *_versions(e), *_drivers(e), *_gpus(e, bandwidth), *_host(e)]


def _failures(results: list[Result]) -> Iterator[str]:
    failed = [r for r in results if r.state == "failed"]
    if failed:
        names = "; ".join(r.what for r in failed[:5])
        yield (
            f"{len(failed)} kernel(s) compute wrongly here ({names}): don't serve with these formats on this machine, "
            "and report `qengine doctor --json`"
        )
    if any(r.state == "skipped" and "seconds were over" in r.line for r in results):
        yield "not every kernel was tested in the time allowed: run it again, compiled kernels are kept"


def _versions(e: Environment) -> Iterator[str]:
    """Installed packages against what this distribution asks for."""
    for requirement in map(Requirement, requirements_of(OWN_DISTRIBUTION)):
        name, marker = requirement.name, requirement.marker
        if name not in e.packages or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        have, install = e.packages[name], f"pip install '{name}{requirement.specifier}'"
        if have is None:
            yield f"{name} is not installed: {install}"
        elif not requirement.specifier.contains(have, prereleases=True):
            yield f"{name} {have} is not what was tested: {install}"


def _drivers(e: Environment) -> Iterator[str]:
    if e.driver is None or e.gpus:
        return
    if e.torch_cuda is None:
        yield f"there is a GPU (driver {e.driver}), but torch is a CPU build: install torch for CUDA"
    else:
        yield (
            f"there is a GPU (driver {e.driver}), but torch for CUDA {e.torch_cuda} cannot use it: update the driver, "
            "or look at CUDA_VISIBLE_DEVICES"
        )


def _gpus(e: Environment, bandwidth: Bandwidth | None) -> Iterator[str]:
    for i, gpu in enumerate(e.gpus):
        if not gpu.usable:
            yield f"GPU {i}, {gpu.name}, is sm_{gpu.sm}: sm_{MIN_SM} or newer is needed; --device cpu works"
            continue
        if gpu.free < MOSTLY_FREE * gpu.total:
            others = f" ({', '.join(gpu.neighbours)})" if gpu.neighbours else ""
            taken = format_bytes(gpu.total - gpu.free)
            yield f"GPU {i}: {taken} are taken by others{others}: serving plans with the rest"
        if gpu.sm < 80:
            yield (
                f"GPU {i}: sm_{gpu.sm} has no bfloat16, so models run in float16 with float32 where range needs it; "
                "4-bit weights (--quant awq) suit it best, and --kv-dtype fp8 doubles the context"
            )
        elif gpu.sm < 89:
            yield f"GPU {i}: sm_{gpu.sm} has no FP8 units: FP8 weights stay one byte and are decoded, which is slower"
    if e.gpus and bandwidth is not None:
        yield from _link(e.gpus[0], bandwidth)


def _link(gpu: GpuState, bandwidth: Bandwidth) -> Iterator[str]:
    known = next((g for g in GPUS.values() if g.model == gpu.known), None)
    measured = bandwidth.pinned_to_gpu
    if known is not None and measured is not None and measured < SLOW_LINK * known.link_bandwidth:
        yield (
            f"copies to the GPU reach {measured / 1e9:.1f} GB/s where {known.link_bandwidth / 1e9:.0f} are usual: "
            "fewer PCIe lanes, an older slot, or power saving; it matters when weights are offloaded"
        )


def _host(e: Environment) -> Iterator[str]:
    if e.memory_free < FEW_BYTES:
        others = f" ({', '.join(e.memory_neighbours)})" if e.memory_neighbours else ""
        yield f"only {format_bytes(e.memory_free)} of host memory are free{others}"
    if not e.gpus and not {"avx2", "asimd"} & set(e.cpu_features):
        yield "this CPU has neither AVX2 nor NEON: it works, slowly"
    if e.threads > e.cores:
        yield f"torch uses {e.threads} threads on {e.cores} cores: OMP_NUM_THREADS={e.cores} is usually faster"
