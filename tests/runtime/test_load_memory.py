"""Loading a model of some tens of megabytes takes no more host memory than the file's bytes and one module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toy_models import make_tiny, make_tiny_awq

SIZES = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 4096,
}  # fmt: skip
MODULE = 2 * 2048 * 1024 * 4
"""Gate and up, which run as one, as float32: what a module may pass through while it is repacked."""
SLACK = 8 << 20

MEASURE = """
import ctypes, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import qengine_awq.backend, qengine_dense.backend
from load_model import plan_folder
from qengine.layers.linear import Linear
from qengine.runtime.loader import load, resolve
from qengine_kernels.cpu_linear.measure import CpuTuning

# What this machine finds fastest would decide the bytes kept: here it is 16-bit weights and int4 without a copy.
qengine_awq.backend.tuning = qengine_dense.backend.tuning = lambda: CpuTuning("plain", 8)
torch.set_num_threads(1)
model, plan, checkpoint = plan_folder(Path(sys.argv[1]), dtype=torch.bfloat16)
for leaf in model.linears():
    leaf.compact()
if sys.argv[3] == "all at once":
    held = {name: checkpoint.read(name) for name in checkpoint.tensors}
    checkpoint.read = lambda name: held[name].clone()
ctypes.CDLL(None).malloc_trim(0)
status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024
before = status("VmRSS:") - sum(t.nbytes for t in held.values()) if sys.argv[3] == "all at once" else status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
load(plan)
kept = sum(t.nbytes for leaf in model.leaves for t in leaf.buffers().values())
print(status("VmHWM:") - before, checkpoint.nbytes, kept)
"""


def measured(folder: Path, how: str) -> tuple[int, int, int]:
    """(peak above what the process had before, bytes in the file, bytes kept)."""
    support = str(Path(__file__).parents[1] / "support")
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), support, how], capture_output=True, text=True, check=True
    )
    peak, stored, kept = map(int, out.stdout.split())
    return peak, stored, kept


@pytest.mark.parametrize("kind", ["16-bit", "awq"])
def test_peak_is_the_file_and_one_module(kind: str, tmp_path: Path) -> None:
    if kind == "awq":
        make_tiny_awq(tmp_path, group=128, tokenizer=False, **SIZES)
    else:
        make_tiny(tmp_path, dtype="bfloat16", tokenizer=False, **SIZES)
    peak, stored, kept = measured(tmp_path, "as it is")
    assert 30e6 < stored < 120e6 and 0.9 * stored < kept < 1.1 * stored
    assert 0.9 * kept < peak < stored + MODULE + SLACK
    # Control: the file's tensors held all at once beside what is made of them.
    assert measured(tmp_path, "all at once")[0] > stored + MODULE + SLACK
