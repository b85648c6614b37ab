"""The random numbers of a traced graph by a key: the graph's n-th draw is by the key folded with n, so that it may run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from funcops.adapters.from_function.joint import Like, draws, of_schema, operator_name
from funcops.engine import random
from funcops.engine.errors import fail


def draw_by_key(where: str, graph: fx.Graph, key: fx.Node) -> None:
    """Replace the draws of a graph. Raises `ValueError` for one that a key cannot make, before the graph is changed."""
    drawing = [node for node in graph.nodes if draws(node)]
    for node in drawing:
        if operator_name(node) not in DRAWS:
            wanted = f"a module whose random operators are among {', '.join(DRAWS)}, or no key"
            fail(where, "x.extras.key", wanted, f"one that calls {node.target}")
    for number, node in enumerate(drawing):
        positional = of_schema(node).arguments[: len(node.args)]
        given = {argument.name: value for argument, value in zip(positional, node.args, strict=True)}
        given |= {name: value for name, value in node.kwargs.items() if name in ("p", "low", "high", "from", "to")}
        value = node.meta["val"]
        with graph.inserting_before(node):
            like = Like.of(value[0] if isinstance(value, tuple) else value)
            made = graph.call_function(DRAWS[operator_name(node)], (key, number, like, given))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _unit(key: Tensor, number: int, like: Like, low: float = 0.0, high: float = 1.0) -> Tensor:
    dtype = like.dtype if like.dtype.is_floating_point else torch.float64
    return random.uniform(random.fold_in(key, number), like.shape, low=low, high=high, dtype=dtype)


def _laid_out(found: Tensor, like: Like) -> Tensor:
    """In the layout of the draw that it replaces."""
    found = found.to(like.dtype)
    return found if found.stride() == like.stride else found.new_empty_strided(like.shape, like.stride).copy_(found)


def bernoulli(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> Tensor:
    """1 with probability p, a number or `self`, else 0."""
    return _laid_out(_unit(key, number, like) < given.get("p", given["self"]), like)


def native_dropout(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x * mask / (1 - p), and the mask."""
    x, p = given["input"], given["p"]
    mask = _unit(key, number, like) >= p
    return _laid_out(x * mask * (0.0 if p == 1 else 1 / (1 - p)), like), mask


def uniform(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> Tensor:
    return _laid_out(_unit(key, number, like, given.get("from", 0.0), given.get("to", 1.0)), like)


def normal(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    return _laid_out(mean + std * random.normal(random.fold_in(key, number), like.shape, dtype=like.dtype), like)


def exponential(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> Tensor:
    return _laid_out(-torch.log1p(-_unit(key, number, like)) / given.get("lambd", 1.0), like)


def randint(key: Tensor, number: int, like: Like, given: dict[str, Any]) -> Tensor:
    """low up to, not including, high."""
    low, high = given.get("low", 0), given["high"]
    words = random.bits(random.fold_in(key, number), math.prod(like.shape))
    return _laid_out((low + words % (high - low)).view(like.shape), like)


DRAWS: dict[str, Callable[..., Any]] = {
    "bernoulli": bernoulli,
    "native_dropout": native_dropout,
    "rand": uniform,
    "rand_like": uniform,
    "uniform": uniform,
    "randn": normal,
    "randn_like": normal,
    "normal_functional": normal,
    "exponential": exponential,
    "randint": randint,
    "randint_like": randint,
}
