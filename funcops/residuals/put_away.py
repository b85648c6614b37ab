"""`stow` and `fetch`: compress or offload residuals or pendings while they wait."""

from __future__ import annotations

from typing import Any, TypeVar

from funcops.contract.schema import Saved
from funcops.errors import require_type
from funcops.residuals.forms import one_form_each, pack, unpack
from funcops.residuals.policy import Compress, Offload
from funcops.trees import tree_map

T = TypeVar("T")


def stow(kept: T, action: Offload | Compress) -> T:
    """Pack every tensor of a tree that the action, `Offload()` or `Compress(codec)`, moves or makes smaller.

    `funcops.residuals.codec` states the errors of codecs; a `QTensor` is not compressed. The tree may be residuals, pendings, or
    lists of them. Raises `StaleResidualError` if a tensor in it was written to since the forward, because a copy would hide that.

    >>> import torch
    >>> from funcops import Compress, SoftcapConfig, fetch, report, softcap, stow
    >>> x = torch.ones(4, 128)
    >>> y, residuals = softcap.fwd(None, x, SoftcapConfig(30.0))
    >>> waiting = stow(residuals, Compress("fp8"))
    >>> report(residuals).kept_bytes, report(waiting).kept_bytes
    (2048, 516)
    >>> softcap.bwd(fetch(waiting), torch.ones(4, 128), SoftcapConfig(30.0))[1].shape
    torch.Size([4, 128])
    """
    require_type("stow", "action", action, Offload, Compress)
    _check_fresh("stow", kept)
    with one_form_each():
        packed: T = pack(kept, action)
    return packed


def fetch(stowed: T) -> T:
    """Unpack a tree for its backward. A tensor that was not stowed stays the same object.
    Raises `StaleResidualError` for a tensor that was written to.

    >>> import torch
    >>> from funcops import Offload, SoftcapConfig, fetch, softcap, stow
    >>> y, residuals = softcap.fwd(None, torch.ones(2), SoftcapConfig(30.0))
    >>> fetch(residuals).x is residuals.x
    True
    >>> fetch(stow(residuals, Offload())).x
    tensor([1., 1.])
    """
    _check_fresh("fetch", stowed)
    fetched: T = unpack(stowed)
    return fetched


def _check_fresh(where: str, tree: Any) -> None:
    """Raise unless residuals and pendings in a tree are fresh: a tree derived from stale ones would look fresh."""

    def check(value: Any) -> bool:
        if (isinstance(value, Saved) and value.stale()) or (hasattr(value, "had") and not value.fresh()):
            value.complain(where)
        return False

    tree_map(lambda leaf: leaf, tree, is_leaf=check)
