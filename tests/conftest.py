"""Settings that every test shares: one torch thread, no network, GPU tests only where there is a GPU."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# numpy's matmuls (Triton's interpreter lives on small ones) are twice as slow with threads that wait for a busy core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import quick_interpreter  # behind the variable, which Triton reads when it is imported

    quick_interpreter.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests marked gpu are deselected (not skipped: they say nothing about this machine)."""
    if torch.cuda.is_available():
        return
    gone = [item for item in items if item.get_closest_marker("gpu")]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
