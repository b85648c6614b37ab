"""An activation of x + b; its backward, and a dropout's, with the gradient of b. x, y, dy, dz: [*, D]; b: [D]; one dtype."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels.activation import ACTIVATIONS
from funcops.library.kernels.pointwise import dropout


@kernel()
def bias_activation_fwd(x: Tensor, b: Tensor, kind: str) -> Tensor:
    """y = f(x + b), rounded once."""
    dtype = wide(x.dtype)
    return ACTIVATIONS[kind].forward(x.to(dtype) + b.to(dtype)).to(x.dtype)


@kernel()
def bias_activation_bwd(dy: Tensor, x: Tensor, b: Optional[Tensor], kind: str, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    """dz = dy f'(x + b), which is the gradient of x; and db, the sum of dz over rows, as partial sums [P, D] in the wide dtype.
    Without b, x already is the sum."""
    f, dtype = ACTIVATIONS[kind], wide(x.dtype)
    z = x.to(dtype) if b is None else x.to(dtype) + b.to(dtype)
    dz = f.backward(dy.to(dtype), z, f.forward(z) if f.reads_y else None)
    return dz.to(x.dtype), dz.reshape(-1, dz.shape[-1]).sum(0, keepdim=True) if db else None


@kernel(mutates=("dy",))
def activation_bwd_recompute(dy: Tensor, x: Tensor, kind: str, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    """Compute `bias_activation_bwd` without b, and write the forward's y over dy, which is contiguous."""
    dz, parts = bias_activation_bwd.kernel.torch_impl(dy, x, None, kind, db)
    dy.copy_(ACTIVATIONS[kind].forward(x.to(wide(x.dtype))))
    return dz, parts


@kernel()
def dropout_bwd_sums(dy: Tensor, key: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute `dropout` of dy, and the sum of its unrounded rows as partial sums [P, D] in the wide dtype."""
    dx = dropout(dy.to(wide(dy.dtype)), key, p)
    return dx.to(dy.dtype), dx.reshape(-1, dx.shape[-1]).sum(0, keepdim=True)
