"""Tests against packages whose requirements do not go with qengine's. Each file is collected where its package is
installed; `.ci/ecosystem` makes such places. They say nothing about a machine without."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from checkpoint_logits import checkpoint_root

PACKAGES = ("gptqmodel", "llmcompressor", "optimum")
collect_ignore_glob = [f"test_{package}.py" for package in PACKAGES if find_spec(package) is None]


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of checkpoints that real tools wrote."""
    root = checkpoint_root()
    assert root is not None
    return root
