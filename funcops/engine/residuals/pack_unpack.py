"""`pack` and `unpack`: compress or offload residuals or pendings while they wait."""

from __future__ import annotations

from typing import Any, TypeVar

from funcops.engine.contract.schema import Saved
from funcops.engine.errors import require_type
from funcops.engine.residuals.forms import from_form, one_form_each, to_form
from funcops.engine.residuals.policy import Compress, Offload
from funcops.engine.trees import tree_map

__all__ = ["pack", "unpack"]

T = TypeVar("T")


def pack(kept: T, action: Offload | Compress) -> T:
    """Pack every tensor of a tree that the action, `Offload()` or `Compress(codec)`, moves or makes smaller.

    `engine.residuals.codec` states the errors of codecs; a `QTensor` is not compressed. The tree may be residuals, pendings, or
    lists of them. Raises `StaleResidualError` if a tensor in it was written to since the forward, because a copy would hide that.

    >>> import torch
    >>> from funcops import Compress, SoftcapConfig, pack, report, softcap, unpack
    >>> x = torch.ones(4, 128)
    >>> y, residuals = softcap.fwd(None, x, SoftcapConfig(30.0))
    >>> waiting = pack(residuals, Compress("fp8"))
    >>> report(residuals).kept_bytes, report(waiting).kept_bytes
    (2048, 516)
    >>> softcap.bwd(unpack(waiting), torch.ones(4, 128), SoftcapConfig(30.0))[1].shape
    torch.Size([4, 128])
    """
    require_type("pack", "action", action, Offload, Compress)
    _check_fresh("pack", kept)
    with one_form_each():
        return to_form(kept, action)  # type: ignore[no-any-return]


def unpack(packed: T) -> T:
    """Unpack a tree for its backward. A tensor that was not packed stays the same object.
    Raises `StaleResidualError` for a tensor that was written to.

    >>> import torch
    >>> from funcops import Offload, SoftcapConfig, pack, softcap, unpack
    >>> y, residuals = softcap.fwd(None, torch.ones(2), SoftcapConfig(30.0))
    >>> unpack(residuals).x is residuals.x
    True
    >>> unpack(pack(residuals, Offload())).x
    tensor([1., 1.])
    """
    _check_fresh("unpack", packed)
    return from_form(packed)  # type: ignore[no-any-return]


def _check_fresh(where: str, tree: Any) -> None:
    """Raise unless residuals and pendings in a tree are fresh: a tree derived from stale ones would look fresh."""

    def check(value: Any) -> bool:
        if (isinstance(value, Saved) and value.stale()) or (hasattr(value, "had") and not value.fresh()):
            value.complain(where)
        return False

    # `check` sees every node on the way down, and takes none for a leaf
    tree_map(lambda leaf: leaf, tree, is_leaf=check)
