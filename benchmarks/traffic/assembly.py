"""Reads the assembly of a launch for sm_90: registers, warps, spills, the widths of its accesses and its instructions."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from funcops.testing.aot import TOOLS

THREADS, REGISTERS, SHARED, PROGRAMS = 2048, 65536, 233472, 32  # the limits of an H100's multiprocessor
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)([^;]*)")
ACCESS = re.compile(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bf](\d+) |cp\.async\.c[ag]\.shared\.global [^,]*,[^,]*, (\w+)")
LABEL = re.compile(r"^(\.L\w+):")
GLOBAL = {"LDG", "STG", "LDGSTS", "RED", "ATOMG"}
BITS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Quality(NamedTuple):
    """The quality of a kernel's code. `widths`: for each line of the kernel with accesses, the share of their bytes in accesses of
    128 bits. `per_byte`: instructions that a thread issues for each byte that it loads or stores, in the longest loop with
    accesses, or in the whole kernel if no loop has any; NaN without accesses."""

    registers: int
    warps: int
    spills: int
    widths: dict[int, float]
    per_byte: float
    resident: int


class Instruction(NamedTuple):
    address: int
    opcode: str
    suffixes: tuple[str, ...]
    rest: str

    @property
    def bytes(self) -> int:
        """The bytes of global memory that a thread moves."""
        if self.opcode not in GLOBAL:
            return 0
        return next((BITS[suffix] for suffix in self.suffixes if suffix in BITS), 4)


def quality(compiled: Any) -> Quality:
    asm, metadata = compiled.asm, compiled.metadata
    return _quality(asm["cubin"], asm["ptx"], metadata.num_warps, metadata.shared)


@functools.cache
def _quality(cubin: bytes, ptx: str, warps: int, shared: int) -> Quality:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(cubin)

        def tool(name: str, option: str) -> str:
            return subprocess.run([TOOLS / name, option, path], capture_output=True, text=True, check=True).stdout

        usage, code = tool("cuobjdump", "-res-usage"), tool("nvdisasm", "-c")
    registers, spills = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Quality(registers, warps, spills, widths(ptx), per_byte(code), resident(registers, warps, shared))


def resident(registers: int, warps: int, shared: int) -> int:
    """The number of programs that a multiprocessor holds at a time."""
    by_registers = REGISTERS // (math.ceil(registers / 8) * 8 * 32 * warps)
    return max(1, min(PROGRAMS, THREADS // 32 // warps, by_registers, SHARED // (shared + 1024)))


def widths(ptx: str) -> dict[int, float]:
    """The share of 128-bit accesses by line of the kernel; an access within a helper counts for the calling line."""
    found: dict[int, list[int]] = {}
    line = 0
    for text in ptx.splitlines():
        if ".loc" in text:  # // common.py:18:19 @[ norm.py:49:54 @[ norm.py:30:57 ] ]
            line = int((re.findall(r":(\d+):\d+", text.partition("//")[2]) or [0])[-1])
        elif match := ACCESS.search(text):
            vector, bits, copied = match.groups()
            found.setdefault(line, []).append(int(copied, 0) if copied else int(vector or 1) * int(bits) // 8)
    return {line: sum(size for size in sizes if size == 16) / sum(sizes) for line, sizes in found.items()}


def per_byte(code: str) -> float:
    body = hot(code)
    size = sum(one.bytes for one in body)
    return len(body) / size if size else math.nan


def hot(code: str) -> list[Instruction]:
    """The longest loop with accesses in it; the whole kernel if no loop has any."""
    instructions, labels = read(code)
    loops = []
    for i, one in enumerate(instructions):
        target = re.search(r"\((\.L\w+)\)", one.rest) if one.opcode == "BRA" else None
        start = labels.get(target[1], i) if target else i
        if start < i and any(each.bytes for each in instructions[start : i + 1]):
            loops.append((start, i + 1))
    if not loops:
        return instructions
    start, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return instructions[start:end]


def read(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of the kernel without padding, and for each label the index of the instruction after it."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := INSTRUCTION.match(line):
            address, _, opcode, suffixes, rest = match.groups()
            if opcode != "NOP":
                found.append(Instruction(int(address, 16), opcode, tuple(suffixes.split(".")[1:]), rest))
    # the program ends in a branch to itself
    while found and found[-1].opcode == "BRA":
        found.pop()
    return found, labels
