"""Kernels in CUDA C++, for what Triton has no words for: clusters, and which registers a running product reads. NVRTC
compiles them, which torch's CUDA build brings along as it does cuda-bindings; Triton's cache folder keeps them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from qengine_kernels.compile_watch import made_ready

CopyMap = ctypes.Array[ctypes.c_char]
"""A CUtensorMap, 128 bytes: what the copy engine needs to know of a matrix."""


@dataclass(frozen=True)
class Source:
    """One kernel of a CUDA C++ file.

    name       of the kernel, extern "C"
    text       the file, which includes nothing
    constants  numbers that are defined before it
    arch       as NVRTC names it, "sm_90a"
    """

    name: str
    text: str
    constants: tuple[tuple[str, int], ...]
    arch: str


def compile_cubin(source: Source) -> bytes:
    """Machine code, for which no GPU is needed. Raises RuntimeError with the compiler's words."""
    nvrtc = _bindings().nvrtc
    text = "".join(f"#define {name} {value}\n" for name, value in source.constants) + source.text
    _, program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), f"{source.name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={source.arch}".encode(), b"--std=c++17"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source.name} {dict(source.constants)}: {result.name}\n{log.decode()}")
    _, size = _checked(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * size
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def cached_cubin(source: Source) -> bytes:
    """`compile_cubin`, once on a machine for a source and a compiler."""
    from triton.runtime.cache import get_cache_manager

    _, *version = _checked(_bindings().nvrtc.nvrtcVersion())
    kept = get_cache_manager(hashlib.sha256(repr((version, source)).encode()).hexdigest())
    name = f"{source.name}.cubin"
    if path := kept.get_file(name):
        with open(path, "rb") as file:
            return file.read()
    cubin = compile_cubin(source)
    kept.put(cubin, name, binary=True)
    return cubin


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel; `threads` and bytes of shared memory of a block."""

    function: Any
    threads: int
    shared_bytes: int

    def launch(self, blocks: int, args: Sequence[Any], early: bool) -> None:
        """On the current stream; args are ctypes values. `early`: it may start before the kernel before it has ended,
        for which it waits inside (see `overlap.py`)."""
        driver = _bindings().driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        places = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        _checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(places), 0))


def load(source: Source, device: int, threads: int, shared_bytes: int) -> Kernel:
    """The kernel, ready on a device, which has to be the current one."""
    if torch.cuda.current_device() != device:
        raise RuntimeError(
            f"{source.name} is asked for on GPU {device} while GPU {torch.cuda.current_device()} is current"
        )
    driver = _bindings().driver
    cubin = cached_cubin(source)
    _, module = _checked(driver.cuModuleLoadData(cubin))
    _, function = _checked(driver.cuModuleGetFunction(module, source.name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared_bytes))
    made_ready(source.name)
    return Kernel(function, threads, shared_bytes)


@functools.lru_cache(maxsize=4096)
def copy_map(
    address: int, dtype: torch.dtype, size: tuple[int, int], stride: int, box: tuple[int, int], swizzled: bool
) -> CopyMap:
    """What the copy engine needs to copy boxes of [rows, columns] of a matrix [rows, columns], `stride` elements from
    one row to the next, zeros beyond its end. `swizzled`: lines of 128 bytes as matrix units take them. Rows begin at
    multiples of 16 bytes."""
    driver = _bindings().driver
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.int64: kinds.CU_TENSOR_MAP_DATA_TYPE_INT64,
    }[dtype]
    lines = driver.CUtensorMapSwizzle
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    _, made = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [u64(size[1]), u64(size[0])],
            [u64(stride * dtype.itemsize)],
            [u32(box[1]), u32(box[0])],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            lines.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else lines.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


@functools.cache
def _bindings() -> SimpleNamespace:
    try:
        return SimpleNamespace(**{name: import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc")})
    except ImportError as e:
        raise RuntimeError(
            f"kernels for sm_90 need cuda-bindings 13, which torch's CUDA build brings along: {e}; "
            "have pip install it: pip install 'cuda-bindings>=13,<14'"
        ) from e


def _checked(results: tuple[Any, ...]) -> tuple[Any, ...]:
    if results[0]:
        raise RuntimeError(f"CUDA: {results[0]!r}")
    return results
