"""Every kernel and configuration compiled ahead of time, with no GPU: registers, shared memory, spills, matrix opcode."""

from __future__ import annotations

import argparse

import torch
from triton import knobs

from funcops.backend import backend, gemm
from funcops.backend.aot import TARGETS, Build, inspect, name_of, stubbed, takes_descriptors
from funcops.backend.launch import compiled_launches, launched_kernels
from funcops.bench.measure import BenchError
from funcops.bench.samples import Maker, samples

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=TARGETS, action="append", help="compile for this one alone; may be repeated")


def run(target: list[str] | None = None) -> list[Build]:
    return [build for name in target or TARGETS for build in builds(name)]


def builds(target: str) -> list[Build]:
    """Every sample in every dtype, compiled for `target`: one for each specialisation."""
    if knobs.runtime.interpret:
        raise BenchError("bench aot: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")
    with stubbed(TARGETS[target].gpu), compiled_launches() as found, backend("triton"):
        for dtype in DTYPES:
            for sample in samples(Maker("meta", dtype)):
                sample.kernel(*sample.args)
                if sample.product is not None:
                    with gemm("specialised"):
                        sample.kernel(*sample.args)
        return [inspect(launched, target) for launched in found]


def never_built(found: list[Build], target: str) -> set[str]:
    """Kernels that have a launcher, that `target` can run, and that were not built: a sample is missing."""
    able = [kernel for kernel in launched_kernels() if TARGETS[target].descriptors or not takes_descriptors(kernel)]
    return {name_of(kernel) for kernel in able} - {build.kernel for build in found}
