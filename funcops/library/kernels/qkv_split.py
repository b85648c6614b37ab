"""The parts of a joint projection, with q and k rotated. qkv: [*, T, (N + 2M) D]; q: [*, T, N, D], k, v: [*, T, M, D];
table: see `rope`; None without a rotation.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels.rope import rope_apply


@kernel(rows="each")
def qkv_split_fwd(
    qkv: Tensor, table: Optional[Tensor], heads: int, kv_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into q, k and v, each in its own memory."""
    parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), -2)
    own = [part.clone(memory_format=torch.contiguous_format) for part in (parts if table is None else parts[2:])]
    if table is None:
        return own[0], own[1], own[2]
    q, k = (rope_apply(t, table, interleaved, False) for t in parts[:2])
    return q, k, own[0]


@kernel(rows="each")
def qkv_split_bwd(dq: Tensor, dk: Tensor, dv: Tensor, table: Optional[Tensor], interleaved: bool) -> Tensor:
    """Join the gradients of q, k and v to d qkv."""
    if table is not None:
        dq, dk = (rope_apply(t, table, interleaved, True) for t in (dq, dk))
    return torch.cat((dq, dk, dv), -2).flatten(-2)
