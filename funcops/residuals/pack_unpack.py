"""`pack` and `unpack`: residuals or pendings in fewer bytes, or in the host's memory, while they wait."""

from __future__ import annotations

from typing import Any, TypeVar

from funcops.contract.schema import Saved
from funcops.errors import require_type
from funcops.residuals.forms import from_form, one_form_each, to_form
from funcops.residuals.policy import Compress, Offload
from funcops.trees import tree_map

T = TypeVar("T")


def pack(kept: T, action: Offload | Compress) -> T:
    """The tree with every tensor that the action helps in its other form: `Offload()` or `Compress(codec)`.

    What a codec loses is stated in `funcops.residuals.codec`; it leaves a `QTensor` as it is. A tree of any kind: residuals,
    pendings, lists of them. Raises `StaleResidualError` where something in it was written to since the forward, as the copy would
    not show it.

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
        packed: T = to_form(kept, action)
    return packed


def unpack(packed: T) -> T:
    """The tree as a backward reads it. A tree that was never packed is the same object.
    Raises `StaleResidualError` for what was written to.

    >>> import torch
    >>> from funcops import Offload, SoftcapConfig, pack, softcap, unpack
    >>> y, residuals = softcap.fwd(None, torch.ones(2), SoftcapConfig(30.0))
    >>> unpack(residuals).x is residuals.x
    True
    >>> unpack(pack(residuals, Offload())).x
    tensor([1., 1.])
    """
    _check_fresh("unpack", packed)
    unpacked: T = from_form(packed)
    return unpacked


def _check_fresh(where: str, tree: Any) -> None:
    """Residuals and pendings in a tree must be fresh: what is made of them could not show it."""

    def check(value: Any) -> bool:
        if (isinstance(value, Saved) and value.stale()) or (hasattr(value, "had") and not value.fresh()):
            value.complain(where)
        return False

    tree_map(lambda leaf: leaf, tree, is_leaf=check)
