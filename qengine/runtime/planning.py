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
from qengine.runtime.kv_sidecar import check_place
from qengine.runtime.machine import Machine
from qengine.runtime.pickled import made_before, pickled_files, pickles_count
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import DENSE
from qengine.runtime.weight_files import PICKLED, SAFETENSORS

CONFIG_ONLY = "there are no safetensors headers: tensors are those that config.json describes"
PICKLED_ONLY = (
    "pickled weights are not opened: tensors are those that config.json describes; serving makes a safetensors copy of "
    "them first"
)
KV_SCALES = "--kv-scales are not opened: whether they were measured with this model, only its weights tell"


def look_at_model(config: EngineConfig, machine: Machine) -> tuple[Surveyed, list[str]]:
    """Everything about the folder `config.model` but the division of memory, and notes on what it was read from.

    Raises what serving would raise, and ConfigError for a quantised copy that can't be made.
    """
    folder, notes = _folder_with_headers(Path(config.model or ""), config.load_format)
    described = folder is None
    if config.kv_scales is not None:
        check_place(config.kv_scales)
    checkpoint = Checkpoint.config_only(config.model or "") if folder is None else HeaderCheckpoint.open(folder)
    method = config.quantization
    stays = method in (None, DENSE) or config.load_format == "dummy" or not checkpoint.is_dense()
    stays = stays or load_plugin("weight", str(method)).quantizes_at_load
    if config.kv_scales is not None and (described or not stays):
        notes.append(KV_SCALES)
    if stays:
        return look_at(config, checkpoint, machine, described), notes
    notes.append(f"serving makes a copy with {method} weights first")
    return _copy(config, checkpoint, machine, str(method)), notes


def _folder_with_headers(folder: Path, load_format: str) -> tuple[Path | None, list[str]]:
    """Where the headers of what serving would load are, None where config.json has to describe it; and notes."""
    if load_format == "dummy":
        return None, []
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if not SAFETENSORS.names(names) and not PICKLED.names(names):
        return None, [CONFIG_ONLY]
    if not pickles_count(folder, load_format):
        return folder, []
    pickled_files(folder)
    copy = made_before(folder)
    return copy, [PICKLED_ONLY if copy is None else f"headers are those of the safetensors copy made before: {copy}"]


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
