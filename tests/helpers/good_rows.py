"""`Row`, a row of good arguments, and the makers that rows of several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcops import ChainConfig, LinearConfig, LinearParams, Step, chain, linear, random


class Row(NamedTuple):
    """`good()` makes arguments by name. `also`: wrong values by argument besides those that its good value has by its type.
    `accepts`: by argument, or argument and repr of a value, why what seems wrong is right."""

    good: Callable[[], dict[str, Any]]
    also: dict[str, tuple[Any, ...]] = {}
    accepts: dict[Any, str] = {}


ANY = "any tree is a tree, a leaf included"
CFG = LinearConfig(4, 4)
CHAIN = ChainConfig(steps=(Step("a", linear, CFG), Step("b", linear, LinearConfig(4, 4, bias=False))))
META_KEY = {("key", "int64[2]"): "a key on the meta device gives keys and bits there"}
ONE = (0,)
NAME = {("name", "'no such'"): "any name", ("name", "''"): "any name"}


def params() -> LinearParams:
    return linear.init(CFG, key=random.key(0))


def chain_params() -> dict[str, Any]:
    return chain.init(CHAIN, key=random.key(0))


def x() -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4)


def tree() -> dict[str, Any]:
    return {"a": torch.ones(2, 2), "b": None}


def grads() -> dict[str, Any]:
    return {"a": torch.full((2, 2), 0.5), "b": None}


def doubled(tree: Any) -> Any:
    return 2 * tree
