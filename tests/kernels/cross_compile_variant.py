"""A kernel variant, and compiling it to cubin for a chip that is not there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import triton
from cross_compile_sass import disassembled, faults_of_products
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
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", chip.sm, 32), options=variant.options)
    if chip.sm == 90:
        refuse_memory_in_use(compiled.asm, compiled.metadata.num_warps)
    if values.get("PDL"):
        refuse_early_access(compiled.asm["ptx"])
    return int(compiled.metadata.shared)


def refuse_memory_in_use(asm: dict[str, Any], num_warps: int) -> None:
    """Products of sm_90 read an operand in registers until they end. Where some are left under way, the next step may
    write to those registers before: nothing in the language forbids it, and results are wrong now and then. Machine
    code shows whether it does, and what Triton asks for whether it might with another assembler."""
    in_registers = re.search(r"warp_group_dot %[^\n]*dot_op", asm["ttgir"])
    at_once = all("pendings = 0" in dot for dot in re.findall(r"warp_group_dot %.*\n.*", asm["ttgir"]))
    if in_registers or (num_warps > 4 and not at_once):
        faults = faults_of_products(disassembled(asm["cubin"]), num_warps)
        if faults:
            raise AssertionError(f"{len(faults)} instructions write too early, such as {faults[0]}")
    if in_registers and re.search(r"warp_group_dot_wait[^\n]*pendings = [1-9]", asm["ttgir"]):
        raise AssertionError("products are left under way while their operands are in registers")


def refuse_early_access(ptx: str) -> None:
    """A kernel that starts while the one before it ends must not touch memory before it has waited."""
    first = re.search(r"griddepcontrol\.wait|\b(ld|st|red|atom)(\.\w+)*\.global|cp\.async", ptx)
    if first is None or first[0] != "griddepcontrol.wait":
        raise AssertionError(f"{first and first[0]} comes before the wait for earlier kernels")
