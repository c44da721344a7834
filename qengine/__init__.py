"""qengine: a quantisation-first, memory-efficient LLM inference engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qengine.beam_search import BeamSearchParams
    from qengine.config import EngineConfig
    from qengine.llm import LLM
    from qengine.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "BeamSearchParams", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "qengine.llm",
    "BeamSearchParams": "qengine.beam_search",
    "EngineConfig": "qengine.config",
    "SamplingParams": "qengine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the heavy names on first use, so that `import qengine` stays cheap."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qengine' has no attribute {name!r}")
