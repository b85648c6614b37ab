"""Weight gradients of autograd-driven ops, delayed until the user asks for them.

    with funcops.delayed_wgrad() as store:
        loss.backward()             # only input gradients
    store.run()                     # then the weight gradients

`store.discard()` drops the delayed gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from funcops.adapters.autocast import cast_from, without_autocast
from funcops.adapters.autograd.hushed import hush, unhush
from funcops.adapters.bucketed_mean import BucketedMean
from funcops.engine.contract.fused_steps import watch
from funcops.engine.contract.marks import Versions
from funcops.engine.contract.op import Op
from funcops.engine.errors import describe, fail, few
from funcops.engine.trees import leaves, nbytes, paths, tree_map_tensors

_current: WgradStore | None = None
_unfinished: weakref.ref[WgradStore] | None = None  # weak, so that a store that nobody can run any more warns at once
_dropped = ""  # what such a store has lost, until the next block raises
_open = False  # whether a store is current: a bool, because torch.compile guards on the globals that it reads
_compiled = False  # whether torch.compile has ever traced an op with gradients
_seen = 0  # backwards of ops in the current block


def _note_compiled() -> bool:
    global _compiled
    _compiled = True
    return True


# `torch.compiler.assume_constant_result` sets this mark, but imports the compiler, four times the work of all other imports here
_note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _backwards() -> int:
    """The number of this run of autograd's engine: the difference of two such numbers counts the backwards between them."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        y = torch.zeros((), requires_grad=True).clone()
        y.register_hook(lambda dy: found.append(torch._C._current_graph_task_id()))
        y.backward()
    return found[0]


def traced() -> None:
    """Called when an op is traced, because a compiled op cannot delay its weight gradients."""
    if _open:
        raise RuntimeError("delayed_wgrad: the forward must run outside of torch.compile, got a compiled one")
    _note_compiled()


class Waiting(NamedTuple):
    """A weight gradient that is not computed yet, and its params."""

    op: Op
    cfg: Any
    pending: Any
    params: Any
    versions: Versions  # of params, after the backward
    backward: int  # the number of autograd's run
    wanted: tuple[int, ...]  # the params, by id, to which that run accumulates


def _lost(waiting: list[Waiting]) -> str:
    """The params of the weight gradients that wait, each with its op, as text."""
    named = [f"{one.op.name} {path}" for one in waiting for path, t in paths(one.params).items() if id(t) in one.wanted]
    named = named or [one.op.name for one in waiting]  # when Python ends, optree knows no nodes any more
    return few(named)


def _drop(waiting: list[Waiting]) -> None:
    """The end of a store, which warns if nobody can run it any more."""
    global _dropped
    if waiting:
        _dropped = f"{len(waiting)} weight gradients of a store that is gone were never run ({_lost(waiting)})"
        warnings.warn(f"delayed_wgrad: {_dropped}: call its run() or discard() before", RuntimeWarning, stacklevel=2)


