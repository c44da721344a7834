"""8-bit floats, shared by every format that stores them: torch twins in `codes`, Triton functions in `device`."""

from qengine_kernels.fp8.codes import decode, encode

__all__ = ["decode", "encode"]
