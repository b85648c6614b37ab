"""The first run of a module's forward, before its trace: what a trace cannot have is refused here, before anything is changed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from funcops.engine.errors import fail


@contextmanager
def same_draws(given: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
    """A block after which all generators of random numbers have their old states: torch's, of the devices of these tensors, too,
    Python's and NumPy's. Yield a function that tells whether one of the last two has been used."""
    before, numpy = random.getstate(), sys.modules.get("numpy")
    numpys: Any = None if numpy is None else numpy.random.get_state()
    devices = sorted({t.device.index or 0 for t in given if t.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield lambda: random.getstate() != before or (numpy is not None and repr(numpy.random.get_state()) != repr(numpys))
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpys)


@contextmanager
def first_run(where: str, label: str, names: Sequence[str], given: Sequence[Tensor]) -> Iterator[None]:
    """A block after which all generators of random numbers have their old states. A write to one of the tensors raises before it is
    made, and so does, in the end, a number drawn by Python or NumPy, which a trace would contain for ever."""
    with same_draws(given) as others:
        with torch.enable_grad(), _Untouched(where, label, names, given):
            yield
        drawn = others()
    if drawn:
        wanted = "a module that draws its random numbers with torch"
        fail(where, label, wanted, "one that draws some with Python's random or numpy.random: pass those in x")


class _Untouched(TorchDispatchMode):
    """A block in which a write to the memory of one of the tensors raises."""

    def __init__(self, where: str, label: str, names: Sequence[str], given: Sequence[Tensor]) -> None:
        super().__init__()
        self.where, self.label = where, label
        self.names = {t.untyped_storage()._cdata: name for name, t in zip(names, given, strict=True)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if func is torch.ops.aten.normal_.default and not args[0].is_contiguous():
            fail(
                self.where, self.label, "a module that draws normal numbers into contiguous tensors", f"strides {args[0].stride()}"
            )
        if any([isinstance(one, torch.Generator) for one in (*args, *kwargs.values())]):
            fail(self.where, self.label, "a module that draws from torch's own generators", f"{func} with another one")
        for i, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    name = self.names.get(t.untyped_storage()._cdata) if isinstance(t, Tensor) else None
                    if name is not None:
                        wanted = "a module that writes neither to its inputs nor to its parameters"
                        fail(self.where, self.label, wanted, f"{func} of {name}")
        return func(*args, **kwargs)
