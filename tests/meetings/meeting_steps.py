"""A step of a meeting: forward and backward over microbatches, in the way that the features say, and its results in plain layout.

The backward is called whole, or in halves, or its weight gradients are joined; then the whole step may be compiled, and captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from meeting_features import DOCUMENTS, Meeting
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from funcops import WithExtras, batch_wgrads, chain, delayed_wgrad, differentiable, dist, donate, random, recording, with_policy
from funcops.engine.contract.op import Op
from funcops.engine.trees import at, paths, put, tree_map_tensors
from funcops.graphs import graphed, graphed_op, make_graphed_callables
from funcops.library.formats.scaled import Scaled
from funcops.logs import logs_init, split_logs
from funcops.lora import lora_init
from funcops.low_precision import gradients_like, quantize_params, recipe_init, split_amaxes
from funcops.models import decoder_x
from funcops.schedule import compile_stages, one_f_one_b, run, zb_h1
from funcops.testing import run_ranks

D = torch.float64
AMAXES = "amaxes of"  # begins the names of what delayed scaling returns beside gradients, which autograd does not


def batches(meeting: Meeting) -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of each microbatch, over the ranks of all axes of data: two rows, or one of several documents."""
    draw, shape = torch.Generator().manual_seed(0), (1, sum(DOCUMENTS)) if "packed" in meeting else (2, 8)
    return [tuple(torch.randint(32, shape, generator=draw) for _ in range(2)) for _ in range(meeting.microbatches)]


@functools.cache
def drawn(names: frozenset[str]) -> Any:
    """Whole params of the model with these features, none of them zeros or ones."""
    draw, made = torch.Generator().manual_seed(1), chain.init(Meeting(*names - {"lora"}).adapted, key=random.key(0), dtype=D)
    if "lora" in names:
        made = lora_init(made, Meeting(*names).adapted, key=random.key(1))
    return tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=D), made)


def x_of(meeting: Meeting, ids: Tensor, labels: Tensor, mesh: Any) -> WithExtras:
    """x of a rank, for a microbatch: over "cp" its tokens, in zigzag order."""
    at = torch.cat([torch.arange(n) for n in DOCUMENTS]) if "packed" in meeting else torch.arange(ids.shape[1])
    if "cp" in meeting:
        ids, labels = (dist.zigzag(t, mesh["cp"]) for t in (ids, labels))
        at = dist.zigzag(at[None], mesh["cp"])[0]
    x = decoder_x(meeting.sizes, ids, D, positions=at, labels=labels)
    if "packed" not in meeting:
        return x
    ends = torch.tensor((0, *DOCUMENTS)).cumsum(0).int()
    return WithExtras(x.main, {**x.extras, "cu_seqlens": ends})


def results(meeting: Meeting) -> dict[str, Tensor]:
    """The mean loss and the gradients by path, of the whole model."""
    sizes = meeting.mesh
    try:
        return run_ranks({"tp": 1, **sizes}, functools.partial(of_rank, meeting))[0] if sizes else of_rank(meeting, None)
    finally:
        if "compile" in meeting:
            torch.compiler.reset()  # a compiler that has seen a function with many configs refuses it


def of_rank(meeting: Meeting, mesh: Any) -> dict[str, Tensor]:
    """The results of one rank, gathered from all."""
    cfg, whole = meeting.own(mesh), drawn(meeting.model)
    specs = {} if mesh is None else dist.specs_of(chain, cfg)
    params = whole if mesh is None else dist.shard(whole, specs, mesh)
    if meeting.recipe is not None:
        params = working(meeting, params, cfg, specs, mesh)
    mine = batches(meeting)
    axes = [axis for axis in ([] if mesh is None else mesh.axes) if axis.name in ("dp", "ep")]
    for axis in axes:
        mine = mine[axis.rank :: axis.size]
    share = len(mine) * (2 ** len(axes)) * (2 if "cp" in meeting else 1)
    xs = [x_of(meeting, *batch, mesh) for batch in mine]
    cfg = meeting.logged(cfg)
    if "logs" in meeting:
        params = logs_init(params, cfg, dtype=D)
    with recording() if "recorded" in meeting else contextlib.nullcontext() as told:
        losses, dparams = stepped(meeting, cfg, params, xs, torch.full((), 1 / share, dtype=D))
    assert told is None or {row.half for row in told.rows} >= {"fwd", "dgrad"}, "the steps of this meeting tell nothing"
    if "logs" in meeting:
        dparams, logs = split_logs(dparams, cfg)
        check_logs(logs, meeting, len(xs))
    grads, amaxes = split_amaxes(dparams)
    loss = torch.stack(list(losses)).sum() / share
    if mesh is not None:
        grads = dist.unshard(dist.sum_gradients(grads, specs, mesh), specs, mesh)
        amaxes = dist.amaxes_over(amaxes, mesh.axes, specs=specs)
        amaxes = dist.unshard(amaxes, of_groups(amaxes, specs), mesh)
        for axis in mesh.axes:
            if axis.name in ("dp", "ep", "cp"):
                loss = dist.sum_over.fwd(None, loss, dist.SumOverConfig(axis))[0]
    found = {path: t for path, t in paths(grads).items() if t is not None}
    return {"loss": loss, **found, **{f"{AMAXES} {path}": t for path, t in amaxes.items()}}