class WgradStore:
    """Pending weight gradients in the order of the backward. Each is used once, by `run` or `discard`. `every`: also of parameters
    to which the backward does not accumulate."""

    def __init__(self, every: bool = False) -> None:
        self.every = every
        self.waiting: list[Waiting] = []
        self.hushed: dict[int, Tensor] = {}  # the params whose hooks wait, by id
        self.began: int | None = None
        self.done: dict[int, Tensor] = {}  # the params that got a gradient, by id
        self.parts: dict[tuple[int, int], Tensor] = {}  # gradients of params that a later wgrad of the same backward adds to
        weakref.finalize(self, _drop, self.waiting)  # not `__del__`, at whose time, when Python ends, no tree can be walked

    def __enter__(self) -> WgradStore:
        global _current, _open, _seen, _unfinished, _dropped
        if _current is not None:
            raise RuntimeError("delayed_wgrad: must not be entered inside another")
        before = None if _unfinished is None else _unfinished()
        if before is not None and before is not self and before.waiting:
            left, of = len(before.waiting), _lost(before.waiting)
            raise RuntimeError(
                f"delayed_wgrad: {left} weight gradients of the previous store were never run ({of}): call its run() or discard()"
            )
        if _dropped:
            lost, _dropped = _dropped, ""
            raise RuntimeError(f"delayed_wgrad: {lost}: keep the store, and call its run() or discard()")
        _current, _unfinished = self, weakref.ref(self)
        _open, _seen = True, 0
        self.began = _backwards() if _compiled else None
        return self

    def __exit__(self, *error: object) -> None:
        global _current, _open
        _current, _open = None, False
        unhush(self.hushed.values())
        self.hushed.clear()
        if error[0] is not None:
            self.discard()
        elif not _seen and self.began is not None and _backwards() != self.began + 1:
            wanted = "of ops that are not compiled, because torch.compile computes weight gradients with the others"
            fail("delayed_wgrad", "the backward", wanted, "one that delayed nothing", RuntimeError)

    def __len__(self) -> int:
        return len(self.waiting)

    def nbytes(self) -> int:
        """Bytes of the pendings that wait; a tensor that is kept twice counts once."""
        return nbytes([one.pending for one in self.waiting])

    def discard(self) -> None:
        """Drop the weight gradients that wait."""
        self.waiting.clear()
        self.parts.clear()

    @torch.no_grad()
    def run(self) -> None:
        """Compute every weight gradient, in the order of the backward, and accumulate it in the parameter's `main_grad`, if it has
        one, or else in `grad`, also for a parameter that was frozen since, as the backward would have done. Tensor hooks and
        post-accumulate hooks fire as in a backward: once for all gradients that a backward has left for a parameter. Raises
        `StaleResidualError` if a parameter was written to since, because a chain would recompute different values."""
        uses = Counter((one.backward, id(t)) for one in self.waiting for t in leaves(one.params) if id(t) in one.wanted)
        while self.waiting:
            op, cfg, pending, params, versions, backward, wanted = self.waiting.pop(0)
            versions.check(f"delayed_wgrad: {op.name}_wgrad", "params", "backward", "Call run() before the optimiser")
            with without_autocast(pending):
                dparams = op.wgrad(pending, cfg)
            for parameter, gradient in zip(leaves(params), leaves(dparams), strict=True):
                if isinstance(parameter, Tensor) and id(parameter) in wanted:
                    self._take(parameter, gradient, backward, uses)

    def _take(self, parameter: Tensor, gradient: Tensor | None, backward: int, uses: Counter[tuple[int, int]]) -> None:
        """Add up the gradients that a backward left for a parameter, and accumulate the sum after its last one."""
        key = backward, id(parameter)
        before, last = self.parts.pop(key, None), uses[key] == 1
        uses[key] -= 1
        if gradient is not None and not (last and before is None):
            main = getattr(parameter, "main_grad", None)
            gradient = gradient.to((parameter if main is None else main).dtype)
        if before is not None:
            gradient = before if gradient is None else before + gradient
        if gradient is None:
            return
        if not last:
            self.parts[key] = gradient
            return
        accumulate(parameter, gradient)
        self.done[id(parameter)] = parameter

    def reduce(self, group: Any = None, *, also: Iterable[Tensor] = ()) -> None:
        """All-reduce the gradients that `run` computed, as means over the processes of `group`: for data parallelism, because
        DistributedDataParallel (under `no_sync()`) does not see them. `also`: parameters whose gradients were not delayed."""
        if self.waiting:
            raise RuntimeError(f"delayed_wgrad: reduce() must follow run(), got {len(self.waiting)} weight gradients that wait")
        every = {**self.done, **{id(p): p for p in also}}
        found = [p.main_grad if getattr(p, "main_grad", None) is not None else p.grad for p in every.values()]  # type: ignore[attr-defined]
        mean = BucketedMean(group)
        mean.start([g for g in found if g is not None])
        mean.wait()
        self.done.clear()

    def reduce_sharded(self, model: Any) -> None:
        """Reduce-scatter the gradients of a model under `fully_shard`, whose parameters must still be whole
        (`set_reshard_after_backward(False)`): each process gets its shard of the mean gradient, and the parameters are
        resharded."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor, Partial

        if self.waiting:
            raise RuntimeError(
                f"delayed_wgrad: reduce_sharded() must follow run(), got {len(self.waiting)} weight gradients that wait"
            )
        places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
        absent = self.done.keys() - {id(p) for _, _, p in places}
        if absent:
            shapes = ", ".join(describe(self.done[one]) for one in absent)
            fail("delayed_wgrad", "model", "one that holds all parameters that got a gradient", f"one without {shapes}")
        whole = []
        for module, name, p in places:  # a parameter of two modules counts at the first
            if id(p) in self.done and p.grad is not None:
                whole.append((module, name, p.grad))
                p.grad = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # type: ignore[operator]
        for module, name, gradient in whole:
            sharded = module._parameters[name]
            if not isinstance(sharded, DTensor):
                fail("delayed_wgrad", "model", "under fully_shard", f"a plain parameter {name}", TypeError)
            mesh = sharded.device_mesh
            found = DTensor.from_local(gradient, mesh, [Partial("avg")] * mesh.ndim).redistribute(mesh, sharded.placements)
            sharded.grad = found if sharded.grad is None else sharded.grad + found
        self.done.clear()


def delayed_wgrad() -> WgradStore:
    """A context in which backwards of `differentiable` ops and `funcops.nn` modules leave their weight gradients to the store.

    Only gradients of parameters, which are leaves, are delayed, not the gradient of a weight computed from others. What torch's
    own operators give the same parameter comes in the backward, and its hooks then fire for each of the two parts. After the
    block, call `run()`; several backwards, and several blocks of one store, add up. Raises `RuntimeError` if an earlier store
    still has work or blocks are nested; if the model runs under DistributedDataParallel without `no_sync()`; and if torch.compile
    compiled the ops, whose weight gradients cannot be delayed. A store that is dropped with work gives a `RuntimeWarning`, and the
    next block raises once. A process has one store at a time, for all its threads.

    The store: `run()` computes what waits, in the order of the backward, `discard()` drops it, `len(store)` and `store.nbytes`
    count it, and `reduce()` sums the gradients over DistributedDataParallel's ranks. For another order call the ops yourself: a
    pending is a value then (`funcops.Ledger`).

    >>> import torch
    >>> from funcops import delayed_wgrad, nn
    >>> layer = nn.Linear(2, 1)
    >>> with delayed_wgrad() as store:
    ...     layer(torch.ones(1, 2)).sum().backward()
    ...
    >>> layer.weight.grad is None, len(store)
    (True, 1)
    >>> store.run()
    >>> layer.weight.grad
    tensor([[1., 1.]])
    """
    return WgradStore()


def synced() -> bool:
    """Whether the current forward is inside a DistributedDataParallel that will reduce the gradients of its backward."""
    ddp: Any = DistributedDataParallel._active_ddp_module
    return ddp is not None and ddp.require_backward_grad_sync


def put(store: WgradStore, op: Op, cfg: Any, pending: Any, params: Any, synced: bool = False) -> Any:
    """Leave the pending to the store and return None dparams; if a param is not a leaf of autograd, or `autograd.grad` returns its
    gradient, compute and return them. Params to which the backward does not accumulate get none.

    Raises `RuntimeError` if the forward ran `synced`."""
    global _seen
    _seen += 1
    if synced:
        said = "under no_sync() of DistributedDataParallel, then store.run() and store.reduce()"
        got = "one whose gradients it reduces in the backward, before they are computed"
        fail("delayed_wgrad", f"the forward of {op.name}", said, got, RuntimeError)
    if pending is None:
        return op.wgrad(None, cfg)
    params = tree_map_tensors(cast_from, params)
    if any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves(params)):
        return op.wgrad(pending, cfg)
    try:
        trained = [t for t in _trained(params) if store.every or _accumulates(t)]
    except RuntimeError:  # the engine does not say it of a leaf whose gradient `autograd.grad` returns
        return op.wgrad(pending, cfg)
    if not trained:
        return op.wgrad(None, cfg)
    free = tree_map_tensors(lambda t: t.detach() if t.requires_grad else t, pending)  # does not keep the autograd graph alive
    wanted = tuple(map(id, trained))
    store.waiting.append(Waiting(op, cfg, free, params, Versions.of(params), torch._C._current_graph_task_id(), wanted))
    watch(trained)
    hush(trained)
    store.hushed.update({id(t): t for t in trained})
    return op.wgrad(None, cfg)


def _accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs will accumulate a gradient of a leaf."""
    return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def _trained(params: Any) -> list[Tensor]:
    return [t for t in leaves(params) if isinstance(t, Tensor) and t.requires_grad]


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    main: Any = getattr(parameter, "main_grad", None)
    if main is None:
        gradient = gradient.to(parameter.dtype)  # the dtypes differ if autocast has cast the parameter
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if main is not None:
        if main.shape != gradient.shape:
            fail("delayed_wgrad", "main_grad", str(list(gradient.shape)), list(main.shape))
        main.add_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
