"""A decode step's small operations on a CPU, fused: norm with residual, gated activation, and attention with rotation
and cache write.

A step of one sequence is a thousand torch operations of some microseconds each, most of it calls: a layer's weights
have driven code out of the cache meanwhile. These kernels, compiled by numba, make a call of what was a dozen. They
are for few rows and run on one thread; torch operations stay for larger steps, other dtypes, and where numba is
missing. Nothing is compiled or imported until `prepare` is called.
"""

from qengine_kernels.cpu_fused.decode import FusedDecode
from qengine_kernels.cpu_fused.rows import KINDS, gated_activation, rms_norm, takes
from qengine_kernels.cpu_fused.state import loaded, most_rows, prepare

__all__ = ["KINDS", "FusedDecode", "gated_activation", "loaded", "most_rows", "prepare", "rms_norm", "takes"]
