"""The laws, each a function of a case and a dtype. `LAWS` lists them; `check_op` runs them on a user's op."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.errors import DonatedError, GradModeError, StaleResidualError
from funcops.needs import Needs
from funcops.op import Op
from funcops.residuals import donate
from funcops.testing.case import FLOATS, Case
from funcops.testing.guarded import law_guarded
from funcops.testing.layouts import LAYOUTS, expanded
from funcops.testing.tolerances import assert_close
from funcops.trees import leaves, nothing_like, paths, same_structure, tensors, tree_map, tree_map_tensors


def float_like(tree: Any, seed: int) -> Any:
    """A tree of random gradients for the floating leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return None
        return torch.randn(t.shape, dtype=torch.float64, device="cpu", generator=generator).to(t)

    return tree_map(draw, tree)


def same_bits(a: Any, b: Any, what: str) -> None:
    assert same_structure(a, b), f"{what}: structures differ: {paths(a).keys()} and {paths(b).keys()}"
    for (path, x), y in zip(paths(a).items(), leaves(b), strict=True):
        same = x is y is None or (isinstance(x, Tensor) and isinstance(y, Tensor) and _equal(x, y))
        assert same, f"{what}: {path or 'value'} differs"


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(torch.nan_to_num(x, 12345.0), torch.nan_to_num(y, 12345.0))


def run(case: Case, dtype: torch.dtype, needs: Needs = Needs.ALL) -> tuple[Any, Any, Any, Any, Any, Any]:
    """params, x, y, residuals, dy and (dparams, dx)."""
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg, needs=needs)
    dy = float_like(y, 7)
    return params, x, y, residuals, dy, case.op.bwd(residuals, dy, case.cfg)


def law_split(case: Case, dtype: torch.dtype) -> None:
    """`bwd` is `dgrad` then `wgrad`, bit for bit; donated or not, into accumulators or not."""
    params, x, _, residuals, dy, (dparams, dx) = run(case, dtype)
    dx2, pending = case.op.dgrad(residuals, dy, case.cfg)
    same_bits(dx, dx2, "dx")
    same_bits(dparams, case.op.wgrad(pending, case.cfg), "dparams")
    _, again = case.op.fwd(params, x, case.cfg)
    same_bits((dparams, dx), case.op.bwd(donate(again), dy, case.cfg), "donated bwd")
    if pending is not None:
        same_bits(dparams, case.op.wgrad(donate(pending), case.cfg), "donated wgrad")
    if tensors(params):
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        into = tree_map(lambda g: None if g is None else torch.ones_like(g, dtype=wide), dparams)
        total, _ = case.op.bwd(residuals, dy, case.cfg, into=into)
        assert all(a is b for a, b in zip(leaves(total), leaves(into), strict=True)), "into must be returned"
        want = tree_map(lambda g: None if g is None else g.to(wide) + 1, dparams)
        assert_close(total, want, dtype=dtype, what="into")


def law_pure(case: Case, dtype: torch.dtype) -> None:
    """No argument is written to, and the same call gives the same bits."""
    params, x = case.make(dtype)
    before = tree_map_tensors(torch.clone, (params, x))
    y, residuals = case.op.fwd(params, x, case.cfg)
    same_bits(y, case.op.fwd(params, x, case.cfg)[0], "y of a second forward")
    dy = float_like(y, 7)
    dy_before = tree_map_tensors(torch.clone, dy)
    y_before = tree_map_tensors(torch.clone, y)
    first = case.op.bwd(residuals, dy, case.cfg)
    same_bits(first, case.op.bwd(residuals, dy, case.cfg), "a second backward")
    same_bits((params, x), before, "arguments of the forward")
    same_bits((dy, y), (dy_before, y_before), "dy and y")
    with poisoned_empties():
        y2, residuals = case.op.fwd(params, x, case.cfg)
        same_bits((y, first), (y2, case.op.bwd(residuals, dy, case.cfg)), "a run with NaN in fresh memory")


