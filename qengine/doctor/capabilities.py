"""Which weight formats and KV dtypes run on this device, in which compute dtype, and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qengine.errors import UserError
from qengine.plugin import AttentionSpec, DeviceInfo, LinearScheme, LinearSpec, TensorInfo
from qengine.plugin.discovery import list_plugins, load_plugin
from qengine.runtime.device import choose_dtype
from qengine.runtime.device_matrix import Answer, Target, kv_answers
from qengine.runtime.quant_config import QuantConfig
from qengine.runtime.quant_select import DENSE, select_quant

DTYPES = ("float16", "bfloat16", "float32")
SPEC = LinearSpec("model.layers.0.mlp.up_proj", 256, 192)
ATTENTION = AttentionSpec(8, 2, 128, 128**-0.5)


@dataclass(frozen=True)
class Row:
    """One format: `kind` is weights or KV cache, `answers` by compute dtype."""

    kind: str
    name: str
    answers: dict[str, Answer]


def capability_table(info: DeviceInfo) -> list[Row]:
    """Activations are in the compute dtype; where a format rounds them further, its answer says so."""
    targets = {name: _target(name, info) for name in DTYPES}
    rows = []
    for scheme in sorted(usual_schemes(), key=lambda s: s.format):
        rows.append(Row("weights", scheme.format, {name: t.ask(scheme.capability) for name, t in targets.items()}))
    by_dtype = {name: kv_answers(ATTENTION, [target]) for name, target in targets.items()}
    for kv in by_dtype[DTYPES[0]]:
        rows.append(Row("KV cache", kv, {name: by_dtype[name][kv][0] for name in DTYPES}))
    return rows


def _target(name: str, info: DeviceInfo) -> Target:
    try:
        return Target(info.name, info, choose_dtype(name, torch.bfloat16, info)[0])
    except UserError as e:
        return Target(info.name, info, None, str(e))


def usual_schemes() -> Iterator[LinearScheme]:
    """What each installed weight format makes by default, 16-bit weights first, every scheme once."""
    dense = load_plugin("weight", DENSE).parse(None)
    header = TensorInfo(f"{SPEC.name}.weight", "BF16", (SPEC.out_features, SPEC.in_features))
    plain = dense.scheme_for(SPEC, {"weight": header})
    seen = set()
    if plain is not None:
        seen.add(plain.format)
        yield plain
    for record in list_plugins("weight"):
        scheme = default_scheme(record.name)
        if scheme is not None and scheme.format not in seen:
            seen.add(scheme.format)
            yield scheme


def default_scheme(name: str) -> LinearScheme | None:
    """None for a plugin that is broken, or that makes no weights of its own."""
    try:
        quantizer = load_plugin("weight", name).quantizer()
        if quantizer is None:
            return None
        config = quantizer.config([])
        reader = select_quant(None, QuantConfig(str(config.get("quant_method", name)), config, "doctor")).quant
        held = None if reader is None else reader.expected(SPEC)
        return None if reader is None or held is None else reader.scheme_for(SPEC, held)
    except Exception:  # a plugin may raise anything; its own check says what
        return None
