"""What `qengine plan` looks at: a folder's headers, a config.json alone, or the copy that serving would make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qengine.config import EngineConfig
from qengine.errors import ConfigError
from qengine.plugin.discovery import load_plugin
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.decide import Surveyed, look_at
from qengine.runtime.header_checkpoint import HeaderCheckpoint
from qengine.runtime.machine import Machine
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import DENSE
from qengine.runtime.weight_files import SAFETENSORS

CONFIG_ONLY = "there are no safetensors headers: tensors are those that config.json describes"


def look_at_model(config: EngineConfig, machine: Machine) -> tuple[Surveyed, list[str]]:
    """Everything about the folder `config.model` but the division of memory, and notes on what it was read from.

    Raises what serving would raise, and ConfigError for a quantised copy that can't be made.
    """
    folder = Path(config.model or "")
    described = config.load_format == "dummy" or not _has_headers(folder)
    checkpoint = Checkpoint.config_only(folder) if described else HeaderCheckpoint.open(folder)
    notes = [CONFIG_ONLY] if described and config.load_format != "dummy" else []
    method = config.quantization
    if method in (None, DENSE) or not checkpoint.is_dense() or load_plugin("weight", str(method)).quantizes_at_load:
        return look_at(config, checkpoint, machine, described), notes
    notes.append(f"serving makes a copy with {method} weights first")
    return _copy(config, checkpoint, machine, str(method)), notes


def _has_headers(folder: Path) -> bool:
    return folder.is_dir() and bool(SAFETENSORS.names(p.name for p in folder.iterdir()))


def _copy(config: EngineConfig, checkpoint: Checkpoint, machine: Machine, method: str) -> Surveyed:
    """A 16-bit checkpoint as its quantised copy would be."""
    quantizer = load_plugin("weight", method).quantizer()
    if quantizer is None:
        raise ConfigError(f"{method} weights cannot be made from this 16-bit checkpoint")
    plain = look_at(dataclasses.replace(config, quantization=None), checkpoint, machine, described=True)
    specs = [spec for leaf in plain.model.linears() for spec in leaf.specs]
    skipped = [spec.name for spec in specs if quantizer.accepts(spec) is not None]
    settings = quantizer.config(skipped)
    checkpoint = dataclasses.replace(
        checkpoint, quant=QuantConfig(settings.get("quant_method", method), settings, "the copy's config")
    )
    return look_at(dataclasses.replace(config, quantization=None), checkpoint, machine, described=True)
