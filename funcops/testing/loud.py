"""The law Loud: every class of bad call raises, by name, before anything changes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import DonatedError, GradModeError, StaleResidualError, join_path
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import WithExtras, dense, leaves, paths, put, same_structure, tensors, tree_map_tensors
from funcops.testing.case import Case
from funcops.testing.checks import run, tree_map_path

TOO_LARGE, WRITTEN = " too large", " written to since the forward"


def law_loud(case: Case, dtype: torch.dtype) -> None:
    """Every class of bad call raises by name, before anything changes."""
    params, x, y, residuals, dy, (dparams, _) = run(case, dtype)
    op = case.op
    names = tuple(f"{op.name}_{f}" for f in ("fwd", "bwd", "dgrad", "wgrad"))
    calls = itertools.chain(bad_calls(case, params, x, residuals, dy, dparams), bad_parts(case, y, residuals, dy, dtype))
    for what, call in calls:
        try:
            call()
        except (ValueError, TypeError, GradModeError, DonatedError, StaleResidualError) as error:
            message = str(error)
            transparent = any(f"{half}: " in message for half in ("_fwd", "_bwd", "grad", "_recompute"))
            assert message.startswith(names) or transparent, (
                f"{what}: unnamed error {message!r}, wanted one that begins with {names[0]}: "
            )
            assert "must" in message and "got" in message, f"{what}: {message!r} does not say both what must be and what came"
        else:
            raise AssertionError(f"{case}: {what} went through without an error{_remedy(what)}")


def _remedy(what: str) -> str:
    """The remedy for a bad call that went through, for the author of an op."""
    if what.endswith(TOO_LARGE):
        path = what.removesuffix(TOO_LARGE)
        return f": check its shape (funcops.contract.check), or pass free=({path!r},) if it may have any size"
    return ": declare the field that holds it with alias" if what.endswith(WRITTEN) else ""


def bad_calls(case: Case, params: Any, x: Any, residuals: Any, dy: Any, dparams: Any) -> Any:
    """Yield (what, call) for every class of fault."""
    op, cfg = case.op, case.cfg
    several = len(tensors((params, x))) > 1

    def changed(tree: Any, path: str, change: Callable[[Tensor], Any]) -> Any:
        return tree_map_path(lambda p, t: change(t) if p == path else t, tree)

    yield "cfg of another type", lambda: op.fwd(params, x, object())
    yield "needs of another type", lambda: op.fwd(params, x, cfg, needs=True)  # type: ignore[arg-type]
    yield "params of another type", lambda: op.fwd(3.0, x, cfg)
    for side, tree, call in (
        ("x", x, lambda bad: op.fwd(params, bad, cfg)),
        ("params", params, lambda bad: op.fwd(bad, x, cfg)),
        ("dy", dy, lambda bad: op.dgrad(residuals, bad, cfg)),
    ):
        for path, t in paths(tree).items():
            if not isinstance(t, Tensor):
                continue
            name = join_path(side, path)
            if side != "dy":
                yield f"{name} None", lambda p=path, s=tree, c=call: c(changed(s, p, lambda t: None))
                if several:
                    yield f"{name} on another device", lambda p=path, s=tree, c=call: c(changed(s, p, _to_meta))
            yield f"{name} complex", lambda p=path, s=tree, c=call: c(changed(s, p, _to_complex))
            if t.dim() and name not in case.free:
                yield f"{name}{TOO_LARGE}", lambda p=path, s=tree, c=call: c(changed(s, p, _larger))
            if t.is_floating_point():
                grad = lambda t: t.detach().clone().requires_grad_()  # noqa: E731
                yield f"{name} requires grad", lambda p=path, s=tree, c=call, g=grad: c(changed(s, p, g))
    yield "residuals None", lambda: op.bwd(None, dy, cfg)
    yield "residuals of another op", lambda: op.bwd(Foreign(), dy, cfg)
    _, mine = op.fwd(params, x, cfg)
    cell = donate(mine)
    op.bwd(cell, dy, cfg)
    yield "donated residuals", lambda: op.bwd(mine, dy, cfg)
    yield "a spent cell", lambda: op.bwd(cell, dy, cfg)
    _, pending = op.dgrad(residuals, dy, cfg)
    if pending is not None:
        spent = donate(pending)
        op.wgrad(spent, cfg)
        yield "donated pending", lambda: op.wgrad(pending, cfg)
        yield "spent pending", lambda: op.wgrad(spent, cfg)
        yield "pending of another op", lambda: op.wgrad(Foreign(), cfg)
    yield from stale_calls(case, params, x, residuals, dy)
    yield from into_calls(case, params, residuals, dy, dparams)


def bad_parts(case: Case, y: Any, residuals: Any, dy: Any, dtype: torch.dtype) -> Any:
    """Yield (what, call): a dy with other parts than y's, and a gradient for a part that has none."""

    def call(bad: Any) -> Callable[[], Any]:
        return lambda: case.op.dgrad(residuals, bad, case.cfg)

    if type(y) is WithExtras:
        first, *rest = dy.extras
        yield "dy without its outputs", call(dy.main)
        yield f"dy without {first}", call(WithExtras(dy.main, {name: dy.extras[name] for name in rest}))
        yield "dy with an output more", call(WithExtras(dy.main, {**dy.extras, "no_such": None}))
    if same_structure(y, dy):
        for path, t in paths(y).items():
            if path and isinstance(t, Tensor) and not t.is_floating_point():
                yield f"dy.{path} of integers", call(put(dy, path, torch.zeros_like(t)))
                yield (
                    f"dy.{path} for a part that is not a float",
                    call(put(dy, path, torch.zeros(t.shape, dtype=dtype, device=t.device))),
                )