def check_logs(logs: Any, meeting: Meeting, runs: int) -> None:
    """Each microbatch of a rank has its values in a row, but for autograd, which sums them into one."""
    for path, named in logs.items():
        counts = named.pop("runs").reshape(-1, meeting.microbatches)
        rows = [runs] if "differentiable" in meeting else [1] * runs
        want = torch.tensor(rows + [0] * (meeting.microbatches - len(rows)), dtype=D)
        assert torch.equal(counts, want.expand_as(counts)), f"{path}: {counts} runs, not {want}"
        for name, t in named.items():
            got = t.reshape(-1, meeting.microbatches)[:, : len(rows)]
            assert got.isfinite().all() and (got >= 0).all(), f"{path}: {name} is {t}"


def working(meeting: Meeting, params: Any, cfg: Any, specs: Any, mesh: Any) -> Any:
    """The params of a step with a recipe: quantised, but for autograd and ZeRO-3, whose layers quantise weights themselves."""
    state = None
    if meeting.recipe.delayed:
        amaxes = first_amaxes(meeting.model | {"fp8_delayed"})
        if mesh is not None:
            amaxes = dist.shard(amaxes, of_groups(amaxes, specs), mesh)
        state = recipe_init(cfg, params, amaxes=amaxes)
    if not {"differentiable", "zero3"} & meeting.names:
        return quantize_params(params, cfg, state, dtype=D)
    for path, one in (state or {}).items():
        params = put(params, path, Scaled(at(params, path), one.scale, None))
    return params


def of_groups(amaxes: dict[str, Tensor], specs: Any) -> Any:
    """The specs of amaxes [E, 3] of experts that are sharded."""
    return {path: specs[path] for path, t in amaxes.items() if t.dim() == 2 and path in specs and specs[path].axis == "ep"}


@functools.cache
def first_amaxes(names: frozenset[str]) -> dict[str, Tensor]:
    meeting = Meeting(*names)
    cfg, whole = meeting.whole, drawn(meeting.model)
    work = quantize_params(whole, cfg, recipe_init(cfg, whole), dtype=D)
    x = x_of(meeting, *batches(meeting)[0], None)
    return split_amaxes(whole_backward(chain, cfg, work, [x], gradient_of(cfg, torch.full((), 1 / 2, dtype=D)))[1])[1]


