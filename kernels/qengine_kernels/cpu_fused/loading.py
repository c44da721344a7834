"""Compiles the kernels, or takes them from the disk cache; says whether they are there.

The only module that names numba's cache folder, and (with the modules it imports) the only one that imports numba:
about a second, which processes without an engine on a CPU never pay.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Kernel = Callable[..., None]
MODULES = ("scalar", "kernels", "attention")
HALF_TENSOR = "int64, boolean"
RMS_NORM = f"void({HALF_TENSOR}, int64, int64, int64, float32, {HALF_TENSOR}, int64, int64, int64)"
GATED = f"void({HALF_TENSOR}, int64, int64, int64, int64)"
DECODE = (
    f"void({HALF_TENSOR}, int64, {HALF_TENSOR}, int64, int64, int64, int64, int64, {HALF_TENSOR}, "
    "int64, int64, int64, int64, int64, int64, float32, float32)"
)


@dataclass(frozen=True)
class Kernels:
    """Compiled functions of `kernels` and `attention`; every tensor is an address."""

    rms_norm: Kernel
    gated: Kernel
    decode_attention: Kernel


@dataclass(frozen=True)
class Loaded:
    """`kernels` is None where there are none; `line` says so, and why, for a start-up report."""

    kernels: Kernels | None
    line: str


def compile_kernels(folder: Path | None) -> Loaded:
    """Make the kernels ready. `folder` keeps compiled code between processes, one folder inside it for each version of
    these sources; it is made where it is missing, and None, or one that can't be written, keeps nothing."""
    start = time.perf_counter()
    try:
        import numba
    except ImportError as e:
        return Loaded(None, f"Fused CPU kernels: none, small steps run as single torch operations (no numba: {e})")
    place = None if folder is None else _writable(folder / f"{_sources()}-{numba.__version__}")
    kept = place is not None and any(place.rglob("*.nbi"))
    with _cache_in(place):
        kernels = _compiled(numba.njit, place is not None)
    how = "from the cache" if kept else "compiled" if place is not None else "compiled; the cache can't be written"
    seconds = time.perf_counter() - start
    return Loaded(kernels, f"Fused CPU kernels: numba {numba.__version__}, ready in {seconds:.1f} seconds ({how})")


def _compiled(njit: Any, cache: bool) -> Kernels:
    from qengine_kernels.cpu_fused import attention, kernels

    def ready(signature: str, function: Any) -> Kernel:
        kernel: Kernel = njit(signature, cache=cache, error_model="numpy")(function)
        return kernel

    return Kernels(
        ready(RMS_NORM, kernels.rms_norm),
        ready(GATED, kernels.gated),
        ready(DECODE, attention.decode_attention),
    )


def _sources() -> str:
    """Names these sources: numba itself looks only at the file that a kernel is in, not at those it imports from."""
    digest = hashlib.sha256()
    for name in (*MODULES, "loading"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


@contextmanager
def _cache_in(folder: Path | None) -> Iterator[None]:
    """numba's cache folder inside: it is read where a function is decorated. As before afterwards, because other code
    of the process may use numba too."""
    if folder is None:
        yield
        return
    import numba

    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = os.fspath(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before
