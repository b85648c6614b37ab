"""An exponential moving average of params, to evaluate with (Polyak averaging, as in torch.optim.swa_utils)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.errors import FLOATS, check, describe, fail, join_path, require, require_dtype, require_flag, short
from funcops.engine.trees import _no_pairs, leaves, paths, tree_map, with_leaves
from funcops.optim._rows import lists_of

T = TypeVar("T")


def ema_init(params: T, dtype: torch.dtype = torch.float32) -> T:
    """The initial average: copies of params, in `dtype` or a wider dtype. bfloat16 would lose updates of 1 - decay = 0.001. Raises
    `TypeError` or `ValueError` if `dtype` is not a float dtype; `TypeError` for a param of 4 bits.

    >>> import torch
    >>> from funcops.optim import ema_init
    >>> ema_init({"w": torch.ones(2, dtype=torch.bfloat16)})
    {'w': tensor([1., 1.])}
    """

    require_dtype("ema_init", dtype)

    def copied(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        wide = t.dtype if not t.is_floating_point() else dtype if t.dtype.itemsize == 1 else torch.promote_types(t.dtype, dtype)
        return t.detach().to(wide, copy=True)

    _no_pairs("ema_init", "params", leaves(params), params)
    return tree_map(copied, params)


def ema_update(average: T, params: T, decay: float | Tensor, *, in_place: bool = False) -> T:
    """The average after one more step, leaf by leaf, in the average's dtype:

        a <- decay a + (1 - decay) p

    Leaves other than float tensors are taken from params. `decay` may be a tensor of one number, without a host sync. With
    `in_place` the average is written to and returned. Raises `ValueError` for a decay outside of [0, 1], or trees that differ in
    structure, shapes or devices; `TypeError` for a leaf that is a tensor in only one of the trees, an average in 8 bits, a
    param of 4 bits.

    >>> import torch
    >>> from funcops.optim import ema_update
    >>> ema_update({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.75)
    {'w': tensor([0.2500, 0.2500])}
    """
    require_flag("ema_update", in_place=in_place)
    if not isinstance(decay, Tensor):
        require(
            isinstance(decay, (int, float)) and decay is not True and 0 <= decay <= 1, "ema_update", "decay", "from 0 to 1", decay
        )
    ours, given = lists_of("ema_update", {"average": average, "params": params})
    floats = [i for i, p in enumerate(given) if isinstance(p, Tensor) and p.is_floating_point()]
    names = list(paths(average))
    for name, a, p in zip(names, ours, given, strict=True):
        if isinstance(a, Tensor) != isinstance(p, Tensor):
            fail("ema_update", join_path("params", name), "a tensor where average has one", describe(p), TypeError)
        if isinstance(a, Tensor) and a.is_floating_point() != p.is_floating_point():
            expected = f"of the same kind as average's {short(a.dtype)}"
            fail("ema_update", join_path("params", name), expected, short(p.dtype), TypeError)
    _no_pairs("ema_update", "params", given, params)
    made = [a if in_place else p for a, p in zip(ours, given, strict=True)]
    with torch.no_grad():
        for i in floats:
            check("ema_update", join_path("average", names[i]), ours[i], tuple(given[i].shape), FLOATS, given[i])
        rows = [ours[i] if in_place else ours[i].clone() for i in floats]
        _blend(rows, [given[i].to(ours[i].dtype) for i in floats], decay)
        for i, row in zip(floats, rows, strict=True):
            made[i] = row
        for i, p in enumerate(given):
            if in_place and i not in set(floats) and isinstance(p, Tensor):
                ours[i].copy_(p)
    return average if in_place else with_leaves(average, made)


def _blend(averages: list[Tensor], params: list[Tensor], decay: float | Tensor) -> None:
    if not averages:
        return
    if isinstance(decay, Tensor):
        for a, p in zip(averages, params, strict=True):
            a.lerp_(p, (1 - decay.double()).to(a.dtype))  # 1 - decay has digits that the decay's own dtype lacks
    else:
        torch._foreach_lerp_(averages, params, 1 - decay)
