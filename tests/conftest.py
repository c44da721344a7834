"""Settings that every test shares: one torch thread, no network, GPU tests only where there is a GPU."""

import os
import random
import signal
import zlib

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# numpy's matmuls (Triton's interpreter lives on small ones) are twice as slow with threads that wait for a busy core.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import quick_interpreter  # behind the variable, which Triton reads when it is imported

    quick_interpreter.install()


# A machine that stands still for a moment is no failure, a hang is. Examples don't come from earlier runs, but they do
# depend on which modules are imported: a test may not count on any that its strategy does not make by construction.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=30_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
settings.load_profile("suite")


# Under nohup and in the background of a script Ctrl-C is ignored, here and in every process that a test starts; tests
# that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-seed", type=int, default=0, help="other random numbers for every test (default 0)")


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: {config.getoption('random_seed')}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same numbers alone, in any order and on any worker; before its fixtures, which draw too."""
    seed = zlib.crc32(item.nodeid.encode()) ^ (item.config.getoption("random_seed") & 0xFFFFFFFF)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests marked gpu are deselected (not skipped: they say nothing about this machine)."""
    if torch.cuda.is_available():
        return
    gone = [item for item in items if item.get_closest_marker("gpu")]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]
