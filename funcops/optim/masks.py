"""Masks of the leaves that weight decay applies to."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from funcops.errors import fail
from funcops.trees import paths, tree_map_with_path

T = TypeVar("T")
NO_DECAY = ("*norm*", "*.bias")


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
    if not isinstance(exclude, (tuple, list)) or not all(isinstance(glob, str) for glob in exclude):
        fail("decay_mask", "exclude", "a sequence of globs", repr(exclude), TypeError)
    known = list(paths(params))
    for glob in exclude:
        if glob not in NO_DECAY and not any(fnmatchcase(path, glob) for path in known):
            wanted = f"globs that match paths among {', '.join(known) or '(no leaves)'}"
            fail("decay_mask", "exclude", wanted, repr(glob))
    return tree_map_with_path(lambda path, _: not any(fnmatchcase(path, glob) for glob in exclude), params)
