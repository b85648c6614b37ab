"""An op whose gradients are summed over an axis, and its params sharded over it, as in ZeRO-3: each rank keeps 1/n of them, and has
them whole only while it computes.

    y = body(x; params)        params = the parts of all ranks, gathered

    dx = the body's dx        dparams_r = rank r's part of the body's dparams, summed over the ranks

Params and dparams are trees of shards (`funcops.dist.own_shards`), x and dx this rank's own, with the body's shapes and
dtypes. Kept: the body's residuals, without the params that they alias: dgrad gathers the params that it reads once
more. A weight gradient reads no params, except to recompute its x (the weight of a norm). In a `repeat` the params of a
layer are prefetched while the layer before it computes, and the sums of a layer's gradients are in flight while the next layer
computes; at most two layers are whole at a time. In a chain they are prefetched before, and summed behind, the next step that
computes much.

A weight with a recipe of square blocks (`Fp8Block`; `MXFP8(w_tile=(32, 32))`) whose shards are whole blocks is gathered as codes
and scales, 1.03 bytes an element or less in place of 2 or 4: each rank quantises its shard, and the whole has the bits of
quantising after the gather. Any other is gathered as it is: one scale needs the amax of the whole, and blocks that are not square
need other codes for dx.

With `stage=0`, plain data parallelism, params and dparams are whole on every rank, and only the sums are communicated; with
`stage=2` dparams are shards, 1/n of the bytes, and params are whole. Params may then be a working tree (`quantize_params`).

>>> import torch
>>> from funcops import LinearConfig, dist, linear, random
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ShardedConfig(linear, LinearConfig(2, 4), axis=mesh["dp"])
...     params = dist.sharded_init(cfg, key=random.key(0))
...     y, residuals = dist.sharded_fwd(params, torch.ones(3, 2), cfg)
...     dparams, dx = dist.sharded_bwd(residuals, torch.ones(3, 4), cfg)
...     return params.weight.shape, y.shape, dparams.bias
...
>>> run_ranks({"dp": 2}, each)
[(torch.Size([2, 2]), torch.Size([3, 4]), tensor([6., 6.])), (torch.Size([2, 2]), torch.Size([3, 4]), tensor([6., 6.]))]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from funcops.distributed.async_collectives import finish
from funcops.distributed.buckets import BUCKET_BYTES, part_shape
from funcops.distributed.checks import require_axis
from funcops.distributed.data import Landing, Reducing, reduce_start
from funcops.distributed.mesh import Axis
from funcops.distributed.shards import Gathering, own_shards, start_gathering
from funcops.engine.backend import tracing, wide
from funcops.engine.compose.step import AroundBody, check_body, note
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.marks import STAND_INS
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op, Prefetch, config, init_of, make_op
from funcops.engine.contract.schema import DGRAD, WGRAD, Donated, Pending, Residuals, open_node, saved, static
from funcops.engine.contract.walk import steps, ties
from funcops.engine.errors import describe_tree, fail, join_path, require, require_count, require_dtype, require_flag, short
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.forms import Layout
from funcops.engine.trees import (
    Aside,
    at,
    cast,
    constant_paths,
    has,
    leaves,
    put,
    replace,
    same_structure,
    stands_for_one,
    tensors,
    tree_map,
    tree_map_tensors,
    with_leaves,
)
from funcops.library.formats import Format, QWeight, quantize_tensor
from funcops.library.formats.recipes import Recipe

__all__ = ["ShardedConfig", "ShardedPending", "ShardedResiduals"]
__all__ += ["sharded", "sharded_bwd", "sharded_dgrad", "sharded_fwd", "sharded_init", "sharded_wgrad"]


@config
class ShardedConfig(AroundBody):
    """The body (an op and its config), and the `axis` over which its params are sharded. `also`: further axes over which gradients
    are summed, and whose ranks have the same shards (HSDP). `dtype`: the dtype of the whole params, if not the shards'.
    `grad_dtype`: of gradients, by default the shards'. `ordered`, `bucket_bytes`: see `reduce_start`. `reshard_after_forward`:
    whether the backward gathers the params again; else they stay whole until then (FSDP2's argument). `stage`: of ZeRO, 3, 2 (sums
    of gradients alone are sharded) or 0."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    axis: Axis
    also: tuple[Axis, ...] = ()
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    ordered: bool = True
    bucket_bytes: int = BUCKET_BYTES
    reshard_after_forward: bool = True
    stage: int = 3

    def __post_init__(self) -> None:
        check_body("ShardedConfig", self.op, self.cfg)
        require_flag("ShardedConfig", reshard_after_forward=self.reshard_after_forward)
        require(self.stage in (0, 2, 3), "ShardedConfig", "stage", "0, 2 or 3", self.stage)
        require_axis("ShardedConfig", self.axis)
        right = isinstance(self.also, tuple) and all(isinstance(axis, Axis) for axis in self.also)
        if not right:  # a text of the axes would read their ranks, by which a step is told apart
            fail("ShardedConfig", "also", "a tuple of Axis", repr(self.also))
        require(self.axis not in self.also, "ShardedConfig", "also", "other axes", str(self.axis))
        require_dtype("ShardedConfig", self.dtype)
        require_dtype("ShardedConfig", self.grad_dtype, name="grad_dtype")
        require_count("ShardedConfig", bucket_bytes=self.bucket_bytes)
        for part in steps(self.cfg, op=self.op):
            recipe = part.cfg.low_recipe
            if recipe is not None and (recipe.delayed or (recipe.stochastic and self.stage == 3)):
                wanted = "one without scales beside weights, whose amaxes are not summed (reduce_start after end_step)"
                if self.stage == 3:
                    others = "Fp8Current, Fp8Block and NVFP4(stochastic=False) have none"
                    wanted = f"one without scales or keys beside weights, which are not sharded ({others})"
                fail("ShardedConfig", join_path(part.path, "recipe"), wanted, type(recipe).__name__)
        require(not self.op.keyed_by(self.cfg), "ShardedConfig", "op", "one without a random key (put it in a chain)", self.op.name)
        note(self, extras=self.cfg.extras, outputs=self.cfg.outputs, keys=self.cfg.keys)
        note(self, like=abstract_params(self.op, self.cfg))
        note(self, constant=tuple(sorted(constant_paths(self.like))))
        note(self, coded=_formats_of(self) if self.stage == 3 and self.axis.size > 1 else {})

    constant: ClassVar[tuple[str, ...]]  # the paths of params without a gradient
    coded: ClassVar[dict[str, tuple[Format, torch.Size]]]  # of the weights gathered in codes, by path: the format and [O, I]

    @property
    def fsdp(self) -> Axis | None:  # type: ignore[override]
        """See `funcops.dist.specs_of`."""
        return self.axis if self.stage == 3 else None

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        n = self.axis.size if self.stage == 3 else 1
        return tree_map_tensors(lambda t: t.new_empty(part_shape(tuple(t.shape), n)), self.like)


