"""Donation of residuals, so that memory falls during the backward."""

from __future__ import annotations

from typing import Any

from funcops.engine.contract.schema import Donated
from funcops.engine.errors import describe, fail

__all__ = ["donate"]


def donate(kept: Any) -> Any:
    """Move the contents of `kept` (residuals or pending) into a one-shot cell for the next backward, or of a cache of
    `funcops.models` into a cell for the next `decode`.

    Each leaf is dropped as soon as the backward has read it. Any later use of `kept`, or a second use of the cell, raises
    `DonatedError`. None and a cell are returned unchanged. Raises `TypeError` for anything else.

    >>> import torch
    >>> from funcops import SoftcapConfig, donate, softcap
    >>> y, residuals = softcap.fwd(None, torch.zeros(2), SoftcapConfig(30.0))
    >>> softcap.bwd(donate(residuals), torch.ones(2), SoftcapConfig(30.0))[1]
    tensor([1., 1.])
    >>> softcap.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))
    Traceback (most recent call last):
        ...
    funcops.engine.errors.DonatedError: softcap_bwd: residuals must be unused, got SoftcapResiduals given away with donate()
    """
    if kept is None or type(kept) is Donated:
        return kept
    cell = getattr(kept, "cell", None)
    if cell is not None and (given := cell()) is not None:  # of a fresh node, which most are
        return given
    # asked by the method, not the class: the cache of a model, of which this file knows nothing, has it, too
    if not hasattr(kept, "give"):
        fail("donate", "kept", "residuals or pending of an op, or a cache", describe(kept), TypeError)
    if not kept.fresh():
        kept.complain("donate")
    return Donated(kept.give())
