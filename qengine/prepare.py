"""From what the user named to a folder the engine can load: the demo model, a hub download, a 4-bit copy.

Shared by `qengine serve` and `LLM(...)`. Says what it does through `say`; fetches nothing that was not asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from qengine.config import EngineConfig

Say = Callable[[str], None]


def prepare_model(config: EngineConfig, say: Say) -> EngineConfig:
    """Return the config with `model` (and `tokenizer`) set to local folders.

    Without a model, the demo model is fetched and converted once. Pickled weights get a safetensors copy in the user's
    cache, made once. A 16-bit checkpoint with a `quantization` whose
    plugin can make its format gets a quantised copy in the user's cache, made once; one whose plugin converts while it
    loads stays as it is. Such a copy, and the demo model, also get KV scales there when the KV dtype takes some.
    """
    from qengine.plugin.discovery import load_plugin
    from qengine.runtime.demo import demo_folder, is_demo
    from qengine.runtime.hub import resolve_folder, resolve_tokenizer
    from qengine.runtime.kv_dtypes import asked_kv_dtypes
    from qengine.runtime.pickled import with_safetensors

    # First, so that a name that cannot work costs no download.
    if config.quantization is not None:
        load_plugin("weight", config.quantization)
    asked_kv_dtypes(config.kv_cache_dtype, config.kv_cache_dtype_skip_layers)
    tokenizer = resolve_tokenizer(config.tokenizer) if config.tokenizer else None
    if config.model is None:
        folder = demo_folder(say)
    else:
        pickled = config.load_format in ("pt", "npcache")
        folder = resolve_folder(config.model, revision=config.revision, pickled=pickled, say=say)
    tokenizer = tokenizer or folder
    if config.load_format != "dummy":
        folder = with_safetensors(folder, config.load_format, say)
        stored, folder = folder, _quantised_copy(folder, config, say)
        if is_demo(folder) and folder == stored and config.kv_scales is None:
            from qengine_calibration.prepared import prepared_kv_scales

            prepared_kv_scales(folder, config.kv_cache_dtype, say)
    return dataclasses.replace(config, model=str(folder), tokenizer=str(tokenizer), revision=None)


def _quantised_copy(folder: Path, config: EngineConfig, say: Say) -> Path:
    from qengine.plugin.discovery import load_plugin
    from qengine.runtime.checkpoint import Checkpoint

    method = config.quantization
    if method is None or load_plugin("weight", method).quantizes_at_load:
        return folder
    if not Checkpoint.open(folder).is_dense():
        return folder
    from qengine_calibration.prepared import prepared_copy

    return prepared_copy(folder, method, say, config.kv_cache_dtype if config.kv_scales is None else "auto")
