"""What `--swap-space` asks for, and what is refused about it. Before anything is read."""

from __future__ import annotations

from qengine.config import EngineConfig
from qengine.core.memory import format_bytes
from qengine.errors import ConfigError

GIB = 1 << 30


def swap_bytes(config: EngineConfig, on_gpu: bool, block_bytes: int, host_free: int | None) -> int:
    """Host bytes that `--swap-space` asks for. Raises ConfigError where there is no use or no room for it; `host_free`
    is what may be taken, None: not known."""
    asked = int(config.swap_space * GIB)
    if not config.swap_space:
        return 0
    if not on_gpu:
        raise ConfigError(
            "--swap-space moves KV blocks from a GPU to host memory, where --device cpu has them anyway",
            have="--device cpu",
            need="a GPU",
            hint="a larger --kv-cache-memory-bytes holds more there",
        )
    if asked < block_bytes:
        raise ConfigError(
            "--swap-space does not hold one KV block",
            have=f"{format_bytes(asked)}",
            need=f"{format_bytes(block_bytes)}",
            hint=f"--swap-space {_rounded_up(block_bytes)}, or 0",
        )
    if host_free is not None and asked > host_free:
        fits = host_free // GIB
        raise ConfigError(
            "--swap-space is more than host memory has free",
            have=f"{format_bytes(host_free)} that may be taken",
            need=f"{format_bytes(asked)}, pinned",
            hint=f"--swap-space {fits}" if fits else "--swap-space 0",
        )
    return asked


def _rounded_up(nbytes: int) -> float:
    """The fewest hundredths of a GiB that hold so many bytes."""
    return -(-nbytes * 100 // GIB) / 100
