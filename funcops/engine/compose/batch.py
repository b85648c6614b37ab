"""`batch_wgrads`: many pending weight gradients in few matrix products.

Every op returns its weight gradient as products (`Op.products`). Products of one class are joined at the end; any other gradient is
added as the op's `wgrad` would add it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor, promote_types
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.compiler import is_dynamo_compiling

from funcops.engine.backend import notes, scopes, wide
from funcops.engine.contract.op import Op, takes_op
from funcops.engine.contract.schema import Donated
from funcops.engine.errors import FLOATS, DonatedError, describe, fail, in_step, one_of, require, require_type
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.trees import fake, structure, tensors, tree_map, tree_map_tensors

__all__ = ["batch_wgrads"]

HOW = ("each", "concatenate", "batch", "group")


@takes_op
def batch_wgrads(op: Op, pendings: Sequence[Any], cfg: Any, *, into: Any = None, how: str | None = None) -> Any:
    """The sum of `op.wgrad(pending, cfg)` over the pendings (microbatches), added to `into` if given.

    Products of linear layers run together, wherever in a chain or a traced module they are: also in low precision, over ranks and
    of groups, each kind with its own. `how`: "concatenate" products for one weight along tokens, "batch" products of one shape
    (`torch.bmm`), "group" products that differ only in tokens (`grouped_mm`), "each" alone; products that cannot be joined so run
    alone, as codes with a scale for a whole tensor do. By default the way that a measured table says is fastest for the device,
    dtype and sizes (`docs/benchmarks/cpu-wgrads.csv`, made by `python -m benchmarks wgrads`). The results equal the one-by-one sums
    up to the order of addition; without `into` gradients of 16 bits are summed in float32, and rounded at the end, to the widest
    dtype among the pendings.

    Raises what `op.wgrad` raises, before anything is added to `into`, and `ValueError` for an unknown `how` or without any pending.

    >>> import torch
    >>> from funcops import LinearConfig, batch_wgrads, linear, random
    >>> cfg, pendings = LinearConfig(2, 1), []
    >>> params = linear.init(cfg, key=random.key(0))
    >>> for microbatch in range(3):
    ...     y, residuals = linear.fwd(params, torch.ones(4, 2), cfg)
    ...     pendings.append(linear.dgrad(residuals, torch.ones(4, 1), cfg)[1])
    ...
    >>> batch_wgrads(linear, pendings, cfg).weight
    tensor([[12., 12.]])
    """
    require_type("batch_wgrads", "pendings", pendings, list, tuple)
    require(len(pendings) > 0, "batch_wgrads", "pendings", "at least one", "none")
    require(how is None or how in HOW, "batch_wgrads", "how", f"None, or {one_of(map(repr, HOW), repr(how))}", repr(how))
    like, sums = (None, into) if into is not None else _zeros(op, pendings, cfg)
    if into is not None:
        _check_all(op, pendings, cfg, into)
    found: dict[Any, list[Any]] = {}
    for pending in pendings:
        # a gradient that cannot be joined is in `sums` when the call returns, and not among the products
        for product in op.products(pending, cfg, into=sums):
            found.setdefault(type(product), []).append(product)
    for kind, products in found.items():
        kind.join(products, how)
    if scopes.on == scopes.NOTED:
        notes.tell_by_step("sums", sums)
    return sums if like is None else tree_map(lambda t, wanted: t if t is None else t.to(wanted.dtype), sums, like)


def _check_all(op: Op, pendings: Sequence[Any], cfg: Any, into: Any) -> None:
    """Raise what `op.wgrad` would raise for any of the pendings."""
    given = set()
    for i, pending in enumerate(pendings):
        where, node = f"batch_wgrads: pendings.{i}", pending
        if type(pending) is Donated:
            # looked at and left in its cell: `op.products` takes it, once every pending has passed
            node = pending._node
            if node is None or id(pending) in given:
                raise DonatedError(f"{where}: must be unused, got one that was given away and taken")
            given.add(id(pending))
        if node is None:
            continue
        if getattr(node, "kind", "") != "pending":
            fail(where, "it", "a pending", describe(node), TypeError)
        # a traced call adds nothing before it raises, and the compiler of torch 2.11 compares nested configs without end
        if not is_dynamo_compiling() and node.cfg is not cfg and node.cfg != cfg:
            try:  # a skip's pending, for example, has the config of its body
                _abstract(op, node, cfg)
            except Exception as error:
                in_step(error, where)
                raise
        check_into_tree(where, into, op, cfg, node)


def _abstract(op: Op, node: Any, cfg: Any) -> Any:
    """The gradients that will come, from a run without data."""
    if is_dynamo_compiling():  # a tracer refuses fake tensors, and its graph drops products that nobody reads
        return op.wgrad(node, cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return op.wgrad(tree_map_tensors(fake, node), cfg)


def _zeros(op: Op, pendings: Sequence[Any], cfg: Any) -> tuple[Any, Any]:
    """The gradients that will come, without data, in the widest dtype among the pendings; and zeros in which their sums are
    rounded once: of float32 for 16 bits, in which a sum stops growing at 256 times what is added."""
    forms: dict[Any, Any] = {  # one of the pendings of each kind: some may lack gradients that others have, or have other dtypes
        (
            getattr(getattr(node, "needs", None), "params", None),
            None if is_dynamo_compiling() else structure(node),  # codes of 8 bits have the dtype that they stand for there
            *[t.dtype for t in tensors(node)],
        ): node
        for node in [p._node if type(p) is Donated else p for p in pendings]
    }
    shaped = reduce(lambda a, b: tree_map(_wider, a, b), [_abstract(op, node, cfg) for node in forms.values()])
    # a real tensor to make the sums like: zeros made of a fake one would be fake, too
    like = next((t for node in forms.values() for t in tensors(node)), None)

    def zeros(t: Any) -> Any:
        if t is None:
            return None
        if like is None or not isinstance(t, Tensor):
            return fail("batch_wgrads", "gradient", "a tensor", describe(t), TypeError)
        return like.new_zeros(t.shape, dtype=wide(t.dtype) if t.dtype in FLOATS else t.dtype)  # an amax in integers stays one

    return shaped, tree_map(zeros, shaped)


def _wider(a: Any, b: Any) -> Any:
    """The gradient of a param that is not None, in a dtype that holds both."""
    return b if a is None else a if b is None else a.to(promote_types(a.dtype, b.dtype))
