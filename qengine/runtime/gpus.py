"""GPUs that can be planned for without having one: what decides which kernels run and how much fits.

Memory is what CUDA reports on such a card, rounded down; bandwidths are the makers' for memory, and what copies from
pinned host memory reach over the card's PCIe generation in one direction for the link (about 80 % of its rate).
"""

from __future__ import annotations

from dataclasses import dataclass

from qengine.errors import ConfigError
from qengine.plugin import DeviceInfo
from qengine.runtime.device import MIN_SM
from qengine_kernels.launch import SHARED_MEMORY

GIB = 1 << 30
LINKS = {3: 12.0, 4: 25.0, 5: 50.0}
"""GB/s by PCIe generation, 16 lanes."""
CONTEXT = 400 << 20
"""What the driver keeps on a GPU for one process that has done nothing yet, at most."""


@dataclass(frozen=True)
class Gpu:
    """`model` as in the name that CUDA reports, `memory` in GiB, `bandwidth` of it in GB/s; `lanes` of 16 where the
    card has fewer."""

    model: str
    sm: int
    memory: float
    bandwidth: float
    pcie: int
    lanes: int = 16

    @property
    def info(self) -> DeviceInfo:
        return DeviceInfo("cuda", self.model, divmod(self.sm, 10), SHARED_MEMORY[self.sm] << 10, self.total)

    @property
    def total(self) -> int:
        return int(self.memory * GIB)

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second."""
        return self.bandwidth * 1e9

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second from pinned host memory."""
        return LINKS[self.pcie] * 1e9 * self.lanes / 16


GPUS = {
    "t4": Gpu("T4", 75, 14.5, 320, 3),
    "2060": Gpu("RTX 2060", 75, 5.7, 336, 3),
    "2070": Gpu("RTX 2070", 75, 7.7, 448, 3),
    "2080": Gpu("RTX 2080", 75, 7.7, 448, 3),
    "2080ti": Gpu("RTX 2080 Ti", 75, 10.7, 616, 3),
    "a10": Gpu("A10", 86, 22.0, 600, 4),
    "a10g": Gpu("A10G", 86, 22.0, 600, 4),
    "a30": Gpu("A30", 80, 23.5, 933, 4),
    "a40": Gpu("A40", 86, 44.4, 696, 4),
    "a6000": Gpu("RTX A6000", 86, 47.4, 768, 4),
    "a100-40": Gpu("A100", 80, 39.3, 1555, 4),
    "a100-80": Gpu("A100", 80, 79.1, 2039, 4),
    "3050": Gpu("RTX 3050", 86, 7.7, 224, 4, lanes=8),
    "3060": Gpu("RTX 3060", 86, 11.6, 360, 4),
    "3060ti": Gpu("RTX 3060 Ti", 86, 7.7, 448, 4),
    "3070": Gpu("RTX 3070", 86, 7.7, 448, 4),
    "3070ti": Gpu("RTX 3070 Ti", 86, 7.7, 608, 4),
    "3080": Gpu("RTX 3080", 86, 9.7, 760, 4),
    "3090": Gpu("RTX 3090", 86, 23.6, 936, 4),
    "4060": Gpu("RTX 4060", 89, 7.6, 272, 4, lanes=8),
    "4060ti": Gpu("RTX 4060 Ti", 89, 15.6, 288, 4, lanes=8),
    "4070": Gpu("RTX 4070", 89, 11.6, 504, 4),
    "4080": Gpu("RTX 4080", 89, 15.6, 717, 4),
    "4090": Gpu("RTX 4090", 89, 23.5, 1008, 4),
    "5070": Gpu("RTX 5070", 120, 11.6, 672, 5),
    "5080": Gpu("RTX 5080", 120, 15.5, 960, 5),
    "5090": Gpu("RTX 5090", 120, 31.3, 1792, 5),
    "l4": Gpu("L4", 89, 22.0, 300, 4),
    "l40s": Gpu("L40S", 89, 44.3, 864, 4),
    "h100": Gpu("H100", 90, 79.1, 3352, 5),
    "h200": Gpu("H200", 90, 139.7, 4800, 5),
    "b200": Gpu("B200", 100, 178.3, 8000, 5),
}
"""By the name that --gpu takes."""


TOO_OLD = {"k80": 37, "m40": 52, "p4": 61, "p40": 61, "p100": 60, "1080": 61, "1080ti": 61, "v100": 70, "titanv": 70}
"""Well-known GPUs that are refused, and their sm."""


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError with the names there are, or for a GPU that is too old."""
    found = GPUS.get(name.lower())
    if old := TOO_OLD.get(name.lower()):
        raise ConfigError(f"--gpu {name} is too old", have=f"sm_{old}", need=f"sm_{MIN_SM} or newer")
    if found is None:
        raise ConfigError(f"--gpu {name}: not known", need=" | ".join(["auto", *GPUS]))
    return found


def known_gpu(info: DeviceInfo) -> Gpu | None:
    """The entry for a GPU that is here, told by name and memory; the longest name counts (an A10G is no A10)."""
    name = _bare(info.name)
    found = [
        gpu
        for gpu in GPUS.values()
        if gpu.sm == info.sm and _bare(gpu.model) in name and abs(gpu.total - info.total_memory) < 0.1 * gpu.total
    ]
    return max(found, key=lambda gpu: len(gpu.model), default=None)


def _bare(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")
