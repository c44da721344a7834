"""Tests over checkpoints that real tools wrote; where there are none, nothing here is collected."""

from pathlib import Path

import pytest

from checkpoint_logits import checkpoint_root

ROOT = checkpoint_root()
collect_ignore_glob = [] if ROOT else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder that holds the checkpoints."""
    assert ROOT is not None
    return ROOT