def _formats_of(cfg: ShardedConfig) -> dict[str, tuple[Format, torch.Size]]:
    """The format and [O, I] of each weight whose codes can be made shard by shard, by path."""
    found, tied = {}, {name for pair in ties(cfg.cfg).items() for name in pair}
    for part in steps(cfg.cfg, op=cfg.op, layers=True):
        recipe, path = part.cfg.low_recipe, join_path(part.path, "weight")
        if recipe is None or path in tied or not has(cfg.like, path):
            continue
        shape = tuple(at(cfg.like, path).shape)
        if gathers_codes(recipe, shape, cfg.axis.size):
            found[path] = recipe.w, torch.Size(shape[-2:])
    return found


def gathers_codes(recipe: Recipe, shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a weight of this shape is gathered from `ranks` shards as codes of the recipe's `w`: one set of them serves for y and
    dx, and shards are whole blocks."""
    w, own = recipe.w, part_shape(shape, ranks)
    blocks = w.square and recipe.w_col is w and not w.whole
    return blocks and len(own) == len(shape) and own[-2] % w.tile[0] == 0


class ParamStandIn:
    """Takes a param's place in residuals. `leaf`: the index of its leaf, `part`: of the tensor, for a leaf in codes; `layout`: of a
    view in it."""

    __slots__ = ("layout", "leaf", "part")
    _version: ClassVar[tuple[()]] = ()  # without a tensor that could be written to
    holds_nothing: ClassVar[bool] = True  # for a checkpoint

    def __init__(self, leaf: int, layout: Layout | None, part: int = 0) -> None:
        self.leaf, self.layout, self.part = leaf, layout, part

    def back(self, whole: Sequence[Any]) -> Tensor:
        t: Tensor = leaves(whole[self.leaf])[self.part]
        if self.layout is None:
            return t
        return t.as_strided(self.layout.shape, self.layout.stride, t.storage_offset() + self.layout.offset)

    def __repr__(self) -> str:
        return f"ParamStandIn({self.leaf})"


STAND_INS.add(ParamStandIn)


class ShardedResiduals(Residuals):
    params: Any = saved("{shards}", alias="params", needed_by=DGRAD, of=("x", "params"), tree=True)
    body: Any = saved("{the body's}", needed_by=DGRAD | WGRAD, tree=True)
    out: torch.dtype | None = static()  # of the gradients, if the whole params have another


class ShardedPending(Pending):
    params: Any = saved("{shards}", alias="residuals.params", needed_by=WGRAD, tree=True)
    body: Any = saved("{the body's}", needed_by=WGRAD, tree=True)
    out: torch.dtype | None = static()


class Begun:
    """Shards, or the residuals of a forward, and their params: in flight, then whole, then taken."""

    __slots__ = ("flying", "given", "whole")

    def __init__(self, given: Any, flying: Gathering | None, whole: Any = None) -> None:
        self.given, self.flying, self.whole = given, flying, whole

    def ready(self) -> Begun:
        if self.flying is not None:
            self.whole, self.flying = finish(self.flying), None
        return self

    def take(self) -> Any:
        """Return the whole params, and no longer hold them."""
        whole = self.ready().whole
        self.whole = None
        return whole


def _gathering(shards: Any, cfg: ShardedConfig, where: str) -> Gathering:
    like = cfg.like
    if not same_structure(shards, like):
        fail(where, "params", f"shards like the params of {cfg.op.name}, {describe_tree(like)}", describe_tree(shards), TypeError)
    own, send = _cast(shards, cfg), functools.partial(_in_codes, cfg=cfg) if cfg.coded else None
    return start_gathering(where, "params", own, like, cfg.axis, cfg.bucket_bytes, send)


def _cast(shards: Any, cfg: ShardedConfig) -> Any:
    """Cast the shards to `cfg.dtype`, but params without a gradient to its wide dtype: 16 bits cannot hold the small steps of a
    router's bias."""
    if cfg.dtype is None:
        return shards
    own = cast(shards, cfg.dtype)
    for path in cfg.constant:
        t = at(shards, path)
        own = own if t is None else put(own, path, t.to(wide(cfg.dtype)))
    return own


def _in_codes(shards: Any, cfg: ShardedConfig) -> Any:
    """The shards, with the ones that are sent in codes as these, of the whole's shape."""
    for path, (format, shape) in cfg.coded.items():
        t = at(shards, path)
        if t is not None:
            q = quantize_tensor(t, format)
            scales = q.scales.reshape(*t.shape[:-2], -1, q.scales.shape[-1])
            shards = put(shards, path, QWeight(replace(q, scales=scales, shape=shape), None, None, Aside()))
    return shards


def _begin(given: Any, cfg: ShardedConfig) -> Begun:
    """Begin to gather params, from their shards or from residuals, donated or not."""
    node = given._node if type(given) is Donated else given
    if type(node) is ShardedResiduals:
        reads = node.fresh() and node.params is not None
        return Begun(given, _gathering(node.params, cfg, "sharded_bwd") if reads else None)
    if cfg.stage < 3:
        return Begun(given, None, _cast(given, cfg))
    return Begun(given, None if node is None else _gathering(given, cfg, "sharded_fwd"))


class _Open(NamedTuple):
    """The body's residuals or pending, donated, with its whole params; and the node's other fields."""

    body: Any
    whole: Any
    params: Any
    needs: Needs
    out: torch.dtype | None


def _opened(where: str, kept: Any, cls: Any, cfg: ShardedConfig, into: Any = None, dy: Any = None) -> _Open:
    """Open residuals or a pending, which may have begun to gather the params, and put the whole params into the body's."""
    require_config(where, cfg, ShardedConfig)
    begun = kept if type(kept) is Begun else None
    given = kept if begun is None else begun.given
    node = open_node(where, given, cls, cfg, dy=dy)
    if into is not None:
        check_into_tree(where, into, sharded, cfg, node, dy)
    params, body, needs, out = node.params, node.body, node.needs, node.out
    whole = None
    if params is not None:
        whole = finish(_gathering(params, cfg, where)) if begun is None else begun.take()
    found = leaves(whole, stands_for_one)
    return _Open(donate(tree_map(lambda t: t.back(found) if type(t) is ParamStandIn else t, body)), whole, params, needs, out)


def _stripped(kept: Any, whole: Any, shards: Any) -> tuple[Any, Any]:
    """The kept tree without the tensors that alias params, and the shards of these params, or None without any."""
    nodes = [(i, leaves(node)) for i, node in enumerate(leaves(whole, stands_for_one))]
    indexed = [((i, part), t) for i, own in nodes for part, t in enumerate(own) if isinstance(t, Tensor)]
    traced = tracing()
    same = {} if traced else {id(t): ParamStandIn(i, None, part) for (i, part), t in indexed}
    spans = {} if traced else _spans(indexed)
    read: set[int] = set()

    def strip(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if traced:  # the tracer of torch 2.11 has no id of a tensor that it has made
            stand_in = next((ParamStandIn(i, None, part) for (i, part), one in indexed if one is t), None)
        else:
            stand_in = same.get(id(t)) or _view(t, spans)
        if stand_in is None:
            return t
        read.add(stand_in.leaf)
        return stand_in

    body = tree_map(strip, kept)
    return body, with_leaves(shards, [t if i in read else None for i, t in enumerate(leaves(shards))]) if read else None


Spans = dict[int, list[tuple[int, int, tuple[int, int], torch.dtype]]]


def _spans(indexed: list[tuple[tuple[int, int], Tensor]]) -> Spans:
    """The spans of the leaves in each storage."""
    found: Spans = {}
    for i, t in indexed:
        start = int(t.storage_offset())
        found.setdefault(t.untyped_storage()._cdata, []).append((start, start + t.numel(), i, t.dtype))
    return found


def _view(t: Tensor, spans: Spans) -> ParamStandIn | None:
    if not spans:
        return None
    for start, end, (i, part), dtype in spans.get(t.untyped_storage()._cdata, ()):
        if start <= t.storage_offset() < end and t.dtype is dtype:
            layout = Layout.of(t)
            return ParamStandIn(i, layout._replace(offset=layout.offset - start), part)
    return None


@init_of(ShardedConfig)
def sharded_init(cfg: ShardedConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Any:
    """This rank's shards of the params that the body's init draws with the same key, on every mesh."""
    whole = cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)
    return own_shards(whole, cfg.axis) if cfg.stage == 3 else whole


def sharded_fwd(params: Any, x: Any, cfg: ShardedConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Gather the params, and run the body. Raises `TypeError` for params that are not like the body's, `ValueError`
    for shards of another shape, and what the body raises."""
    require_config("sharded_fwd", cfg, ShardedConfig)
    shards = params.given if type(params) is Begun else params
    if needs is not Needs.ALL:
        check_needs("sharded_fwd", needs, shards, x)
    out = _dtype_of(shards, cfg)
    whole = (params if type(params) is Begun else _begin(params, cfg)).take()
    y, kept = cfg.op.fwd(whole, x, cfg.cfg, needs=needs)
    if kept is None:
        return y, None
    body, read = _stripped(kept, whole, shards) if cfg.stage == 3 and cfg.reshard_after_forward else (kept, None)
    return y, ShardedResiduals.keep(cfg, needs, params=read, body=body, out=out)


def _dtype_of(shards: Any, cfg: ShardedConfig) -> torch.dtype | None:
    if cfg.grad_dtype is not None:
        return cfg.grad_dtype
    found = list(dict.fromkeys([t.dtype for t in tensors(shards)])) if cfg.dtype is not None else []
    require(len(found) < 2, "sharded_fwd", "params", "of one dtype, if cfg.dtype is given", ", ".join(map(short, found)))
    return found[0] if found else None


def sharded_dgrad(residuals: Any, dy: Any, cfg: ShardedConfig) -> tuple[Any, Any]:
    """The body's dx, and its pending."""
    at = _opened("sharded_dgrad", residuals, ShardedResiduals, cfg, dy=dy)
    dx, pending = cfg.op.dgrad(at.body, dy, cfg.cfg)
    if pending is None:
        return dx, None
    body, read = _stripped(pending, at.whole, at.params)
    return dx, ShardedPending.keep(cfg, at.needs, params=read, body=body, out=at.out)


def sharded_wgrad(pending: Any, cfg: ShardedConfig, *, into: Any = None) -> Any:
    """This rank's shards of the body's weight gradients, summed over the ranks; added to `into` if given."""
    return _settle(_wgrad_begun(pending, cfg, into), into)


def sharded_bwd(residuals: Any, dy: Any, cfg: ShardedConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward. Returns `(dparams, dx)`, with this rank's shards as dparams."""
    flying, dx = _bwd_begun(residuals, dy, cfg, into)
    return _settle(flying, into), dx


def _wgrad_begun(pending: Any, cfg: ShardedConfig, into: Any) -> Any:
    """Start the sums of the weight gradients."""
    require_config("sharded_wgrad", cfg, ShardedConfig)
    _check_whole("sharded_wgrad", cfg, into)
    if pending is None:
        if into is not None:
            check_into_tree("sharded_wgrad", into, sharded, cfg, None)
        return _reducing(cfg.op.wgrad(None, cfg.cfg), None, cfg)
    at = _opened("sharded_wgrad", pending, ShardedPending, cfg, into)
    return _reducing(cfg.op.wgrad(at.body, cfg.cfg), at.out, cfg)


def _check_whole(where: str, cfg: ShardedConfig, into: Any) -> None:
    """Accumulators are checked as params are, which are not sharded with stage 2."""
    shards = cfg.stage == 2 and cfg.axis.size > 1
    require(into is None or not shards, where, "into", "None with stage=2 (add the shards up after the backward)", "accumulators")


def _bwd_begun(residuals: Any, dy: Any, cfg: ShardedConfig, into: Any) -> tuple[Any, Any]:
    require_config("sharded_bwd", cfg, ShardedConfig)
    _check_whole("sharded_bwd", cfg, into)
    body, _, _, _, out = _opened("sharded_bwd", residuals, ShardedResiduals, cfg, into, dy)
    dparams, dx = cfg.op.bwd(body, dy, cfg.cfg)
    return _reducing(dparams, out, cfg), dx


def _reducing(dparams: Any, out: torch.dtype | None, cfg: ShardedConfig) -> Reducing:
    over, shard = (*cfg.also, cfg.axis), cfg.axis if cfg.stage else None
    return reduce_start(dparams, over, shard=shard, ordered=cfg.ordered, dtype=out, bucket_bytes=cfg.bucket_bytes)


def _advance(flying: Reducing, into: Any) -> Landing:
    return flying.advance(into)


def _settle(flying: Reducing | Landing, into: Any) -> Any:
    return flying.finish() if isinstance(flying, Landing) else finish(flying, into=into)


sharded = make_op(
    "sharded",
    ShardedConfig,
    init=sharded_init,
    fwd=sharded_fwd,
    dgrad=sharded_dgrad,
    wgrad=sharded_wgrad,
    bwd=sharded_bwd,
    prefetch=Prefetch(begin=_begin, bwd=_bwd_begun, wgrad=_wgrad_begun, settle=_settle, advance=_advance),
)._replace(keeps=ShardedResiduals, pending=ShardedPending)
