"""What became of sm_90's products (wgmma) in machine code: they go on behind the program's back, and until they end
they read shared memory, and registers where the left operand lies in some. Nothing in PTX keeps others from writing
there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@\S+ )?\s*(\S+)\s*(.*?)\s*;")
PRODUCT = re.compile(r"[HQI]GMMA\.")
SHARED_WRITES = ("STS", "LDGSTS", "UTMALDG", "UBLKCP")

Group = tuple[tuple[int, bool], ...]
"""Products that are waited for together: where they are, and whether a barrier has been passed since."""
State = tuple[int, Group, tuple[Group, ...], bool]
"""Next instruction, the products of no group yet, groups under way, and whether products have ended that were under way
at the last barrier: other warps' parts of them may not have."""


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout


class Code:
    """Disassembled instructions: address, name and operands; which of them may follow each; and the registers of each
    one's left operand, where it is a product that has it in registers."""

    def __init__(self, text: str) -> None:
        self.lines: list[tuple[str, str, list[str]]] = []
        self.conditional: list[bool] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(self.lines)
            elif found := INSTRUCTION.match(line):
                address, condition, name, rest = found.groups()
                self.lines.append((address, name, [o.strip() for o in rest.split(",")]))
                self.conditional.append(condition is not None or bool(re.match(r"!?U?P\d", rest)))
        self.next = [self._next(i, labels) for i in range(len(self.lines))]
        self.left = [self._left(name, operands) for _, name, operands in self.lines]

    def _next(self, i: int, labels: dict[str, int]) -> list[int]:
        _, name, operands = self.lines[i]
        after = [i + 1] if i + 1 < len(self.lines) else []
        if name.startswith("BRA") and (target := re.search(r"\.L_x_\d+", operands[-1])):
            return [labels[target[0]], *(after if self.conditional[i] else [])]
        return [] if name == "EXIT" and not self.conditional[i] else after

    @staticmethod
    def _left(name: str, operands: list[str]) -> range:
        found = re.fullmatch(r"R(\d+)", operands[1]) if PRODUCT.match(name) else None
        return range(int(found[1]), int(found[1]) + 4) if found else range(0)


def written(name: str, operands: list[str]) -> range:
    """The registers that an instruction which is no product writes to."""
    first = next((o for o in operands[:2] if not re.fullmatch(r"U?P\w", o)), "")
    found = re.fullmatch(r"R(\d+)(\.\w+)*", first)
    if not found:
        return range(0)
    four = name.startswith(("HMMA", "IMMA")) or (name.startswith("LD") and name.endswith((".128", ".4")))
    two = name.startswith(("IMAD.WIDE", "CS2R")) or (name.startswith("LD") and ".64" in name)
    return range(int(found[1]), int(found[1]) + (4 if four else 2 if two else 1))


def faults_of_products(sass: str, num_warps: int) -> list[str]:
    """Instructions, on any path, that write to registers which a product under way may still read; where there are
    several groups of four warps also those that write to shared memory after one group alone has seen a product's end
    (https://github.com/triton-lang/triton/issues/11047). Raises ValueError where no product has a left operand in
    registers and all have the same four warps: there is nothing to look for."""
    code = Code(sass)
    if not any(code.left) and (num_warps <= 4 or not any(PRODUCT.match(name) for _, name, _ in code.lines)):
        raise ValueError("no products that could be in danger")
    faults: set[str] = set()
    seen: set[State] = set()
    work: list[State] = [(0, (), (), False)]
    while work:
        state = work.pop()
        if state in seen:
            continue
        seen.add(state)
        i, last, groups, alone = state
        address, name, operands = code.lines[i]
        if PRODUCT.match(name):
            last = (*last, (i, False))
            if "gsb0" in operands:
                last, groups = (), (*groups, last)[-9:]
        elif name.startswith("WARPGROUP.DEPBAR"):
            pending = int(operands[-1], 16)
            ended = groups[: max(len(groups) - pending, 0)]
            groups = groups[len(ended) :]
            alone |= any(passed for group in ended for _, passed in group)
        elif name.startswith("BAR."):
            last, *passed = (tuple((p, True) for p, _ in group) for group in (last, *groups))
            groups, alone = tuple(passed), False
        else:
            busy = {r for group in (*groups, last) for p, _ in group for r in code.left[p]}
            if not busy.isdisjoint(written(name, operands)):
                faults.add(f"{address} {name} {', '.join(operands)} writes to what a product reads")
            if alone and num_warps > 4 and name.startswith(SHARED_WRITES):
                faults.add(f"{address} {name} {', '.join(operands)} writes to what other warps' products may read")
        work.extend((n, last, groups, alone) for n in code.next[i])
    return sorted(faults)
