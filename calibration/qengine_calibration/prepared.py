"""The copies that serving makes by itself, in the user's cache: quantised weights, and KV scales beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qengine.errors import ConfigError, UserError
from qengine.models.registry import native_builder
from qengine.plugin import CalibratedQuantizer, LinearSpec, WeightQuant
from qengine.plugin.discovery import load_plugin
from qengine.runtime.cache_dir import ELSEWHERE, cache_root, only_one, short_name
from qengine.runtime.checkpoint import Checkpoint
from qengine.runtime.device import select_device
from qengine.runtime.kv_beside import choose_sidecar, is_measured_for, own_folder
from qengine.runtime.kv_dtypes import asked_kv_dtypes
from qengine.runtime.kv_sidecar import TENSORS
from qengine.runtime.model_config import load_config
from qengine.runtime.quant_select import DENSE
from qengine.text.tokenizer import Tokenizer
from qengine_calibration.kv_scales import KVOptions
from qengine_calibration.make import fitting_length, make_copy, make_kv_scales, takes_groups, weights_option
from qengine_calibration.progress import bar
from qengine_calibration.quantize import fingerprint, group_size, linear_specs, quantize_checkpoint
from qengine_calibration.run import RunOptions
from qengine_calibration.texts import Texts, load_texts

MOST_WEIGHTS_ON_CPU = 400_000_000
"""Models with more are not calibrated unasked on a CPU: it would take longer than one waits for a server."""

Say = Callable[[str], None]


def prepared_copy(folder: Path, method: str, say: Say = lambda line: None, kv_dtype: str = "auto") -> Path:
    """The quantised copy of a 16-bit checkpoint in the user's cache, made when it is not there yet.

    Where the format calibrates, the model is of a native family and not too large for this machine, the built-in texts
    are used; else the weights alone. The copy's name holds a fingerprint of the source: an edited source gets a new
    copy. With a `kv_dtype` that takes scales, calibrated copies get those, too. Raises ConfigError when `method`'s
    plugin cannot make its format or the model's shapes fit no group size.
    """
    if method == DENSE:
        return folder
    plugin = load_plugin("weight", method)
    if plugin.quantizer() is None:
        raise ConfigError(
            f"{folder} is a 16-bit checkpoint, and {method} weights cannot be made from it",
            hint=f"a checkpoint that is stored as {method}",
        )
    checkpoint = Checkpoint.open(folder)
    specs = list(linear_specs(checkpoint)[0].values())
    size = group_size(specs) if takes_groups(plugin) else None
    weights = weights_option(method, group_size=size)
    texts, reason = _texts(checkpoint, plugin, specs)
    how = "rounded" if texts is None else "calibrated"
    groups = "" if size is None else f"g{size}-"
    name = f"{short_name(folder)}-{method}-{groups}{how}-{fingerprint(checkpoint)}"
    target = cache_root() / "quantised" / name
    if target.is_dir():
        say(f"using the {method} copy made before ({how}{reason}): {target}")
    else:
        groups = "" if size is None else f", group size {size}"
        say(f"{folder} is 16-bit: making a copy with {method} weights{groups} (once): {target}")
        say(f"{method} weights, {how}{reason}")
        if texts is None:
            with bar("quantise") as tick:
                quantize_checkpoint(folder, target, weights.quantizer, tick)
        else:
            # A file beside the model counts for every map of its dtypes: one that leaves layers out has another place.
            for_all = not any(e.is_exception for e in asked_kv_dtypes(kv_dtype).entries)
            options = RunOptions(weights, _kv_options(kv_dtype) if for_all else None, resume=True)
            try:
                with bar("calibrate") as tick:
                    make_copy(folder, target, texts, options, say=say, tick=tick, elsewhere=ELSEWHERE)
            except ConfigError:
                if not target.is_dir():
                    raise
                say("another process has made it meanwhile")  # of two servers that start together
        before, after = checkpoint.nbytes, Checkpoint.open(target).nbytes
        say(f"the copy is ready: {after / 2**20:.0f} MiB instead of {before / 2**20:.0f} MiB")
    if texts is not None:
        prepared_kv_scales(target, kv_dtype, say, texts)
    return target


def prepared_kv_scales(folder: Path, kv_dtype: str, say: Say = lambda line: None, texts: Texts | None = None) -> None:
    """Put KV scales into a folder of a model that lies in the cache (see `own_folder`), unless it has some for this KV
    dtype or the dtype takes none. Scales for other KV dtypes, and those beside the model, stay as they are."""
    options = _kv_options(kv_dtype)
    if options is None:
        return
    checkpoint = Checkpoint.open(folder)
    own = own_folder(folder, kv_dtype)
    if _has_scales(checkpoint, kv_dtype):
        return
    # Held around the question, too: of two servers that start together, one measures.
    with only_one(own / TENSORS, say):
        if _has_scales(checkpoint, kv_dtype):
            return
        say(f"measuring scales for the {kv_dtype} KV cache (once)")
        texts = texts or load_texts(None, Tokenizer.load(folder), length=fitting_length(folder))
        with bar("KV scales") as tick:
            make_kv_scales(folder, own, texts, RunOptions(kv=options, resume=True), say=say, tick=tick)


def _has_scales(checkpoint: Checkpoint, kv_dtype: str) -> bool:
    """Damaged ones, or those of an earlier version, are none."""
    try:
        found, _ = choose_sidecar(None, kv_dtype, checkpoint)
    except UserError:
        return False
    if found is None:
        return False
    own = own_folder(checkpoint.folder, kv_dtype)
    return found.path.parent == own or is_measured_for(found, asked_kv_dtypes(kv_dtype))


def _kv_options(kv_dtype: str) -> KVOptions | None:
    """None where --kv-dtype names no dtype with scales."""
    named = [load_plugin("kv", name) for name in asked_kv_dtypes(kv_dtype).dtypes]
    scaled = [plugin for plugin in named if plugin.max_value is not None]
    if not scaled:
        return None
    return KVOptions(kv_dtype, "head" if all("head" in p.scale_granularity for p in scaled) else "tensor")


def _texts(
    checkpoint: Checkpoint, plugin: type[WeightQuant], specs: list[LinearSpec]
) -> tuple[Texts | None, str]:
    """The built-in texts where they are to be used, and what to say about it."""
    if not isinstance(plugin.quantizer(), CalibratedQuantizer):
        return None, ""
    if native_builder(load_config(checkpoint)) is None:
        return None, " from the weights alone: only the native model families are calibrated"
    size = sum(s.in_features * s.out_features for s in specs)
    if select_device("auto")[0].type == "cpu" and size > MOST_WEIGHTS_ON_CPU:
        return None, (
            f" from the weights alone: {size / 1e9:.1f} billion weights take long to calibrate on a CPU "
            "(`qengine calibrate` does it, with better results)"
        )
    try:
        folder = checkpoint.folder
        texts = load_texts(None, Tokenizer.load(folder), length=fitting_length(folder))
    except UserError as e:
        return None, f" from the weights alone: the built-in texts cannot be used ({e})"
    return texts, f" with {texts.tokens:,} tokens of the built-in texts"
