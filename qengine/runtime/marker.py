"""Points in a device's work that the host can wait for."""

from __future__ import annotations

import torch


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What the device was given so far; None on a CPU, where everything is done at once."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def wait(marker: torch.cuda.Event | None) -> None:
    if marker is not None:
        marker.synchronize()
