"""The size of an update beside the weights that it changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.errors import FLOATS, check, describe_tree, fail
from funcops.engine.trees import paths, same_structure


def update_ratios(params: Any, updated: Any) -> dict[str, Tensor]:
    """|w' - w| / |w| of each param by path: [] each, float32 (float64 for float64), on its device, without a host sync. `updated`:
    what an update returned for `params`, without `in_place`.

    A param that did not change has 0, one that was zero and changed infinity; None has no entry. The difference of one param at a
    time takes memory. Raises `ValueError` or `TypeError` for trees of two structures, and for leaves of two shapes or dtypes.

    >>> import torch
    >>> from funcops.optim import update_ratios
    >>> update_ratios({"w": torch.tensor([3.0, 4.0]), "b": None}, {"w": torch.tensor([3.0, 3.0]), "b": None})
    {'w': tensor(0.2000)}
    """
    if not same_structure(params, updated):
        fail("update_ratios", "updated", f"a tree like params, {describe_tree(params)}", describe_tree(updated), TypeError)
    old, new = paths(params), paths(updated)
    for path, t in old.items():
        if t is not None or new[path] is not None:
            for name, one in (("params", t), ("updated", new[path])):
                check("update_ratios", f"{name}.{path}", one, (...,), FLOATS)
            check("update_ratios", f"updated.{path}", new[path], t.shape, t.dtype, t)
    found = {}
    for path, t in old.items():
        if t is not None:
            change, size = (_norm(one) for one in (new[path] - t, t))
            # not 0 / 0, as of a param of zeros that has no gradient yet
            found[path] = torch.where(change == 0, change, change / size)
    return found


def _norm(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t.detach(), dtype=wide(t.dtype))
