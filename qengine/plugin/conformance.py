"""The conformance kit under the name that plugin authors import, and a pytest plugin.

    # tests/test_conformance.py
    from qengine.plugin.conformance import WeightConformance      # or KVConformance
    from my_package import MyQuant

    class TestMyFormat(WeightConformance):
        plugin = MyQuant

    $ pytest -p qengine.plugin.conformance            CPU code, and CUDA code in Triton's interpreter
    $ pytest -p qengine.plugin.conformance --gpu      on a real GPU, CUDA graphs too
    $ qengine plugins check my_format [--gpu]         the same for an installed plugin, with no test file

The checks themselves live in `qengine.conformance`, because they ask what the engine makes of a plugin; this module is
the one door from `qengine.plugin` to there, and nothing in qengine goes through it.
"""

from __future__ import annotations

from typing import Any

from qengine.conformance.kit import CheckFailed, NotApplicable, Outcome, run_checks
from qengine.conformance.kv_suite import KV_CHECKS, KVConformance
from qengine.conformance.places import use_interpreter
from qengine.conformance.suite import Suite
from qengine.conformance.weight_suite import WEIGHT_CHECKS, WeightConformance

__all__ = [
    "KV_CHECKS",
    "WEIGHT_CHECKS",
    "CheckFailed",
    "KVConformance",
    "NotApplicable",
    "Outcome",
    "WeightConformance",
    "run_checks",
]


def pytest_addoption(parser: Any) -> None:
    """Adds --gpu."""
    parser.addoption("--gpu", action="store_true", help="run qengine's conformance checks on a real GPU")


def pytest_configure(config: Any) -> None:
    """Chooses between GPU and interpreter before any test file imports a kernel."""
    Suite.gpu = bool(config.getoption("--gpu"))
    if not Suite.gpu:
        use_interpreter()
