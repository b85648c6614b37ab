"""Select the implementation by the tensor's device, by `backend("torch" | "triton")` or by FUNCOPS_BACKEND, and the matrix products
by the table, by `gemm("auto" | "cublas" | "triton")` or by FUNCOPS_GEMM. FUNCOPS_CHECK is read here, too.

A choice holds in the context (`contextvars`) of its block, not in other threads or tasks. A backward that autograd runs on its own
thread follows the choice of its forward (`choice`, `chosen`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import require

__all__ = ["gemm_provider", "launched"]

BACKENDS = ("torch", "triton")
PROVIDERS = ["auto", "cublas", "triton", "specialised", "quack"]  # a library that multiplies adds its name
Choice = tuple[str | None, str | None, Any]  # of the backend, of the products, and the function that chooses in place of both


def _checked(name: str | None, where: str, among: Sequence[str] = BACKENDS) -> str | None:
    require(name is None or name in among, where, "name", " or ".join(map(repr, among)), repr(name))
    return name


DEFAULT: Choice = (
    # an empty variable counts as none
    _checked(os.environ.get("FUNCOPS_BACKEND") or None, "FUNCOPS_BACKEND"),
    _checked(os.environ.get("FUNCOPS_GEMM") or None, "FUNCOPS_GEMM", PROVIDERS),
    None,
)
CHECK = _checked(os.environ.get("FUNCOPS_CHECK") or None, "FUNCOPS_CHECK", ("0", "1")) == "1"  # see funcops.checking
_choice: ContextVar[Choice] = ContextVar("funcops.backend")


class _Reader:
    """`choice` is the context's choice, or the reader itself if the context has none. torch.compile cannot trace `ContextVar.get`,
    but treats a property implemented in C as a field, and guards on its value."""

    choice = property(_choice.get)


_reader: Any = _Reader()
_blocks, _lock = 0, threading.Lock()
_chosen_in_a_block = False  # in any thread: if False, the default holds
chosen_anywhere = DEFAULT[0] is not None  # by a block or the environment: the only flag that a launch on the CPU reads


def choice() -> Choice:
    """The choice that holds in this context."""
    if not _chosen_in_a_block:
        return DEFAULT
    found = _reader.choice
    return DEFAULT if found is _reader else found


@contextmanager
def chosen(found: Choice) -> Iterator[None]:
    """Run the block under a choice read by `choice` in another context."""
    _count(1)
    token = _choice.set(found)
    try:
        yield
    finally:
        _count(-1)
        _choice.reset(token)


def _count(by: int) -> None:
    global _blocks, _chosen_in_a_block, chosen_anywhere
    with _lock:
        # counted over all threads, whose blocks end in any order
        _blocks += by
        _chosen_in_a_block = _blocks > 0
        chosen_anywhere = _chosen_in_a_block or DEFAULT[0] is not None


def backend(name: str) -> AbstractContextManager[None]:
    """Run every kernel in the block on one implementation. Only speed and rounding change.

    Raises `ValueError` for another name, before the block is entered. On a machine with a GPU, "triton" leaves tensors on the CPU
    to torch; without a GPU, it needs Triton's interpreter: set TRITON_INTERPRET=1 before Triton is imported.

    >>> import torch
    >>> from funcops import ScaleConfig, backend, scale
    >>> with backend("torch"):
    ...     y, residuals = scale.fwd(None, torch.ones(2), ScaleConfig(3.0))
    ...
    >>> y
    tensor([3., 3.])
    >>> backend("cuda")
    Traceback (most recent call last):
        ...
    ValueError: backend: name must be 'torch' or 'triton', got 'cuda'
    """
    require(name in BACKENDS, "backend", "name", " or ".join(map(repr, BACKENDS)), repr(name))
    return _backend(name)


@contextmanager
def _backend(name: str) -> Iterator[None]:
    # the other choices stay what they are around the block
    with chosen((name, *choice()[1:])):
        yield


@contextmanager
def gemm(name: str) -> Iterator[None]:
    """Run bare matrix products in the block by cuBLAS, by our Triton kernels, or ("auto", the default) by the table in
    `kernels/triton/gemm_table.py`. Inside `backend("triton")` the default is "triton". "specialised" runs every product
    that fits by our experimental kernel with specialised warps, to measure it. Any other name is of a library in the table of
    `kernels/triton/providers.py`, to which products of linear layers go."""
    with chosen((choice()[0], _checked(name, "gemm", PROVIDERS), choice()[2])):
        yield


def gemm_provider() -> str:
    name, product, _ = choice()
    return product or ("auto" if name is None else "triton")


def wants_triton(first: Tensor, found: Choice | None = None) -> bool:
    name = (found or choice())[0]
    if name is None:
        return first.is_cuda
    return name == "triton" and not (first.is_cpu and _left_on_the_cpu())


def _left_on_the_cpu() -> bool:
    """Whether Triton's kernels run on a GPU, so that torch handles tensors on the CPU, such as a key or a table."""
    return os.environ.get("TRITON_INTERPRET", "0") == "0" and torch.cuda.is_available()  # which asks the driver


_left_on_the_cpu._dynamo_marked_constant = True  # type: ignore[attr-defined]


def launched() -> int:
    """The number of processes that a launcher such as torchrun started, or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)
