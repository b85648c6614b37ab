"""interleave: a body on n parts of the rows, whose communication is in flight while the other parts compute.

    x = (x_0, ..., x_(n-1))        y = (body(x_0), ..., body(x_(n-1)))        parts along dimension 0, of equal length

The results have the bits of n microbatches, one after another: y and dx are the rows of all parts, dparams is the sum over the
parts, in their order, or each is added to `into` in turn. The parts run in turns: each runs up to the point where it would wait for
communication that it has started, forward and backward; then the next part runs. So the rows that a mixture of experts sends
(`dist.dispatch`, `dist.combine`, `dist.parallel_experts`) are in flight during products of another part, wherever in the body they
are sent. Any other op runs as it does alone, and a body that sends nothing runs on one part after another.

An op that looks at all rows at once (the losses and the capacity of a router, a recipe with one scale for a tensor) sees only a
part's rows, as with microbatches. x: [n m, *], a tensor or a tuple of tensors, of any dtype; y: [n m, *], a tensor. Extras are
given to every part, and their gradients summed, except the extras in `by_rows`, which are divided as x is; the number of the part
is folded into every random key, of extras and of weights in codes. Outputs of the body are stacked, part i's at [i], and so is
their part of dy. Params and their paths are the body's. Kept: what each part keeps, with views of x; residuals and pending are
dicts by number of the part. DeepSeek-V3, arXiv:2412.19437; Megatron-Core overlaps expert parallelism so.

>>> import torch
>>> from funcops import InterleaveConfig, LinearConfig, interleave, linear, random
>>> cfg = InterleaveConfig(linear, LinearConfig(4, 3), 2)
>>> params = interleave.init(cfg, key=random.key(0))
>>> y, residuals = interleave.fwd(params, torch.ones(6, 4), cfg)
>>> y.shape, residuals[1].x.shape
(torch.Size([6, 3]), torch.Size([3, 4]))
>>> dparams, dx = interleave.bwd(residuals, torch.ones(6, 3), cfg)
>>> dparams.bias, dx.shape
(tensor([6., 6., 6.]), torch.Size([6, 4]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from funcops.engine.compose.layers import like_the_first, outputs_by_layer
from funcops.engine.compose.step import OneBody, bundle, check_body, note, split_x
from funcops.engine.contract import functions
from funcops.engine.contract.configs import Width, require_config
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op, config, dgrad_of, init_of, make_op
from funcops.engine.contract.pausing import take_turns
from funcops.engine.contract.schema import open_node
from funcops.engine.contract.walk import steps, ties
from funcops.engine.errors import describe, fail, require, require_type
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.values import abstract_params, add, fold_keys
from funcops.engine.residuals.nested import nested, part
from funcops.engine.trees import WithExtras, leaves, tree_map

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp

__all__ = ["InterleaveConfig", "InterleavePending", "InterleaveResiduals"]
__all__ += ["interleave", "interleave_bwd", "interleave_dgrad", "interleave_fwd", "interleave_init", "interleave_wgrad"]


@config
class InterleaveConfig(OneBody):
    """The body (an op and its config), and the number of `microbatches` (n). `by_rows`: the extras with as many rows as x, which
    are divided with it."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    microbatches: int = field(default=2, kw_only=False)
    by_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = "InterleaveConfig"
        check_body(where, self.op, self.cfg)
        require(self.microbatches >= 1, where, "microbatches", "at least 1", self.microbatches)
        # a key of the op itself is a part of its x, and would be divided as rows are
        require(not self.op.keyed_by(self.cfg), where, "op", "one without a random key (put it in a chain)", self.op.name)
        require_type(where, "by_rows", self.by_rows, tuple)
        known = [name for name in self.cfg.extras if name not in self.cfg.keys]
        wanted = f"names of extras that are not keys ({', '.join(known) or 'none here'})"
        require(set(self.by_rows) <= set(known), where, "by_rows", wanted, self.by_rows)
        mixing = [one for one in steps(self.cfg, op=self.op) if one.cfg.attends or one.cfg.mixes_positions]
        note(self, extras=self.cfg.extras, outputs=self.cfg.outputs, keys=self.cfg.keys, tied=bool(ties(self.cfg)))
        recipes = [one.cfg.low_recipe for one in steps(self.cfg, op=self.op)]
        note(self, mixing=(mixing[0].path or self.op.name) if mixing else "")
        # a single part keeps the keys of its weights as they are, and so has the bits of the body alone
        note(self, rounds=self.microbatches > 1 and any([one is not None and one.stochastic for one in recipes]))

    mixing: ClassVar[str]  # the path of the first step that mixes positions
    tied: ClassVar[bool]
    rounds: ClassVar[bool]  # whether weights have keys, by which dy is rounded

    @property
    def side_by_side(self) -> int:  # type: ignore[override]
        return self.microbatches

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`."""
        return self.cfg.follow(where, path, width)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return abstract_params(self.op, self.cfg)


InterleaveResiduals, InterleavePending = nested("Interleave", "an interleave, by number of the part", __name__)


@init_of(InterleaveConfig)
def interleave_init(cfg: InterleaveConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params."""
    return cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)


def _calls(cfg: InterleaveConfig, which: str, given: Sequence[tuple[Any, ...]], **options: Any) -> list[Any]:
    """The results of the body's function for each part: side by side, if it can pause. A compiler places waits by itself, and
    checks look at whole calls."""
    if cfg.op.pausing is None or is_dynamo_compiling() or functions.any_autocast():
        return [getattr(cfg.op, which)(*args, cfg.cfg, **options) for args in given]
    return take_turns([getattr(cfg.op.pausing, which)(*args, cfg.cfg, **options) for args in given])


def _rows(where: str, name: str, tree: Any, cfg: InterleaveConfig, positions: bool = False) -> list[Any]:
    """The parts of a tree of tensors along dimension 0."""
    n, sizes = cfg.microbatches, set()
    for t in leaves(tree):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dim() == 0:
            fail(where, name, "tensors of at least one dimension, which has the rows", describe(t), TypeError)
        # ids are [rows, positions], activations have features behind these
        if positions and cfg.mixing and t.dim() < 2 + t.is_floating_point():
            wanted = f"with rows before its positions, which {cfg.mixing} mixes (add a dimension, of a multiple of {n})"
            fail(where, name, wanted, describe(t))
        sizes.add(t.shape[0])
    if len(sizes) > 1 or any([size % n for size in sizes]):
        remedy = "pad the batch, or choose another number; packed sequences, which are one row, run one microbatch after another"
        wanted = f"of one number of rows, which {n} microbatches divide ({remedy})"
        fail(where, name, wanted, " and ".join(map(str, sorted(sizes))))
    # x itself and not a view of it: the body keeps its input as the very same object
    if n == 1:
        return [tree]
    length = sizes.pop() // n if sizes else 0
    return [tree_map(lambda t, i=i: None if t is None else t.narrow(0, i * length, length), tree) for i in range(n)]


def _given(x: Any, cfg: InterleaveConfig) -> list[Any]:
    """The x of each part."""
    where = "interleave_fwd"
    main, extras = split_x(where, x, cfg)
    mains = _rows(where, "x.main" if extras else "x", main, cfg, positions=True)
    if not extras:
        return mains
    # a dict for each part, as `bundle` puts the folded keys into it
    own = [dict(extras) for _ in mains]
    for name in cfg.by_rows:
        for one, rows in zip(own, _rows(where, f"x.extras.{name}", extras[name], cfg), strict=True):
            one[name] = rows
    return [bundle(rows, one, cfg.keys, i, True) for i, (rows, one) in enumerate(zip(mains, own, strict=True))]


def interleave_fwd(params: Any, x: Any, cfg: InterleaveConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Run the body on each part of x. Raises `ValueError` for rows that the number of microbatches does not divide, and for an x
    without rows before the positions that a step mixes; `TypeError` for a y that is not a tensor with the rows of x; and what the
    body raises."""
    require_config("interleave_fwd", cfg, InterleaveConfig)
    if needs is not Needs.ALL:
        check_needs("interleave_fwd", needs, params, x)
    given = _given(x, cfg)
    own = [fold_keys(params, i) if cfg.rounds else params for i in range(len(given))]
    results = _calls(cfg, "fwd", list(zip(own, given, strict=True)), needs=needs)
    rows = next(t.shape[0] for t in leaves(given[0].main if cfg.extras else given[0]) if t is not None)
    found: dict[str, list[Any]] = {name: [] for name in cfg.outputs}
    mains = []
    for y, _ in results:
        for name, outputs in found.items():
            outputs.append(like_the_first("interleave_fwd", name, y.extras[name], outputs, "microbatch"))
        mains.append(y.main if found else y)
        if not isinstance(mains[-1], Tensor) or mains[-1].dim() == 0 or mains[-1].shape[0] != rows:
            wanted = f"one tensor with the {rows} rows of x (leave what sums over rows, as a loss does, outside of the body)"
            fail("interleave_fwd", "y of the body", wanted, describe(mains[-1]), TypeError)
    kept = InterleaveResiduals(dict(enumerate([kept for _, kept in results])), cfg=cfg, needs=needs) if needs else None
    y = _joined(mains)
    return (WithExtras(y, {name: torch.stack(outputs) for name, outputs in found.items()}) if found else y), kept


def _dys(where: str, dy: Any, cfg: InterleaveConfig) -> list[Any]:
    """The dy of each part."""
    if not cfg.outputs:
        return _rows(where, "dy", dy, cfg)
    dy, outputs = outputs_by_layer(where, dy, cfg.outputs, cfg.microbatches, "microbatch")
    found = []
    for main, own in zip(_rows(where, "dy.main", dy, cfg), outputs, strict=True):
        # None as a whole: so an op is told that no gradient comes
        found.append(None if main is None and all([d is None for d in own.values()]) else WithExtras(main, own))
    return found


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of all parts, of a tree of tensors or None."""
    return parts[0] if len(parts) == 1 else tree_map(lambda *ts: None if ts[0] is None else torch.cat(ts), *parts)


def _dx(found: Sequence[Any], cfg: InterleaveConfig) -> Any:
    """dx, from the dx of each part."""
    if not cfg.extras:
        return _joined(found)
    extras: dict[str, Any] = {}
    for name in cfg.extras:
        own = [one.extras.get(name) for one in found]
        extras[name] = (_joined if name in cfg.by_rows else _total)(own)
    return WithExtras(_joined([one.main for one in found]), extras)


def _total(found: Sequence[Any]) -> Any:
    total = found[0]
    for one in found[1:]:
        total = add(total, one)
    return total


@dgrad_of(InterleaveResiduals)
def interleave_dgrad(residuals: Any, dy: Any, cfg: InterleaveConfig) -> tuple[Any, Any]:
    """The dgrads of all parts. Returns dx and the pending weight gradients by part."""
    dys = _dys("interleave_dgrad", dy, cfg)
    results = _calls(cfg, "dgrad", [(part(residuals, i), one) for i, one in enumerate(dys)])
    waiting = [pending for _, pending in results]
    some = any([pending is not None for pending in waiting])
    pending = InterleavePending(dict(enumerate(waiting)), cfg=cfg, needs=residuals.needs) if some else None
    return _dx([dx for dx, _ in results], cfg), pending


def interleave_wgrad(pending: Any, cfg: InterleaveConfig, *, into: Any = None) -> Any:
    """The weight gradients of one part after another; added to `into` if given."""
    total = None
    for waiting in _pendings(pending, cfg, into):
        found = cfg.op.wgrad(waiting, cfg.cfg, into=into)
        # with `into` every wgrad returns the accumulators, which hold the sum already
        total = found if into is not None or total is None else add(total, found)
    return total


def _products(pending: Any, cfg: InterleaveConfig, *, into: Any) -> list[Any]:
    return [one for waiting in _pendings(pending, cfg, into) for one in cfg.op.products(waiting, cfg.cfg, into=into)]


def _pendings(pending: Any, cfg: InterleaveConfig, into: Any) -> list[Any]:
    """The pendings of the parts, after every check."""
    require_config("interleave_wgrad", cfg, InterleaveConfig)
    node = None if pending is None else open_node("interleave_wgrad", pending, InterleavePending, cfg)
    if into is not None:
        check_into_tree("interleave_wgrad", into, interleave, cfg, node)
    return [None if node is None else part(node, i) for i in range(cfg.microbatches)]


def interleave_bwd(residuals: Any, dy: Any, cfg: InterleaveConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward of all parts. Returns `(dparams, dx)`."""
    require_config("interleave_bwd", cfg, InterleaveConfig)
    if cfg.tied:  # parts that run in turns would add to an accumulator of several steps in another order than one after another
        dx, pending = interleave_dgrad(residuals, dy, cfg)
        return interleave_wgrad(pending, cfg, into=into), dx
    node = open_node("interleave_bwd", residuals, InterleaveResiduals, cfg)
    if into is not None:
        # for all parts at once: they share the accumulators, and the first would add before the last has checked
        check_into_tree("interleave_bwd", into, interleave, cfg, node, dy)
    dys = _dys("interleave_bwd", dy, cfg)
    results = _calls(cfg, "bwd", [(part(node, i), one) for i, one in enumerate(dys)], into=into)
    dx = _dx([dx for _, dx in results], cfg)
    return (_total([dparams for dparams, _ in results]) if into is None else into), dx


interleave: TypedOp[Any, Any, InterleaveConfig, Any, Any] = make_op(
    "interleave",
    InterleaveConfig,
    init=interleave_init,
    fwd=interleave_fwd,
    dgrad=interleave_dgrad,
    wgrad=interleave_wgrad,
    bwd=interleave_bwd,
    products=_products,
)
