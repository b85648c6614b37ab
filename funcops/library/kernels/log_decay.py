"""The logarithm of a learned decay. x: [*, H], of a float dtype; a_log, dt_bias: [H]; g, dg: [*, H], in the wide dtype."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from funcops.engine.backend import kernel, wide


@kernel(library=True)
def log_decay_fwd(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(a_log) softplus(x + dt_bias); softplus(z) is z above 20, as torch's."""
    dtype = wide(x.dtype)
    return F.softplus(x.to(dtype) + dt_bias.to(dtype)) * -a_log.to(dtype).exp()


@kernel(library=True)
def log_decay_bwd(
    dg: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor, dx: bool, da_log: bool, dbias: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """dx = -dg exp(a_log) sigmoid(x + dt_bias); da_log = sum over rows of dg g, ddt_bias = sum of dx, both [1, H] and wide."""
    dtype, heads = wide(x.dtype), x.shape[-1]
    z, rate = x.to(dtype) + dt_bias.to(dtype), -a_log.to(dtype).exp()
    dz = torch.ops.aten.softplus_backward.default(dg * rate, z, 1.0, 20.0) if dx or dbias else None
    of_log = (dg * F.softplus(z)).reshape(-1, heads).sum(0, keepdim=True) * rate if da_log else None
    of_bias = dz.reshape(-1, heads).sum(0, keepdim=True) if dbias and dz is not None else None
    return dz.to(x.dtype) if dx and dz is not None else None, of_log, of_bias
