"""remat: an op that keeps only its inputs, and reruns its forward in the backward (arXiv:1604.06174).

    dgrad(dy): rerun the forward with residuals, then the op's dgrad        wgrad: the op's wgrad

Params, dx and pending are the op's own. The same kernels on the same inputs give the same bits. An op whose forward reads more than
its inputs (`Op.outside`) says what that was, and is asked before the rerun whether it still is.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch

from funcops.backend import scopes
from funcops.contract.configs import OpConfig
from funcops.contract.needs import Needs, check_needs
from funcops.contract.op import ALL, Op, recompute_of, wrap
from funcops.contract.pausing import Pauses, Pausing
from funcops.contract.schema import DGRAD, RECOMPUTE, WGRAD, Saved, open_node, residuals, saved
from funcops.contract.trace_safe_cache import reading, remember
from funcops.contract.walk import Part, nested
from funcops.errors import join_path, require_flag, require_type, stale
from funcops.residuals.donate import donate
from funcops.residuals.offload import copies
from funcops.trees import static, tensors, tree_map_tensors

_RERUN = "The forward runs again: run the backward first, or keep a clone"


@residuals
class RematResiduals:
    params: Any = saved("the body's", alias="params", needed_by=DGRAD | WGRAD | RECOMPUTE, tree=True)
    x: Any = saved("the body's", needed_by=DGRAD | WGRAD | RECOMPUTE, tree=True)
    device: Any = static()  # the device of x, if x is offloaded
    outside: Any = static()  # what the forwards inside read beside their inputs: pairs of a path and its note

    def complain(self, where: str) -> None:
        path = self.stale()  # type: ignore[attr-defined]
        if path:
            stale(where, path, hint=_RERUN)
        Saved.complain(self, where)  # type: ignore[arg-type]


@residuals
class RematOfTensor(RematResiduals):
    """The residuals of an op whose x is one tensor: a chain may recompute it, and fill it in."""

    params: Any = saved("the body's", alias="params", needed_by=DGRAD | WGRAD | RECOMPUTE, tree=True)
    x: Any = saved("[*]", alias="x", needed_by=DGRAD | WGRAD | RECOMPUTE)
    device: Any = static()
    outside: Any = static()


def remat(op: Op, offload: bool = False) -> Op:
    """The op with only its inputs as residuals; with `offload` they are offloaded to the host's memory. Config, params, x, y and
    gradients, with their shapes, dtypes and errors, are the op's own; a backward after a write to a param or x raises
    `StaleResidualError`, and so does one after a change of a tensor or a number that a function given to `op_from_torch` reads
    beside its arguments. If such a function draws random numbers, the forward raises `ValueError`.

    >>> import torch
    >>> from funcops import SoftcapConfig, remat, softcap
    >>> cfg, x = SoftcapConfig(30.0), torch.zeros(2)
    >>> y, residuals = remat(softcap).fwd(None, x, cfg)
    >>> residuals.x is x
    True
    >>> remat(softcap).bwd(residuals, torch.ones(2), cfg)[1]
    tensor([1., 1.])
    """
    require_type("remat", "op", op, Op)
    require_flag("remat", offload=offload)
    return _remat(op, offload)


@functools.lru_cache(maxsize=256)
def _remat(op: Op, offload: bool) -> Op:
    name = f"remat({op.name})"
    keeps = RematOfTensor if _takes_tensor(op) and not offload else RematResiduals
    outside = _Outside(op)

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        if needs is not ALL:
            check_needs(f"{name}_fwd", needs, params, x)
        y, _ = op.fwd(params, x, cfg, needs=Needs.NONE)
        return y, keep(params, x, cfg, needs)

    def keep(params: Any, x: Any, cfg: Any, needs: Needs) -> Any:
        if not needs:
            return None
        device = tensors(x)[0].device if offload else None
        waiting = tree_map_tensors(copies.on_host, x) if offload else x
        notes = outside.notes(f"{name}_fwd", cfg) if outside.any(cfg) else ()
        residuals = keeps.keep(cfg, needs, params=params, x=waiting, device=device, outside=notes)  # type: ignore[attr-defined]
        scopes.kept(residuals)
        return residuals

    def given(where: str, kept: Any, cfg: Any) -> tuple[Any, Any, Needs]:
        node = open_node(where, kept, keeps, cfg)
        for path, note in node.outside:
            if changed := note.changed():
                stale(where, join_path(path, changed), hint=_RERUN, got="one that has changed since")
        params, x, needs = node.params, node.x, node.needs
        if offload:
            x = tree_map_tensors(lambda t: copies.on_device(t, node.device), x)
        if node is not kept:
            node.empty()
        return params, x, needs

    def opened(where: str, kept: Any, cfg: Any) -> Any:
        """Rerun the forward, and donate its residuals."""
        params, x, needs = given(where, kept, cfg)
        with scopes.named_scope("", scopes.RECOMPUTE):
            node = op.fwd(params, x, cfg, needs=needs.of_gradients)[1]
        return donate(_lacking_x(op, node, cfg) if needs.drop else node)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        return op.dgrad(opened(f"{name}_dgrad", residuals, cfg), dy, cfg)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        return op.bwd(opened(f"{name}_bwd", residuals, cfg), dy, cfg, into=into)

    def recompute(residuals: Any, cfg: Any) -> Any:
        return op.fwd(residuals.params, residuals.x, cfg, needs=Needs.NONE)[0]

    recompute.__name__ = f"{name}_recompute"
    kept_recompute = op.recompute is not None and not offload
    changes: dict[str, Any] = {"recompute": recompute_of(keeps)(recompute)} if kept_recompute else {"recomputable": ""}
    changes["pausing"] = None if op.pausing is None else _pausing(op, name, keep, given)
    return wrap(op, (remat, (op, offload)), name=name, fwd=fwd, dgrad=dgrad, bwd=bwd, keeps=keeps, **changes)


class _Outside:
    """The ops inside of an op that read more than their arguments."""

    __slots__ = ("__weakref__", "memo", "number", "op")

    def __init__(self, op: Op) -> None:
        self.op, self.memo = op, dict[Any, list[Part]]()
        self.number = next(_numbers)
        _numbered[self.number] = self

    def any(self, cfg: Any) -> bool:
        if torch.compiler.is_dynamo_compiling():
            id(cfg)  # the tracer guards on it: a method that gives a constant has no guard on its object
            return cfg.reads_outside(self.number)  # type: ignore[no-any-return]
        return bool(self.parts(cfg))

    def parts(self, cfg: Any) -> list[Part]:
        found = self.memo.get(cfg)
        if found is None:
            parts = [part for part, _ in nested(cfg, op=self.op) if part.op.outside is not None]
            found = remember(self.memo, cfg, parts)
        return found

    def notes(self, where: str, cfg: Any) -> tuple[tuple[str, Any], ...]:
        """A note for each, after the forward. Raises `ValueError` for one whose forward must not run again."""
        return tuple([(path, op.outside(f"{where}{f', {path}' * bool(path)}", inner)) for path, op, inner, _ in self.parts(cfg)])


_numbers = itertools.count()
_numbered: weakref.WeakValueDictionary[int, _Outside] = weakref.WeakValueDictionary()


def reads_outside(cfg: Any, number: int) -> bool:
    """Whether there are any under a config, as a constant for a compiler, which cannot trace the walk."""
    with reading():
        return bool(_numbered[number].parts(cfg))


reads_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]
OpConfig.reads_outside = reads_outside  # type: ignore[attr-defined]


def _pausing(op: Op, name: str, keep: Any, given: Any) -> Pausing:
    """Both forwards and the backward with the pauses of the op."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Pauses:
        y, _ = yield from op.pausing.fwd(params, x, cfg, needs=Needs.NONE)
        return y, keep(params, x, cfg, needs)

    def opened(where: str, kept: Any, cfg: Any) -> Pauses:
        params, x, needs = given(where, kept, cfg)
        rerun = op.pausing.fwd(params, x, cfg, needs=needs.of_gradients)
        _, node = yield from scopes.resumed("", scopes.RECOMPUTE, rerun)
        return donate(_lacking_x(op, node, cfg) if needs.drop else node)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> Pauses:
        return (yield from op.pausing.dgrad((yield from opened(f"{name}_dgrad", residuals, cfg)), dy, cfg))

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
        return (yield from op.pausing.bwd((yield from opened(f"{name}_bwd", residuals, cfg)), dy, cfg, into=into))

    return Pausing(fwd, dgrad, bwd)


def _lacking_x(op: Op, node: Any, cfg: Any) -> Any:
    """Residuals that dgrad reads whole, but whose x its pending leaves out, as the chain around it recomputes x for the wgrad."""
    if node is not None:
        node.needs = node.needs.dropping(tuple([name for name, field in op.fields(cfg).items() if field.alias == "x"]))
    return node


def may_rerun(op: Op, cfg: Any) -> bool:
    """Whether no forward that runs again gives something else, as far as is known of ops that have run."""
    try:
        for part in [part for part, _ in nested(cfg, op=op) if is_remat(part.op)]:
            _Outside(part.op).notes("", part.cfg)
    except ValueError:
        return False
    return True


def is_remat(op: Op) -> bool:
    """Whether an op keeps only its inputs, as `remat` made it."""
    return op.keeps is RematResiduals or op.keeps is RematOfTensor


def _takes_tensor(op: Op) -> bool:
    """Whether x is one tensor for every config: the residuals say so, if they keep it as it is."""
    kept = op.keeps
    return isinstance(kept, type) and any(field.alias == "x" and not field.tree for field in getattr(kept, "fields", {}).values())
