"""Of ops and their values, what combinators and programs ask: the sum of gradients, and params by shape alone."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from funcops.memo import reading
from funcops.op import Op
from funcops.trees import constant_paths, paths, tensors, tree_map


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients of one structure, where None is zero. A node that adds up in a way of its own has `plus`."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor):
        return a + b
    return a.plus(b) if hasattr(a, "plus") else tree_map(add, a, b, is_leaf=lambda node: hasattr(node, "plus"))


def has_params(op: Op, cfg: Any) -> bool:
    return bool(tensors(abstract_params(op, cfg)))


@functools.lru_cache(maxsize=1024)
def abstract_params(op: Op, cfg: Any) -> Any:
    """The op's params on the meta device: their structure and shapes. Not to be changed. A combinator's config makes them of those
    of its parts, so that equal layers share theirs."""
    return cfg.abstract() if hasattr(cfg, "abstract") else op.init(cfg, key=None, device="meta")


def shapes(params: Any) -> dict[str, tuple[int, ...] | None]:
    """By path; None of what is absent, or never has a gradient."""
    constant = constant_paths(params)
    return {path: None if t is None or path in constant else tuple(t.shape) for path, t in paths(params).items()}


def gradient_shapes(cfg: Any) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
    """The `shapes` of a combinator's params. A method of configs, as `program_while_tracing` is: a tracer runs it and takes
    what it gives for a constant, where it would trace every `init`, and warn of the cache above."""
    with reading():
        return tuple(shapes(cfg.abstract()).items())


gradient_shapes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def parts_of(cfg: Any) -> list[tuple[Any, Op, Any]]:
    """Name, op and config of each part of a combinator's config."""
    found: list[tuple[Any, Op, Any]] = []

    def note(name: Any, op: Op, inner: Any) -> tuple[Op, Any]:
        found.append((name, op, inner))
        return op, inner

    cfg.with_parts(note)
    return found