def stepped(meeting: Meeting, cfg: Any, params: Any, xs: Sequence[WithExtras], dy: Tensor) -> tuple[Any, Any]:
    """The losses of the microbatches and the sums of their gradients."""
    op, dloss, dy = meeting.op(cfg, params, xs[0]), dy, gradient_of(cfg, dy)
    if "pipeline" in meeting:
        call = functools.partial(pipelined, op, cfg, meeting.names)
    elif "differentiable" in meeting:
        return by_autograd(op, cfg, meeting.names, params, xs, dloss)
    elif "batch" in meeting:
        call = functools.partial(joined, op, cfg, "donate" in meeting)
    elif "delayed" in meeting:
        call = functools.partial(in_halves, op, cfg, "donate" in meeting)
    else:
        call = functools.partial(whole_backward, op, cfg, given="donate" in meeting)
    if "graph" in meeting and not {"pipeline", "batch", "donate", "compile"} & meeting.names:
        return of_graphs(op, cfg, "delayed" in meeting, params, xs, dy)
    if "compile" in meeting and "pipeline" not in meeting:
        call = compiled(call)
    if "graph" in meeting:
        call = graphed(call, params, xs, dy, warmup=1)
    return call(params, xs, dy)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one graph of torch.compile. The mode that carries a rank's collectives is not traced: it is on again when the
    graph runs."""
    modes = _get_current_dispatch_mode_stack()

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return graph(*args)

        return run

    traced = torch.compile(call, fullgraph=True, backend=backend, dynamic=False)

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return traced(*args)

    return run


def loss_of(y: Any) -> Tensor:
    return y.main if type(y) is WithExtras else y


def gradient_of(cfg: Any, dy: Tensor) -> Any:
    """dy of a model whose routers may give outputs that are not part of the loss."""
    return WithExtras(dy, dict.fromkeys(cfg.outputs)) if cfg.outputs else dy


def whole_backward(op: Op, cfg: Any, params: Any, xs: Any, dy: Tensor, *, given: bool = False) -> tuple[Any, Any]:
    sums, losses = gradients_like(params, D), []
    for x in xs:
        y, residuals = op.fwd(params, x, cfg)
        op.bwd(donate(residuals) if given else residuals, dy, cfg, into=sums)
        losses.append(loss_of(y))
    return losses, sums


def dgrads(op: Op, cfg: Any, given: bool, params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    """The losses, and the pending weight gradients of all microbatches."""
    losses, pendings = [], []
    for x in xs:
        y, residuals = op.fwd(params, x, cfg)
        _, pending = op.dgrad(donate(residuals) if given else residuals, dy, cfg)
        losses.append(loss_of(y))
        pendings.append(donate(pending) if given else pending)
    return losses, pendings


def in_halves(op: Op, cfg: Any, given: bool, params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    losses, pendings = dgrads(op, cfg, given, params, xs, dy)
    sums = gradients_like(params, D)
    for pending in pendings:
        op.wgrad(pending, cfg, into=sums)
    return losses, sums


def joined(op: Op, cfg: Any, given: bool, params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    losses, pendings = dgrads(op, cfg, given, params, xs, dy)
    return losses, batch_wgrads(op, pendings, cfg, into=gradients_like(params, D))


def of_graphs(op: Op, cfg: Any, halves: bool, params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    """Forward and backward, or its halves, as graphs of their own."""
    sums, losses, pendings = gradients_like(params, D), [], []
    graph = graphed_op(op, cfg, params, xs[0], dy=dy, into=sums, warmup=1, slots=len(xs) if halves else 1)
    for x in xs:
        y, residuals = graph.fwd(params, x)
        losses.append(loss_of(y).clone())
        if halves:
            pendings.append(graph.dgrad(residuals, dy)[1])
        else:
            graph.bwd(residuals, dy)
    for pending in pendings:
        graph.wgrad(pending)
    return losses, sums


def by_autograd(op: Op, cfg: Any, names: frozenset[str], params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    """The caller's params get gradients from autograd; scales of a recipe, which are float32, do not."""
    params = tree_map_tensors(lambda t: t.detach().clone().requires_grad_(t.dtype is D), params)
    call, losses = (lambda params, x: differentiable(op)(params, x, cfg)), []
    if "compile" in names:
        call = compiled(call)
    if "graph" in names:
        call = make_graphed_callables(call, (params, xs[0]), 1)
    with delayed_wgrad() if "delayed" in names else contextlib.nullcontext() as store:
        for x in xs:
            loss = loss_of(call(params, x))
            (loss * dy).backward()
            losses.append(loss.detach())
    if store is not None:
        store.run()
    return losses, tree_map_tensors(lambda t: t.grad, params)


def pipelined(op: Op, cfg: Any, names: frozenset[str], params: Any, xs: Any, dy: Tensor) -> tuple[Any, Any]:
    """Every step of the chain is a stage, and compiled by itself. A policy is each stage's own."""
    make: Callable[..., Any] = zb_h1 if "delayed" in names else one_f_one_b
    stages = compile_stages(staged(op, cfg), backend="eager", dynamic=False) if "compile" in names else staged(op, cfg)
    ran = run(make(len(cfg.steps), len(xs)), params, xs, stages, [dy] * len(xs))
    return [loss_of(y) for y in ran.ys], ran.dparams


def staged(op: Op, cfg: Any) -> Any:
    policy = getattr(op, "policy", None)
    if policy is None:
        return cfg
    return cfg.with_parts(lambda name, of, inner: (with_policy(of, policy), inner))