@contextlib.contextmanager
def poisoned_empties() -> Iterator[None]:
    """`torch.empty` and its like give NaN (or the largest integer), so that memory which nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def law_mirror(case: Case, dtype: torch.dtype) -> None:
    """Gradients have the structure, shapes and dtypes of what they are gradients of; None where not needed."""
    params, x, _, _, dy, (dparams, dx) = run(case, dtype)
    _mirrors(dparams, params, "dparams")
    _mirrors(dx, x, "dx")
    for t, d in zip(leaves(x), leaves(dx), strict=True):
        assert (d is not None) == (isinstance(t, Tensor) and t.is_floating_point()), "dx of every float leaf of x"
    _, residuals = case.op.fwd(params, x, case.cfg)
    same_bits(case.op.bwd(residuals, None, case.cfg), (nothing_like(dparams), nothing_like(dx)), "bwd of dy=None")


def _mirrors(gradient: Any, tree: Any, what: str) -> None:
    assert same_structure(gradient, tree), f"{what} has leaves {list(paths(gradient))}, wanted {list(paths(tree))}"
    for (path, d), t in zip(paths(gradient).items(), leaves(tree), strict=True):
        assert d is None or (d.shape, d.dtype) == (t.shape, t.dtype), f"{what}.{path}: {d.shape} {d.dtype}"


def law_frugal(case: Case, dtype: torch.dtype) -> None:
    """Every mask of needs gives the same bits where a gradient is needed, None elsewhere, and no more residuals."""
    params, x, _, residuals, dy, (dparams, dx) = run(case, dtype)
    assert case.op.fwd(params, x, case.cfg, needs=Needs.NONE)[1] is None, "Needs.NONE keeps nothing"
    full = len(tensors(residuals))
    given = {id(t) for t in tensors((params, x))}
    storages = {t.untyped_storage()._cdata for t in tensors((params, x)) if t.numel()}
    for t in tensors(residuals):
        shares = t.numel() > 0 and t.untyped_storage()._cdata in storages
        assert not shares or id(t) in given, "a residual that aliases an input must be that same object"
    masks: list[Needs] = [Needs(x=True, params=False), Needs(x=False, params=True)]
    masks += [Needs(x=False, params=[path]) for path, t in paths(params).items() if t is not None and path]
    for needs in masks:
        if not needs.x and not tensors(params):
            continue
        _, kept = case.op.fwd(params, x, case.cfg, needs=needs)
        assert len(tensors(kept)) <= full, f"{needs} keeps more than all"
        got_params, got_x = case.op.bwd(kept, dy, case.cfg)
        same_bits(got_x, dx if needs.x else nothing_like(dx), f"dx under {needs}")
        for (path, got), want in zip(paths(got_params).items(), leaves(dparams), strict=True):
            assert_close(got, want if needs.param(path) else None, dtype=dtype, what=f"dparams.{path} under {needs}")
        if tensors(params):
            into = tree_map(lambda g: None if g is None else torch.ones_like(g), got_params)
            total, _ = case.op.bwd(kept, dy, case.cfg, into=into)
            want = tree_map(lambda g: None if g is None else g + 1, got_params)
            assert_close(total, want, dtype=dtype, what=f"into under {needs}")


def law_right(case: Case, dtype: torch.dtype) -> None:
    """y and all gradients match PyTorch autograd in float64 through the reference, on the same inputs."""
    params, x, y, _, dy, (dparams, dx) = run(case, dtype)

    def double(t: Any) -> Any:
        return t.double().requires_grad_() if t.is_floating_point() else t

    ref_params, ref_x = tree_map_tensors(double, params), tree_map_tensors(double, x)
    want = case.reference(ref_params, ref_x, case.cfg)
    length = max([t.numel() for t in tensors((params, x, y))] + [1])
    detached = tree_map_tensors(torch.detach, want)
    assert_close(y, detached, dtype=dtype, length=length, what=f"y of {case}")
    wanted = [t for t in tensors((ref_params, ref_x)) if t.requires_grad]
    outputs = [(o, d.double()) for o, d in zip(leaves(want), leaves(dy), strict=True) if d is not None]
    found = torch.autograd.grad([o for o, _ in outputs], wanted, [d for _, d in outputs], allow_unused=True)
    by_id = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)}
    reference = tree_map(lambda t: by_id.get(id(t)), (ref_params, ref_x))
    got = tree_map(lambda g, t: torch.zeros_like(t) if g is None and t is not None else g, (dparams, dx), reference)
    assert_close(got, reference, dtype=dtype, length=length, what=f"gradients of {case}")


def law_finite_differences(case: Case, dtype: torch.dtype) -> None:
    """In float64, a central difference along a random direction matches the gradients."""
    if dtype is not torch.float64:
        return
    params, x, _, _, dy, (dparams, dx) = run(case, dtype)
    direction = float_like((params, x), 11)
    h = 1e-6

    def value(sign: float) -> Tensor:
        moved = tree_map(lambda t, v: t if v is None else t + sign * h * v, (params, x), direction)
        y, _ = case.op.fwd(*moved, case.cfg, needs=Needs.NONE)
        terms = [(o * d).sum() for o, d in zip(leaves(y), leaves(dy), strict=True) if d is not None]
        return torch.stack(terms).sum()

    numeric = (value(1.0) - value(-1.0)) / (2 * h)
    terms = [(g * v).sum() for g, v in zip(leaves((dparams, dx)), leaves(direction), strict=True) if g is not None]
    exact = torch.stack(terms).sum() if terms else torch.zeros(())
    scale = sum((float(t.abs().max()) for t in terms), 1.0)
    assert abs(float(numeric - exact)) <= 1e-5 * scale, f"finite difference {float(numeric)}, gradients {float(exact)}"


def law_traceable(case: Case, dtype: torch.dtype) -> None:
    """Forward and backward run on fake tensors and trace with make_fx to the same values."""
    params, x, y, _, dy, gradients = run(case, dtype)

    def step(params: Any, x: Any, dy: Any) -> Any:
        y, residuals = case.op.fwd(params, x, case.cfg)
        return leaves((y, case.op.bwd(residuals, dy, case.cfg)))

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map_tensors(mode.from_tensor, (params, x, dy))
        for fake, real in zip(step(*fakes), leaves((y, gradients)), strict=True):
            assert real is None or (fake.shape, fake.dtype) == (real.shape, real.dtype), "fake shapes differ"
    given = (params, x, dy)
    flat = leaves(given)
    where = [i for i, t in enumerate(flat) if isinstance(t, Tensor)]

    def traced(*values: Tensor) -> Any:
        every = iter(values)
        return step(*tree_map(lambda t: next(every) if isinstance(t, Tensor) else t, given))

    graph = make_fx(traced)(*[flat[i] for i in where])
    got = graph(*[flat[i] for i in where])
    for value, real in zip(got, leaves((y, gradients)), strict=True):
        if real is not None and real.numel():
            assert_close(value, real, dtype=dtype, what="traced value")


def law_compiles(case: Case, dtype: torch.dtype, backend: str = "aot_eager", dynamic: bool = False) -> None:
    """Forward and backward are one graph for torch.compile(fullgraph=True)."""
    params, x, y, _, dy, gradients = run(case, dtype)

    def step(params: Any, x: Any, dy: Any) -> Any:
        y, residuals = case.op.fwd(params, x, case.cfg)
        return y, case.op.bwd(residuals, dy, case.cfg)

    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)(params, x, dy)
    assert_close(got, (y, gradients), dtype=dtype, what="compiled")


def law_edges(case: Case, dtype: torch.dtype) -> None:
    """Inputs and cotangents of any strides give the same values as contiguous ones, whatever fresh memory holds."""
    params, x, y, residuals, dy, gradients = run(case, dtype)
    for name, layout in LAYOUTS.items():
        with poisoned_empties():
            y2, kept = case.op.fwd(tree_map_tensors(layout, params), tree_map_tensors(layout, x), case.cfg)
            got = case.op.bwd(kept, tree_map_tensors(layout, dy), case.cfg)
        assert_close(y2, y, dtype=dtype, what=f"y of {name} inputs")
        assert_close(got, gradients, dtype=dtype, what=f"gradients of {name} inputs")
    for dim in (0, -1):
        repeated = tree_map_tensors(lambda t, dim=dim: expanded(t, dim), dy)
        want = case.op.bwd(residuals, tree_map_tensors(Tensor.contiguous, repeated), case.cfg)
        with poisoned_empties():
            got = case.op.bwd(residuals, repeated, case.cfg)
        assert_close(got, want, dtype=dtype, what=f"gradients of a dy expanded along {dim}")


def law_loud(case: Case, dtype: torch.dtype) -> None:
    """Every class of bad call raises by name, before anything changes."""
    params, x, y, residuals, dy, _ = run(case, dtype)
    op = case.op
    names = tuple(f"{op.name}_{f}" for f in ("fwd", "bwd", "dgrad", "wgrad"))
    for what, call in bad_calls(case, params, x, residuals, dy):
        try:
            call()
        except (ValueError, TypeError, GradModeError, DonatedError, StaleResidualError) as error:
            message = str(error)
            transparent = "_fwd: " in message or "_bwd: " in message or "grad: " in message
            assert message.startswith(names) or transparent, f"{what}: unnamed error {message!r}"
            assert "must" in message and "got" in message, f"{what}: {message!r} says neither what must be nor what came"
        else:
            raise AssertionError(f"{case}: {what} went through without an error")


def bad_calls(case: Case, params: Any, x: Any, residuals: Any, dy: Any) -> Any:
    """(what, call) for every class of fault."""
    op, cfg = case.op, case.cfg
    several = len(tensors((params, x))) > 1

    def changed(tree: Any, path: str, change: Callable[[Tensor], Any]) -> Any:
        return tree_map_path(lambda p, t: change(t) if p == path else t, tree)

    yield "cfg of another type", lambda: op.fwd(params, x, object())
    yield "needs of another type", lambda: op.fwd(params, x, cfg, needs=True)
    yield "params of another type", lambda: op.fwd(3.0, x, cfg)
    for side, tree, call in (
        ("x", x, lambda bad: op.fwd(params, bad, cfg)),
        ("params", params, lambda bad: op.fwd(bad, x, cfg)),
        ("dy", dy, lambda bad: op.dgrad(residuals, bad, cfg)),
    ):
        for path, t in paths(tree).items():
            if not isinstance(t, Tensor):
                continue
            name = f"{side}.{path}" if path else side
            if side != "dy":
                yield f"{name} None", lambda p=path, s=tree, c=call: c(changed(s, p, lambda t: None))
                if several:
                    yield f"{name} on another device", lambda p=path, s=tree, c=call: c(changed(s, p, _to_meta))
            yield f"{name} complex", lambda p=path, s=tree, c=call: c(changed(s, p, _to_complex))
            if t.dim() and name not in case.free:
                yield f"{name} too large", lambda p=path, s=tree, c=call: c(changed(s, p, _larger))
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
    yield from into_calls(case, params, residuals, dy)


def stale_calls(case: Case, params: Any, x: Any, residuals: Any, dy: Any) -> Any:
    """(what, call): a backward after a write to each input that the residuals alias."""
    kept = {id(t) for t in tensors(residuals)}
    for i, (path, t) in enumerate(paths((params, x)).items()):
        if id(t) not in kept:
            continue

        def call(i: int = i) -> None:
            mine = tree_map_tensors(torch.clone, (params, x))
            _, residuals = case.op.fwd(*mine, case.cfg)
            leaves(mine)[i].add_(0)
            case.op.bwd(residuals, dy, case.cfg)

        yield f"{path} written to since the forward", call


def into_calls(case: Case, params: Any, residuals: Any, dy: Any) -> Any:
    """(what, call): accumulators of a wrong kind, one leaf at a time; none of the others may have been added to."""
    faults: dict[str, Callable[[Tensor], Any]] = {
        "missing": lambda t: None,
        "of another shape": _larger,
        "of integers": lambda t: torch.zeros_like(t, dtype=torch.int64),
        "on another device": _to_meta,
        "no tensor": lambda t: 3.0,
        "too narrow": lambda t: t.to(torch.bfloat16 if t.element_size() > 2 else torch.float8_e5m2),
        "that requires grad": lambda t: t.requires_grad_(),
        "expanded": lambda t: t.new_zeros(()).expand(t.shape) if t.numel() > 1 else None,
    }
    of = {path: t for path, t in paths(params).items() if isinstance(t, Tensor)}
    call = functools.partial(_backward_into, case, params, residuals, dy)
    for path, (what, fault) in itertools.product(of, faults.items()):
        yield f"into.{path} {what}", functools.partial(call, lambda p, t, path=path, fault=fault: fault(t) if p == path else t)
    for a, b in itertools.pairwise([path for path, t in of.items() if t.numel()]):
        room = of[a].new_zeros(max(of[a].numel(), of[b].numel()))
        yield (
            f"into.{b} in the memory of {a}",
            functools.partial(call, lambda p, t, pair=(a, b), room=room: room[: t.numel()].view(t.shape) if p in pair else t),
        )
    if of:
        yield "into of another type", lambda: case.op.bwd(residuals, dy, case.cfg, into=3.0)


def _backward_into(case: Case, params: Any, residuals: Any, dy: Any, change: Callable[[str, Any], Any]) -> None:
    """A backward into zeros, changed; on its error, all must still be zeros."""
    into = tree_map_path(change, tree_map_tensors(torch.zeros_like, params))
    try:
        case.op.bwd(residuals, dy, case.cfg, into=into)
    finally:
        touched = [p for p, a in paths(into).items() if isinstance(a, Tensor) and not a.is_meta and a.float().any()]
        assert not touched, f"{', '.join(touched)} was added to before the error"


class Foreign:
    """Stands for the residuals of another op."""


def _to_meta(t: Tensor) -> Tensor:
    return t.to("meta")


def _to_complex(t: Tensor) -> Tensor:
    return t.to(torch.complex64)


def _larger(t: Tensor) -> Tensor:
    return t.new_zeros([n + 1 for n in t.shape])


def tree_map_path(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    names = iter(paths(tree))
    return tree_map(lambda t: fn(next(names), t), tree)


LAWS: dict[str, Callable[[Case, torch.dtype], None]] = {
    law.__name__.removeprefix("law_"): law
    for law in (
        law_split,
        law_pure,
        law_mirror,
        law_frugal,
        law_right,
        law_finite_differences,
        law_traceable,
        law_edges,
        law_loud,
        law_guarded,
        law_compiles,
    )
}


def check_op(
    op: Op,
    *,
    cfg: Any,
    x: Any,
    reference: Callable[[Any, Any, Any], Any],
    params: Any = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    laws: tuple[str, ...] = tuple(LAWS),
    free: tuple[str, ...] = (),
) -> None:
    """Hold an op to the laws. Raises `AssertionError` naming the law, the leaf and the numbers.

    x: a function of a `Draw` that makes x (or a tree of tensors, cast to each dtype); reference: plain differentiable
    PyTorch for y, `reference(params, x, cfg)`; params: likewise, by default drawn in the shapes of `op.init`;
    free: paths of leaves that may have any size (`"x"`, `"x.0"`), which are left out of the bad calls.
    """

    def maker(value: Any) -> Any:
        if value is None or callable(value):
            return value
        return lambda d: tree_map_tensors(lambda t: t.to(d.dtype) if t.is_floating_point() else t, value)

    case = Case(op=op, cfg=cfg, x=maker(x), reference=reference, params=maker(params), dtypes=dtypes, free=free)
    for dtype in dtypes:
        for name in laws:
            if name == "compiles" and dtype is not dtypes[0]:
                continue
            try:
                LAWS[name](case, dtype)
            except AssertionError as error:
                raise AssertionError(f"law {name!r}, {dtype}: {error}") from error
