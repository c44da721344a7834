"""Host memory that a load on a CPU passes through, for each weight format: its peak beside the file and what is kept.

    python benchmarks/load_peak.py [--layers N] [--json PATH]

A Llama of random weights is written in each format and loaded in a process of its own, without the dense copies that a
CPU keeps where memory allows. The peak is the process's high-water mark above what it held before (Linux only). One
module is gate and up, which run as one, in float32.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qengine.config import EngineConfig
from qengine.plugin import LinearSpec, RandomTensors
from qengine.plugin.discovery import load_plugin
from qengine.runtime.decide import decide
from qengine.runtime.loader import load

HIDDEN, WIDE, HEADS, KV_HEADS, VOCABULARY = 1024, 2048, 16, 8, 4096
MODULE = 2 * WIDE * HIDDEN * 4
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
BYTES = INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


FORMATS: dict[str, dict[str, Any]] = {
    "awq 4-bit": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq 2-bit": GPTQ | {"bits": 2},
    "gptq 3-bit": GPTQ | {"bits": 3},
    "gptq 4-bit": GPTQ,
    "gptq 4-bit asymmetric": GPTQ | {"sym": False},
    "gptq 4-bit act-order": GPTQ | {"desc_act": True},
    "gptq 8-bit": GPTQ | {"bits": 8},
    "compressed-tensors 4-bit": compressed("pack-quantized", INT4),
    "compressed-tensors 4-bit asymmetric": compressed("pack-quantized", INT4 | {"symmetric": False}),
    "compressed-tensors 8-bit": compressed("pack-quantized", INT4 | {"num_bits": 8}),
    "compressed-tensors int8, int8 activations": compressed("int-quantized", BYTES, TOKENS),
    "compressed-tensors fp8 per channel": compressed("float-quantized", BYTES | {"type": "float"}),
    "fp8 per tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def write(folder: Path, quantization: dict[str, Any], layers: int) -> int:
    """The model's folder; returns the bytes of its weights."""
    quant = load_plugin("weight", quantization["quant_method"]).parse(quantization)
    random = RandomTensors(torch.Generator().manual_seed(0))
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    held = {f"{name}.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16() for name in ("model.embed_tokens", "lm_head")}
    held["model.norm.weight"] = ones
    for i in range(layers):
        held |= {f"model.layers.{i}.{n}_layernorm.weight": ones.clone() for n in ("input", "post_attention")}
        for module, (outputs, inputs) in WIDTHS.items():
            spec = LinearSpec(f"model.layers.{i}.{module}", inputs, outputs)
            headers = quant.expected(spec)
            assert headers is not None
            held |= {f"{spec.name}.{leaf}": t for leaf, t in quant.dummy(spec, headers, random).items()}
    save_file(held, str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": quantization,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(t.nbytes for t in held.values())


def memory(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024


def measure(folder: str) -> None:
    """In a process of its own: prints the peak above the start and the bytes kept."""
    torch.set_num_threads(1)
    config = EngineConfig(
        model=folder, device="cpu", dtype="bfloat16", kv_cache_memory_bytes=1 << 24, max_model_len=256,
        lm_head_int8=False,
    )  # fmt: skip
    built = decide(config)
    for leaf in built.model.linears():
        leaf.compact()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    report = load(built.load_plan)
    print(memory("VmHWM:") - before, report.total_bytes)


def rows(layers: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, quantization in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            stored = write(Path(folder), quantization, layers)
            command = [sys.executable, __file__, "--measure", folder]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        peak, kept = map(int, out.splitlines()[-1].split())
        found[name] = {"file": stored, "kept": kept, "peak": peak}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        measure(args.measure)
        return 0
    found = rows(args.layers)
    print(f"cpu, torch {torch.__version__}, {datetime.date.today()}; one module is {MODULE / 2**20:.0f} MiB\n")
    print("| format | file, MiB | kept, MiB | peak, MiB | above the larger of both, MiB |\n|---|---|---|---|---|")
    for name, row in found.items():
        file, kept, peak = (row[key] / 2**20 for key in ("file", "kept", "peak"))
        print(f"| {name} | {file:.1f} | {kept:.1f} | {peak:.1f} | {peak - max(file, kept):.1f} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
