"""The memory-bound kernels of `kernel_calls`, as calls to count, each with the final sums of its partial results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_calls import KernelCall, Maker, kernel_calls
from benchmarks.norms import norms
from benchmarks.traffic.calls import RequestedLaunch, fingerprint_of, intercepted
from funcops.engine.backend import backend
from funcops.engine.trees import leaves, nbytes, tree_map
from funcops.library.kernels import cross_entropy as declared_loss
from funcops.library.kernels.norm import sum_parts

LONG_AND_ODD = (2048, 32768), (8192, 4099)  # more rows of norms than `kernel_calls` has
# a rotary table has cos, sin and -sin, each twice: a call needs cos and sin once; new weights are written only
READ_OF = {"table": 1 / 3, "work": 1 / 2}


class RoomMaker(Maker):
    """Allocates tensors and fills only small ones: untouched pages take no memory, and a kernel's accesses depend on no values
    except ids."""

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        t = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return t if t.nbytes > 2**20 else t.zero_()

    def wide(self, *shape: int) -> Tensor:
        t = torch.empty(shape, device=self.device)
        return t if t.nbytes > 2**20 else t.fill_(1.0)


class Case(NamedTuple):
    """A call to count: `run` calls the kernel on `args` as a training step does; `least` is the minimum of bytes, each input and
    each output once."""

    name: str
    shape: str
    args: tuple[Any, ...]
    run: Callable[[], Any]
    least: float


def cases(dtype: torch.dtype, device: str, only: Callable[[str, str], bool] = lambda *_: True) -> Iterator[Case]:
    torch.manual_seed(0)
    make = RoomMaker(device, dtype)
    for call in itertools.chain(kernel_calls(make), *(norms(make, rows, width) for rows, width in LONG_AND_ODD)):
        if call.product is None and only(call.name, call.shape):
            yield case_of(call, dtype)
        if call.name == "cross_entropy_bwd" and only("cross_entropy", call.shape):
            yield both_of_cross_entropy(call)


def case_of(call: KernelCall, dtype: torch.dtype) -> Case:
    declared = call.kernel.kernel
    declared.find_triton()
    sum_parts.kernel.find_triton()
    launch, sums = declared.triton_impl, sum_parts.kernel.triton_impl
    meta = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, call.args)
    with intercepted(lambda _: None), backend("triton"):
        given = leaves(launch(*meta))
    # the body returns one part; a kernel that returns another number of parts declares a fake of its own
    bodys = given if declared.fake_impl is declared.torch_impl else leaves(declared.torch_impl(*meta))
    in_parts = [isinstance(a, Tensor) and a.shape != b.shape for a, b in zip(given, bodys, strict=True)]

    def run() -> None:
        with backend("triton"):
            for result, apart in zip(leaves(launch(*call.args)), in_parts, strict=True):
                if apart:
                    sums(result, dtype)

    sizes = [t.shape[1] * dtype.itemsize if apart else nbytes(t) for t, apart in zip(given, in_parts, strict=True)]
    return Case(call.name, call.shape, call.args, run, sum(sizes) + taken(call))


def both_of_cross_entropy(backward: KernelCall) -> Case:
    """Loss and gradient as one call. Its minimum is one read and one write of the logits, whose tensor could hold the gradient."""
    dloss, logits, labels, _, *options = backward.args
    args = logits, labels, *options

    def run() -> None:
        with backend("triton"):
            declared_loss.cross_entropy_fwd.kernel.triton_impl(*args)
            backward.kernel.kernel.triton_impl(*backward.args)

    least = 2 * logits.nbytes + labels.nbytes + 2 * dloss.nbytes  # dloss, and losses of the same size
    return Case("cross_entropy", backward.shape, args, run, least)


def taken(call: KernelCall) -> float:
    """The bytes of the arguments. Arguments that are written to count twice; with ids, only their rows that some id selects."""
    declared, args = call.kernel.kernel, call.named
    sizes = {name: nbytes(arg) * READ_OF.get(name, 1.0) for name, arg in args.items()}
    for name in declared.mutates:
        sizes[name] *= 2
        if "ids" in args and not args["ids"].is_meta:
            sizes[name] *= args["ids"].unique().numel() / args[name].shape[0]
    return sum(sizes.values())


def plan(case: Case) -> list[RequestedLaunch]:
    """The launches of a case, none of them run."""
    found: list[RequestedLaunch] = []
    with intercepted(found.append):
        case.run()
    return found


def hashed(case: Case) -> str:
    return fingerprint_of(plan(case))