def stale_calls(case: Case, params: Any, x: Any, residuals: Any, dy: Any) -> Any:
    """Yield (what, call): a backward after a write to each input that the residuals alias."""
    kept = {id(t) for t in tensors(residuals)}
    for i, (path, t) in enumerate(paths({"params": params, "x": x}).items()):
        if id(t) not in kept:
            continue

        def call(i: int = i) -> None:
            mine = tree_map_tensors(torch.clone, (params, x))
            _, residuals = case.op.fwd(*mine, case.cfg)
            leaves(mine)[i].add_(0)
            case.op.bwd(residuals, dy, case.cfg)

        yield f"{path}{WRITTEN}", call


def into_calls(case: Case, params: Any, residuals: Any, dy: Any, dparams: Any) -> Any:
    """Yield (what, call): accumulators of a wrong kind, one leaf at a time; none of the others may have been added to. The leaf of
    a param without a gradient is not read."""
    faults: dict[str, Callable[[Tensor], Any]] = {
        "missing": lambda t: None,
        "of another shape": _larger,
        "of integers": lambda t: torch.zeros_like(t, dtype=torch.int64),
        "on another device": _to_meta,
        "no tensor": lambda t: 3.0,
        "too narrow": lambda t: t.to(torch.bfloat16 if t.element_size() > 2 else torch.float8_e5m2),
        "of the other 16-bit dtype": lambda t: t.to(OTHER[t.dtype]) if t.dtype in OTHER else None,
        "that requires grad": lambda t: t.requires_grad_(),
        "expanded": lambda t: t.new_zeros(()).expand(t.shape) if t.numel() > 1 else None,
    }
    params = dense(params)
    gradients = paths(dparams)
    of = {path: t for path, t in paths(params).items() if isinstance(t, Tensor) and gradients[path] is not None}
    call = functools.partial(_backward_into, case, params, residuals, dy)
    for path, (what, fault) in itertools.product(of, faults.items()):
        yield f"into.{path} {what}", functools.partial(call, lambda p, t, path=path, fault=fault: fault(t) if p == path else t)
    for a, b in itertools.pairwise([path for path, t in of.items() if t.numel()]):
        room = of[a].new_zeros(max(of[a].numel(), of[b].numel()))
        yield (
            f"into.{b} in the memory of {a}",
            functools.partial(call, lambda p, t, pair=(a, b), room=room: room[: t.numel()].view(t.shape) if p in pair else t),
        )
    if tensors(params):
        yield "into of another type", lambda: case.op.bwd(residuals, dy, case.cfg, into=3.0)


def _backward_into(case: Case, params: Any, residuals: Any, dy: Any, change: Callable[[str, Any], Any]) -> None:
    """Run a backward into zeros, one of which was changed; on its error, all must still be zeros."""
    into = tree_map_path(change, tree_map_tensors(torch.zeros_like, params))
    try:
        case.op.bwd(residuals, dy, case.cfg, into=into)
    finally:
        touched = [p for p, a in paths(into).items() if isinstance(a, Tensor) and not a.is_meta and a.float().any()]
        assert not touched, f"{', '.join(touched)} was added to before the error"


OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


class Foreign:
    """Stands for the residuals of another op."""


def _to_meta(t: Tensor) -> Tensor:
    return t.to("meta")


def _to_complex(t: Tensor) -> Tensor:
    return t.to(torch.complex64)


def _larger(t: Tensor) -> Tensor:
    return t.new_zeros([n + 1 for n in t.shape])
