"""Errors for the other kinds of differentiation: `torch.func`, forward mode and batched gradients. A node supports only reverse
mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from funcops.engine.backend import select
from funcops.engine.contract.op import Op

_REVERSE = "take the product with the Jacobian's transpose, with torch.autograd.grad or funcops.vjp"
_batched, _legacy_batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor


def refuse_transforms(op: Op) -> None:
    """Raise for a call inside a `torch.func` transform."""
    raise RuntimeError(
        f"{op.name}: must run outside of torch.func transforms (grad, vjp, vmap), got one around it. Use funcops.value_and_grad or "
        "funcops.vjp, which need no autograd, or torch.autograd.grad"
    )


def refuse_tangents(op: Op, leaves: Sequence[Tensor]) -> None:
    """Raise if a leaf has a tangent (`torch.autograd.forward_ad`) that the call would lose: neither a node nor a Triton kernel has
    forward mode. The torch implementation without a node has it, because its functions are torch's."""
    if all([forward_ad.unpack_dual(t).tangent is None for t in leaves]):
        return
    if torch.is_grad_enabled() and any([t.requires_grad for t in leaves]):
        raise RuntimeError(
            f"{op.name}: x and params must be without requires_grad if one has a tangent (forward_ad.make_dual), got both. "
            f"Detach them, or {_REVERSE}"
        )
    if select.wants_triton(leaves[0]):
        raise RuntimeError(
            f"{op.name}: x and params must be without tangents (forward_ad.make_dual) when Triton's kernels run, got one. Call it "
            f'under funcops.backend("torch"), or {_REVERSE}'
        )


def refuse_batches(op: Op, dys: Sequence[Any], error: Exception) -> None:
    """Raise a clear error if a backward failed on a batch of gradients, which most torch functions support and Triton's kernels do
    not."""
    if any([isinstance(d, Tensor) and (_batched(d) or _legacy_batched(d)) for d in dys]):
        raise RuntimeError(
            f"{op.name}_bwd: dy must be one gradient here, got a batch (is_grads_batched, vectorize): {error}. Call autograd.grad "
            "once per gradient"
        ) from error
