"""A module's parameters and buffers, for a time other tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def lent(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """A block in which the module has these tensors as parameters and buffers. At its end the dict that it yields has what is in
    their places."""
    left: dict[str, Tensor] = {}
    places = _places(module, values)
    before = {name: held[0][0][held[0][1]] for name, held in places.items()}
    try:
        _fill(places, values)
        yield left
        left.update({name: held[0][0][held[0][1]] for name, held in places.items()})
    finally:
        _fill(places, before)


def put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put these tensors in the places of a module's parameters and buffers."""
    _fill(_places(module, values), values)


def _places(module: nn.Module, names: Iterable[str]) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """The places of the tensors of these names. A tied one has several. One of a part with two names has one place, in which
    `torch.func.functional_call` would leave what it lends."""
    found: dict[int, list[Any]] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, t in held.items():
                found.setdefault(id(t), []).append((held, name))
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: found[id(every[name])] for name in names}


def _fill(places: Mapping[str, list[tuple[dict[str, Any], str]]], values: Mapping[str, Tensor]) -> None:
    for name, t in values.items():
        for held, own in places[name]:
            held[own] = t
