"""remat: an op that keeps only its inputs, and reruns its forward in the backward (arXiv:1604.06174).

    dgrad(dy): rerun the forward with residuals, then the op's dgrad        wgrad: the op's wgrad

Params, dx and pending are the op's own. The same kernels on the same inputs give the same bits. An op whose forward reads more than
its inputs notes what that was, and the second run reads it from the note (`contract.rerun`).
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

from funcops.engine.backend import scopes
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import ALL, Op, recompute_of, wrap
from funcops.engine.contract.pausing import Pauses, Pausing
from funcops.engine.contract.rerun import first_run, second_run
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Saved, open_node, residuals, saved
from funcops.engine.errors import require_flag, require_type, stale
from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.offload import copies
from funcops.engine.trees import static, tensors, tree_map_tensors

_RERUN = "The forward runs again: run the backward first, or keep a clone"


@residuals
class RematResiduals:
    params: Any = saved("the body's", alias="params", needed_by=DGRAD | WGRAD | RECOMPUTE, tree=True)
    x: Any = saved("the body's", needed_by=DGRAD | WGRAD | RECOMPUTE, tree=True)
    device: Any = static()  # the device of x, if x is offloaded
    notes: Any = static()  # of what the forwards inside read beside their inputs

    def complain(self, where: str) -> None:
        self.unused(where)  # type: ignore[attr-defined]
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
    notes: Any = static()


def remat(op: Op, offload: bool = False) -> Op:
    """The op with only its inputs as residuals; with `offload` they are offloaded to the host's memory. Config, params, x, y and
    gradients, with their shapes, dtypes and errors, are the op's own; a backward after a write to a param or x raises
    `StaleResidualError`, and so does one after a write to a tensor that a function given to `op_from_torch` reads beside its
    arguments. If such a function draws random numbers, the forward raises `ValueError`.

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

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        if needs is not ALL:
            check_needs(f"{name}_fwd", needs, params, x)
        if not needs:
            return op.fwd(params, x, cfg, needs=Needs.NONE)[0], None
        with first_run() as notes:
            y, _ = op.fwd(params, x, cfg, needs=Needs.NONE)
        return y, keep(params, x, cfg, needs, notes)

    def keep(params: Any, x: Any, cfg: Any, needs: Needs, notes: Any) -> Any:
        device = tensors(x)[0].device if offload else None
        waiting = tree_map_tensors(copies.on_host, x) if offload else x
        residuals = keeps.keep(cfg, needs, params=params, x=waiting, device=device, notes=tuple(notes))  # type: ignore[attr-defined]
        scopes.kept(residuals)
        return residuals

    def given(where: str, kept: Any, dy: Any, cfg: Any) -> tuple[Any, Any, Needs, Any]:
        node = open_node(where, kept, keeps, cfg, dy=dy)
        params, x, needs, notes = node.params, node.x, node.needs, node.notes
        if offload:
            x = tree_map_tensors(lambda t: copies.on_device(t, node.device), x)
        return params, x, needs, notes

    def opened(where: str, kept: Any, dy: Any, cfg: Any) -> Any:
        """Rerun the forward, and donate its residuals."""
        params, x, needs, notes = given(where, kept, dy, cfg)
        with scopes.named_scope("", scopes.RECOMPUTE), second_run(notes):
            node = op.fwd(params, x, cfg, needs=needs.of_gradients)[1]
        return donate(_lacking_x(op, node, cfg) if needs.drop else node)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        return op.dgrad(opened(f"{name}_dgrad", residuals, dy, cfg), dy, cfg)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        return op.bwd(opened(f"{name}_bwd", residuals, dy, cfg), dy, cfg, into=into)

    def recompute(residuals: Any, cfg: Any) -> Any:
        with second_run(residuals.notes):
            return op.fwd(residuals.params, residuals.x, cfg, needs=Needs.NONE)[0]

    recompute.__name__ = f"{name}_recompute"
    kept_recompute = op.recompute is not None and not offload
    changes: dict[str, Any] = {"recompute": recompute_of(keeps)(recompute)} if kept_recompute else {"recomputable": ""}
    changes["pausing"] = None if op.pausing is None else _pausing(op, name, keep, given)
    return wrap(op, (remat, (op, offload)), name=name, fwd=fwd, dgrad=dgrad, bwd=bwd, keeps=keeps, **changes)


def _pausing(op: Op, name: str, keep: Any, given: Any) -> Pausing:
    """Both forwards and the backward with the pauses of the op."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Pauses:
        first, run = first_run(), op.pausing.fwd(params, x, cfg, needs=Needs.NONE)
        y, _ = yield from (_in_turns(first, run) if needs else run)
        return y, keep(params, x, cfg, needs, first.made) if needs else None

    def opened(where: str, kept: Any, dy: Any, cfg: Any) -> Pauses:
        params, x, needs, notes = given(where, kept, dy, cfg)
        rerun = _in_turns(second_run(notes), op.pausing.fwd(params, x, cfg, needs=needs.of_gradients))
        _, node = yield from scopes.resumed("", scopes.RECOMPUTE, rerun)
        return donate(_lacking_x(op, node, cfg) if needs.drop else node)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> Pauses:
        return (yield from op.pausing.dgrad((yield from opened(f"{name}_dgrad", residuals, dy, cfg)), dy, cfg))

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
        return (yield from op.pausing.bwd((yield from opened(f"{name}_bwd", residuals, dy, cfg)), dy, cfg, into=into))

    return Pausing(fwd, dgrad, bwd)


def _in_turns(run: Any, part: Generator[None, None, Any]) -> Generator[None, None, Any]:
    """A generator whose every turn runs in the block `run`, which ends at each pause: what runs meanwhile is not in it."""
    while True:
        with run:
            try:
                next(part)
            except StopIteration as end:
                return end.value
        yield


def _lacking_x(op: Op, node: Any, cfg: Any) -> Any:
    """Residuals that dgrad reads whole, but whose x its pending leaves out, as the chain around it recomputes x for the wgrad."""
    if node is not None:
        node.needs = node.needs.dropping(tuple([name for name, field in op.fields(cfg).items() if field.alias == "x"]))
    return node


def is_remat(op: Op) -> bool:
    """Whether an op keeps only its inputs, as `remat` made it."""
    return op.keeps is RematResiduals or op.keeps is RematOfTensor


def _takes_tensor(op: Op) -> bool:
    """Whether x is one tensor for every config: the residuals say so, if they keep it as it is."""
    kept = op.keeps
    return isinstance(kept, type) and any(field.alias == "x" and not field.tree for field in getattr(kept, "fields", {}).values())
