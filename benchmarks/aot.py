"""Every kernel and configuration compiled ahead of time, with no GPU: registers, shared memory, spills, matrix opcode.

    python -m benchmarks aot --csv FILE                    compiles all
    python -m benchmarks aot --changed FILE --csv FILE     compiles only what FILE, an earlier table, lacks

A row of the table is valid as long as its hash is: a hash of the sources of the kernel and its helpers, and of its launch
(`fingerprint`).
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import sys
from collections.abc import Iterable
from typing import get_type_hints

import torch
from triton import knobs

from benchmarks.choices import choices
from benchmarks.kernel_calls import KernelCall, Maker, kernel_calls
from benchmarks.measure import BenchError
from benchmarks.standard_models import MODELS, step
from funcops.engine.backend import backend, gemm
from funcops.engine.backend.launch import Launched, launched_kernels, planned_launches
from funcops.engine.backend.shared import shared_memory
from funcops.library.kernels.triton.gemm_specialised import specialised_shared_of
from funcops.library.kernels.triton.gemm_table import SPECIALISED
from funcops.testing.aot import COMPILER, TARGETS, Build, inspect, name_of, stubbed, takes_descriptors
from funcops.testing.fingerprint import fingerprint

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=TARGETS, action="append", help="compile only for this target; may be repeated")
    parser.add_argument("--changed", metavar="FILE", help="compile only kernels whose row in this table is missing or outdated")


def run(target: list[str] | None = None, changed: str | None = None) -> list[Build]:
    known = {} if changed is None else {(build.hash, build.compiler): build for build in read(changed)}
    rows, compiled = [], 0
    for name in target or TARGETS:
        for launched in plan(name):
            row = known.get((fingerprint(launched, name), COMPILER))
            compiled += row is None
            rows.append(row or build(launched, name))
    print(f"bench aot: {compiled} compiled, {len(rows) - compiled} unchanged", file=sys.stderr)
    return rows


def plan(target: str) -> list[Launched]:
    """The launches of every call in every dtype on `target`, of every choice for a matrix product or a norm, and of a step of each
    standard model, one for each specialisation. Compiles none of them."""
    if knobs.runtime.interpret:
        raise BenchError("bench aot: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")
    with stubbed(TARGETS[target].gpu), planned_launches() as found, backend("triton"):
        for dtype in DTYPES:
            for call in _shapes(dtype):
                call.kernel(*call.args)
                if call.product is not None:
                    for provider in ("specialised", "cublas"):
                        with gemm(provider):
                            call.kernel(*call.args)
            for choice in choices(dtype) if dtype is not torch.float16 else ():  # float16 has bfloat16's choices
                choice()
        for model, provider in itertools.product(MODELS, ("auto", "triton")):
            with gemm(provider):
                step(model)
        return found


@functools.cache
def _shapes(dtype: torch.dtype) -> list[KernelCall]:
    """The calls, which are the same for every target."""
    return list(kernel_calls(Maker("meta", dtype)))


def build(launched: Launched, target: str) -> Build:
    with stubbed(TARGETS[target].gpu):
        return inspect(launched.compile(), target)


def read(path: str) -> list[Build]:
    """The rows of a table. Rows without a hash are never valid."""
    kinds = get_type_hints(Build)
    try:
        with open(path, newline="") as file:
            return [Build(**{name: kinds[name](row.get(name, "")) for name in kinds}) for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise BenchError(f"bench aot: {path} must be a table of `bench aot`: {error}") from error


def never_built(found: Iterable[Launched], target: str) -> set[str]:
    """Kernels with a launcher that `target` can run, but without a launch: their call is missing. A product with specialised warps
    runs where the smaller of its tiles fits."""
    able = {name_of(kernel) for kernel in launched_kernels() if TARGETS[target].descriptors or not takes_descriptors(kernel)}
    with stubbed(TARGETS[target].gpu):
        memory = shared_memory()
    _, (m, n, k, _, stages, _) = SPECIALISED
    if specialised_shared_of(m, n, k, stages, 2, 2, memory) > memory.limit:
        able -= {"gemm_specialised.specialised"}
    return able - {name_of(launched.kernel) for launched in found}
