"""Descriptions of a device and of what a plugin can do on it: pure data, usable with no GPU present."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CapabilityKind = Literal["native", "emulated", "refused"]


@dataclass(frozen=True)
class DeviceInfo:
    """One compute device.

    `capability` is CUDA's (major, minor), None on a CPU. `shared_memory` is the largest shared memory of one thread
    block in bytes (opt-in limit). `features` are lower-case CPU feature names such as "avx2", "avx512_bf16",
    "amx_bf16"; empty on CUDA.
    """

    type: Literal["cuda", "cpu"]
    name: str = ""
    capability: tuple[int, int] | None = None
    shared_memory: int = 0
    total_memory: int = 0
    features: frozenset[str] = frozenset()

    @property
    def sm(self) -> int:
        """Compute capability as one number (75, 80, 89, 90, ...); 0 on a CPU."""
        return 0 if self.capability is None else self.capability[0] * 10 + self.capability[1]


@dataclass(frozen=True)
class Capability:
    """What a plugin answers for one (device, dtype): native, emulated or refused, always with a reason."""

    kind: CapabilityKind
    reason: str = ""

    def __bool__(self) -> bool:
        return self.kind != "refused"

    @classmethod
    def native(cls, reason: str = "") -> Capability:
        """Runs as it was made to run."""
        return cls("native", reason)

    @classmethod
    def emulated(cls, reason: str) -> Capability:
        """Runs, in another way than it was made for: slower, or with more memory."""
        return cls("emulated", reason)

    @classmethod
    def refused(cls, reason: str) -> Capability:
        """Does not run; `reason` says what was found, what is needed and, where there is something, what would work."""
        return cls("refused", reason)
