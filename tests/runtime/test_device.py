"""Choosing a device comes before all computing, so what must come first happens there."""

from __future__ import annotations

import pytest
import torch

from qengine.runtime import device as devices


def test_the_first_vector_mathematics_is_one_number_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race between two threads' first calls, which can't be brought about at will, so the order is what is tested."""
    asked = []
    monkeypatch.setattr(torch, "cos", lambda x: asked.append(x.numel()))
    monkeypatch.setattr(devices, "cpu_info", lambda: asked.append("device"))
    devices.settle_vector_math.cache_clear()
    for _ in range(2):
        devices.select_device("cpu")
    assert asked == [1, "device", "device"]
