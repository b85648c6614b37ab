"""The launches of kernels that a result of a device stands for, by fingerprint. `unconfirmed` reads them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.kernel_calls import Maker, measured_families
from funcops.engine.backend import backend, gemm

TARGET = "sm_90"  # a launch is known by its fingerprint for this target, on whichever device it ran


class Listed(NamedTuple):
    """A call that is measured: the number of its family, its names, and the fingerprints of its launches, joined by spaces; of a
    kernel that is the library's, a hash of the file that chooses the library's function."""

    family: int
    kernel: str
    shape: str
    launches: str


@functools.cache
def listed(dtype: torch.dtype) -> tuple[Listed, ...]:
    """Every call in order, from tensors on the meta device, which need no memory. Nothing is compiled."""
    from funcops.engine.backend.launch import planned_launches
    from funcops.testing.aot import TARGETS, stubbed  # needs Triton, which a bench without a device does without
    from funcops.testing.fingerprint import fingerprint

    found = []
    with stubbed(TARGETS[TARGET].gpu), backend("triton"):
        for number, family in enumerate(measured_families()):
            for call in family(Maker("meta", dtype)):
                with planned_launches() as planned:  # none of a kernel that is the library's
                    for provider in ("auto", "triton") if call.product else ("auto",):
                        with gemm(provider):
                            call.kernel(*call.args)
                hashes = sorted({fingerprint(launched, TARGET) for launched in planned}) or [_source(call.kernel)]
                found.append(Listed(number, call.name, call.shape, " ".join(hashes)))
    return tuple(found)


def _source(kernel: Any) -> str:
    return hashlib.sha256(inspect.getsource(inspect.getmodule(kernel.kernel.torch_impl)).encode()).hexdigest()[:12]  # type: ignore[arg-type]


@contextmanager
def fingerprints() -> Iterator[set[str]]:
    """The fingerprints of the launches in the block. All of Triton's kernels are looked up again after it."""
    from funcops.engine.backend.launch import compiled_launches

    found = _Fingerprints()
    with compiled_launches(found):
        yield found.hashes


class _Fingerprints(list[Any]):
    """Takes launches from `compiled_launches`, and keeps only their fingerprints: a launch would keep its arguments alive."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: set[str] = set()

    def append(self, launched: Any) -> None:
        from funcops.testing.fingerprint import fingerprint

        self.hashes.add(fingerprint(launched, TARGET))
