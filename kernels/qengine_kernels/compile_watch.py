"""Which kernels were made ready: each is compiled, or loaded from the disk cache, at its first launch with a new
specialisation. While requests are served that costs milliseconds to seconds, so somebody should hear of it.
"""

from __future__ import annotations

from typing import Any

_names: list[str] = []
_watching = False


def kernels_compiled() -> list[str]:
    """Names of the kernels made ready in this process since the first call, in order; one entry for each
    specialisation. Always empty where there is no Triton."""
    global _watching
    if not _watching:
        _watching = True
        _watch()
    return _names


def made_ready(name: str) -> None:
    """A kernel that Triton does not know of was compiled or loaded."""
    if _watching:
        _names.append(name)


def _watch() -> None:
    try:
        from triton import knobs
    except ImportError:
        return
    before = knobs.compilation.listener

    # Not the post-compile hook of the runtime: it writes every constexpr as JSON, which device functions are not.
    def listener(**about: Any) -> None:
        _names.append(str(getattr(about.get("src"), "name", None) or "a kernel"))
        if before is not None:
            before(**about)

    knobs.compilation.listener = listener
