"""What else differentiates: `torch.func`, forward mode and batched gradients. A node serves reverse mode alone, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from funcops.backend import select
from funcops.contract.op import Op

_REVERSE = "take the product with the Jacobian's transpose, with torch.autograd.grad or funcops.vjp"
_batched, _legacy_batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor


def refuse_transforms(op: Op) -> None:
    """Raise where a `torch.func` transform is around a call."""
    raise RuntimeError(
        f"{op.name}: must run outside of torch.func transforms (grad, vjp, vmap), got one around it. Use funcops.value_and_grad or "
        "funcops.vjp, which need no autograd, or torch.autograd.grad"
    )


def refuse_tangents(op: Op, leaves: Sequence[Tensor]) -> None:
    """Raise where a leaf has a tangent (`torch.autograd.forward_ad`) that the call would lose: a node has no forward mode, nor
    has a Triton kernel. The torch implementation has it, as its functions are torch's own."""
    if all([forward_ad.unpack_dual(t).tangent is None for t in leaves]):
        return
    if torch.is_grad_enabled() and any([t.requires_grad for t in leaves]):
        raise RuntimeError(
            f"{op.name}: x and params must be without requires_grad where one has a tangent (forward_ad.make_dual), got both. "
            f"Detach them, or {_REVERSE}"
        )
    if select.wants_triton(leaves[0]):
        raise RuntimeError(
            f"{op.name}: x and params must be without tangents (forward_ad.make_dual) where Triton's kernels run, got one. Call it "
            f'under funcops.backend("torch"), or {_REVERSE}'
        )


def refuse_batches(op: Op, dys: Sequence[Any], error: Exception) -> None:
    """Raise by name where a backward failed that was asked for several gradients at once, which most
    torch functions take and Triton's kernels do not."""
    if any([isinstance(d, Tensor) and (_batched(d) or _legacy_batched(d)) for d in dys]):
        raise RuntimeError(
            f"{op.name}_bwd: dy must be one gradient here, got a batch (is_grads_batched, vectorize): {error}. Call autograd.grad "
            "once for each gradient"
        ) from error
