"""`stow` and `fetch`: residuals or pendings put away in fewer bytes, or in the host's memory, while they wait."""

from __future__ import annotations

from typing import Any, TypeVar

from funcops.contract.schema import Saved
from funcops.errors import require_type
from funcops.residuals.forms import one_form_each, pack, unpack
from funcops.residuals.policy import Compress, Offload
from funcops.trees import tree_map

T = TypeVar("T")


def stow(kept: T, action: Offload | Compress) -> T:
    """The tree with every tensor that the action helps in its other form: `Offload()` or `Compress(codec)`.

    What a codec loses is stated in `funcops.residuals.codec`; it leaves a `QTensor` as it is. A tree of any kind: residuals,
    pendings, lists of them. Raises `StaleResidualError` where something in it was written to since the forward, as the copy would
    not show it.

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
    """The tree as a backward reads it. What was never stowed is the same object.
    Raises `StaleResidualError` for what was written to.

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
    """Residuals and pendings in a tree must be fresh: what is made of them could not show it."""

    def check(value: Any) -> bool:
        if (isinstance(value, Saved) and value.stale()) or (hasattr(value, "had") and not value.fresh()):
            value.complain(where)
        return False

    tree_map(lambda leaf: leaf, tree, is_leaf=check)
