"""Linear layers on a CPU: prepacked 16-bit, exact float32, and int4 for small batches beside a dense large-batch copy;
for output layers an int8 copy for a few rows.

Which 16-bit GEMM is fastest and up to which batch int4 and int8 win differ between CPUs, so `measure` measures them
once per process on representative shapes (about a tenth of a second).
"""

from qengine_kernels.cpu_linear.dense import DenseCpuLinear, Way, dense_bytes, kept_dtype
from qengine_kernels.cpu_linear.few_rows import FewRowsCpuLinear, few_rows_bytes, runs_few_rows
from qengine_kernels.cpu_linear.int4 import Int4CpuLinear, int4_bytes, int4_group, used_group
from qengine_kernels.cpu_linear.int8 import Int8CpuLinear, int8_bytes
from qengine_kernels.cpu_linear.measure import CpuTuning, tuning

__all__ = [
    "CpuTuning",
    "DenseCpuLinear",
    "FewRowsCpuLinear",
    "Int4CpuLinear",
    "Int8CpuLinear",
    "Way",
    "dense_bytes",
    "few_rows_bytes",
    "int4_bytes",
    "int4_group",
    "int8_bytes",
    "kept_dtype",
    "runs_few_rows",
    "tuning",
    "used_group",
]
