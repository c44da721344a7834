"""A kernel variant, and compiling it to cubin for a chip that is not there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qengine_kernels.launch import Chip
from qengine_kernels.overlap import LEAST_SM

ITEM = {"fp16": 2, "bf16": 2, "fp32": 4, "u8": 1}


@dataclass
class Variant:
    """One kernel with its constexprs; `types` give the element types of pointer arguments (by name) and the types of
    scalars other than i32; `aligned` are scalars that are multiples of 16, beside the usual ones, and `unaligned` usual
    ones that are not."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()


def split_options(config: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    options = {k: v for k, v in config.items() if k.startswith("num_")}
    return {k: v for k, v in config.items() if k not in options}, options


def compile_variant(variant: Variant, chip: Chip) -> int:
    """Shared memory of the compiled kernel, in bytes. Pointers are 16-byte aligned, as torch's are."""
    names = variant.kernel.arg_names
    values = {"PDL": chip.sm >= LEAST_SM} | variant.constants if "PDL" in names else variant.constants
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        if name in values:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            signature[name] = "*" + variant.types[name]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = variant.types.get(name, "i32")
            known = ("n", "k", *variant.aligned)
            if (name.endswith("stride") or name in known) and name not in variant.unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(names.index(k),): v for k, v in values.items()}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", chip.sm, 32), options=variant.options)
    refuse_operands_in_use(compiled.asm["ttgir"])
    return int(compiled.metadata.shared)


def refuse_operands_in_use(ttgir: str) -> None:
    """Products of sm_90 read an operand in registers until they end. Where some are left under way, the next step may
    write to those registers before: nothing in the language forbids it, and results are wrong now and then."""
    in_registers = re.search(r"warp_group_dot %[^\n]*dot_op", ttgir)
    if in_registers and re.search(r"warp_group_dot_wait[^\n]*pendings = [1-9]", ttgir):
        raise AssertionError("products are left under way while their operands are in registers")
