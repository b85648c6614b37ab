"""Tensors of more than 2**31 elements: every address is computed in 64 bits, or provably fits in 32."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

EVERY_KERNEL = """
import json, torch
from index_ranges import wrong_addresses
from funcops.engine.backend import backend
from funcops.testing.aot import TARGETS, name_of, stubbed
from funcops.engine.backend.launch import compiled_launches
from benchmarks.aot import never_built
from benchmarks.kernel_calls import Maker, kernel_calls

class Huge(Maker):
    def sizes(self, *sizes):
        return sizes if len(sizes) == 1 else (128 * sizes[0], *sizes[1:])

def largest(args):
    return max((t.numel() for t in args if isinstance(t, torch.Tensor)), default=0)

wrong, sizes, seen = [], {}, set()
with stubbed(TARGETS["sm_90"].gpu), compiled_launches() as found, backend("triton"):
    for call in kernel_calls(Huge("meta", torch.bfloat16)):
        kind = call.shape.split()[0]
        if (call.name, kind) in seen or (kind.isidentifier() and kind not in ("silu", "swiglu", "halves", "interleaved")):
            continue  # kinds differ in their formulas, not in their addresses
        before = len(found)
        call.kernel(*call.args)
        for launched in found[before:]:
            name = name_of(launched.kernel)
            sizes[name] = max(sizes.get(name, 0), largest(call.args), largest(launched.arguments.values()))
            wrong += [f"{name} for {call.name} {call.shape}: {line}" for line in wrong_addresses(launched)]
print(json.dumps({"wrong": wrong, "sizes": sizes}))
"""
NARROW = """
import json, torch, triton, triton.language as tl
from index_ranges import wrong_addresses
from funcops.testing.aot import stubbed
from funcops.engine.backend.launch import compiled_launches, launcher

@triton.jit
def by_rows(x_ptr, rows, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * width + tl.arange(0, BLOCK), 0.0)

@triton.jit
def by_steps(x_ptr, steps, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * 0
    if WIDE:
        at = at.to(tl.int64)
    for _ in range(0, steps):
        tl.store(x_ptr + at + tl.arange(0, BLOCK), 0.0)
        at += BLOCK

by_rows, by_steps = launcher(by_rows), launcher(by_steps)
x = torch.empty(2**22, 1024, device="meta")
found = {}
with stubbed(), compiled_launches() as launches:
    for wide in (False, True):
        by_rows(2**22, 1, 1, x, 2**22, 1024, wide, 1024)
        by_steps(1, 1, 1, x, 2**22, wide, 1024)
        by_rows(2**20 + 1, 1, 1, x, 2**20 + 1, 1024, wide, 1024)
print(json.dumps([len(wrong_addresses(launched)) for launched in launches]))
"""


pytestmark = pytest.mark.slow


def run(folder, program):
    path = folder / "program.py"
    path.write_text(program)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


def test_every_kernel_addresses_more_than_2_to_the_31_elements(tmp_path):
    found = run(tmp_path, EVERY_KERNEL)
    assert not found["wrong"], "\n".join(found["wrong"])
    small = {"gemm.sum_splits", "norm_kernels.sum_parts"}  # parts of a sum, bounded by their number
    assert not {name for name, size in found["sizes"].items() if size <= 2**31} - small


def test_addresses_in_32_bits_are_seen(tmp_path):
    """32-bit cases: a row times a width beyond 2**31, a sum of unknown size, and few enough rows; then 64 bits."""
    assert run(tmp_path, NARROW) == [1, 1, 0, 0, 0, 0]
