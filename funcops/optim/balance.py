"""Load balancing of a router's experts by a bias, without an auxiliary loss."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.errors import FLOATS, check, fail, require_number


def balance(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The bias of a router (`RouteConfig(bias=True)`) after a step: `bias + rate sign(mean(n) - n)` (arXiv 2408.15664). bias: [E];
    load n: [E], integers or floats, the sum of the router's `load` over microbatches and ranks. A new tensor, in the dtype of bias.

    Raises `ValueError` or `TypeError` for a wrong shape, dtype or device.

    >>> import torch
    >>> from funcops.optim import balance
    >>> balance(torch.zeros(3), torch.tensor([10, 4, 1]), rate=0.5)
    tensor([-0.5000,  0.5000,  0.5000])
    """
    check("balance", "bias", bias, (...,), FLOATS)
    if bias.dim() != 1 or not bias.numel():
        fail("balance", "bias", "[E]", list(bias.shape))
    check("balance", "load", load, tuple(bias.shape), (torch.int32, torch.int64, *FLOATS), bias)
    require_number("balance", 0, rate=rate)
    exact = load.to(torch.float64 if load.is_floating_point() else torch.int64)
    return bias + rate * torch.sign(exact.sum() - exact * exact.numel()).to(bias.dtype)
