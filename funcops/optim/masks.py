"""Masks of the leaves of params that weight decay, or an optimiser of matrices, applies to; and trees split by a mask."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor

from funcops.engine.errors import describe, fail, join_path
from funcops.engine.trees import leaves, paths, same_structure, tree_map_with_path, with_leaves

T = TypeVar("T")
NO_DECAY = ("*norm*", "*.bias")
NO_MATRIX = ("*embed*", "*head.weight", "*norm*", "*.bias")


def decay_mask(params: T, exclude: Sequence[str] = NO_DECAY) -> T:
    """A tree of bools like params for `decay=`: False where a dotted path matches one of the globs.

    Raises `ValueError` for a glob that matches no path (except the globs of `NO_DECAY`), `TypeError` for a bare string.

    >>> import torch
    >>> from funcops.optim import NO_DECAY, decay_mask
    >>> NO_DECAY
    ('*norm*', '*.bias')
    >>> decay_mask({"norm": torch.ones(2), "up": torch.ones(2, 2)})
    {'norm': False, 'up': True}
    """
    _check_globs("decay_mask", params, exclude, NO_DECAY)
    return tree_map_with_path(lambda path, _: not _matches(path, exclude), params)


def matrix_mask(params: T, exclude: Sequence[str] = NO_MATRIX) -> T:
    """A tree of bools like params: True for the tensors that `muon_update` is for, [..., m, n] at a dotted path that matches none
    of the globs. Embeddings and the head of a model, whose rows are vectors of tokens, belong to AdamW.

    Raises `ValueError` for a glob that matches no path (except the globs of `NO_MATRIX`), `TypeError` for a bare string.

    >>> import torch
    >>> from funcops.optim import NO_MATRIX, matrix_mask
    >>> NO_MATRIX
    ('*embed*', '*head.weight', '*norm*', '*.bias')
    >>> matrix_mask({"embed": torch.ones(9, 2), "up": torch.ones(2, 2), "scale": torch.ones(2)})
    {'embed': False, 'up': True, 'scale': False}
    """
    _check_globs("matrix_mask", params, exclude, NO_MATRIX)
    return tree_map_with_path(lambda path, p: isinstance(p, Tensor) and p.dim() >= 2 and not _matches(path, exclude), params)


def partition(tree: T, mask: T) -> tuple[T, T]:
    """Two trees like `tree`: the leaves where `mask`, a tree of bools like it, is True, and the others; None elsewhere.

    Raises `ValueError` for a mask of another structure, `TypeError` for a leaf of it that is not a bool, naming the path.

    >>> from funcops.optim import combine, partition
    >>> partition({"a": 1, "b": 2}, {"a": True, "b": False})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    >>> combine(*partition({"a": 1, "b": 2}, {"a": True, "b": False}))
    {'a': 1, 'b': 2}
    """
    if not same_structure(tree, mask):
        fail("partition", "mask", f"a tree of bools like {describe(tree)}", describe(mask))
    for path, chosen in paths(mask).items():
        if not isinstance(chosen, bool):
            fail("partition", join_path("mask", path), "a bool", describe(chosen), TypeError)
    pairs = list(zip(leaves(tree), leaves(mask), strict=True))
    return with_leaves(tree, [a if chosen else None for a, chosen in pairs]), with_leaves(
        tree, [None if chosen else a for a, chosen in pairs]
    )


def combine(first: T, second: T) -> T:
    """One tree of two that `partition` returned, or of what became of them: at each leaf the one that is not None.

    Raises `ValueError` for trees of different structures, and for a leaf that both have, naming the path.
    """
    if not same_structure(first, second):
        fail("combine", "second", f"a tree like {describe(first)}", describe(second))
    have, others = paths(first), leaves(second)
    for (path, a), b in zip(have.items(), others, strict=True):
        if a is not None and b is not None:
            fail("combine", join_path("second", path), "None, as the first tree has this leaf", describe(b))
    return with_leaves(first, [b if a is None else a for a, b in zip(have.values(), others, strict=True)])


def _check_globs(where: str, params: Any, exclude: Any, usual: Sequence[str]) -> None:
    if not isinstance(exclude, (tuple, list)) or not all(isinstance(glob, str) for glob in exclude):
        fail(where, "exclude", "a sequence of globs", repr(exclude), TypeError)
    known = list(paths(params))
    for glob in exclude:
        if glob not in usual and not any(fnmatchcase(path, glob) for path in known):
            wanted = f"globs that match paths among {', '.join(known) or '(no leaves)'}"
            fail(where, "exclude", wanted, repr(glob))


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)
