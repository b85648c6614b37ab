"""The laws, each a function of a case and a dtype. `LAWS` lists them; `check_op` runs them on a user's op."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.engine import random
from funcops.engine.backend import select, wants_triton, wide
from funcops.engine.backend.declare import KERNELS, Kernel, watched
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import Saved
from funcops.engine.errors import describe, join_path, require
from funcops.engine.program.explain import plan
from funcops.engine.program.rules import FEW
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import (
    WithExtras,
    dense,
    leaves,
    nothing_like,
    paths,
    put,
    same_structure,
    tensors,
    tree_map,
    tree_map_tensors,
)
from funcops.testing.case import FLOATS, Case
from funcops.testing.checks import equal_bits, poisoned_empties, run, same_bits
from funcops.testing.checks import equal_bits as _same
from funcops.testing.checks import float_like as float_like
from funcops.testing.frugal import law_frugal
from funcops.testing.guarded import law_guarded
from funcops.testing.invariant import law_invariant
from funcops.testing.loud import law_loud
from funcops.testing.tolerances import assert_close

_lock, _blocks = threading.Lock(), 0


@contextlib.contextmanager
def kernels_checked() -> Iterator[None]:
    """A block in which every eager call of a kernel is checked. Raises `AssertionError` in a call that breaks a rule."""
    with select.chosen(select.choice()):  # in any block a call asks `choose`, on the CPU too
        _count(1)
        try:
            yield
        finally:
            _count(-1)


def _count(by: int) -> None:
    global _blocks
    with _lock:
        _blocks += by
        for kernel in list(KERNELS) if _blocks == (by > 0) else ():
            kernel.scope["choose"] = functools.partial(_choose, kernel) if by > 0 else kernel.choose


def _choose(kernel: Kernel, first: Tensor) -> Any:
    chosen = kernel.choose(first)
    return chosen if watched() else functools.partial(_checked, kernel, chosen)


def _checked(kernel: Kernel, chosen: Any, *args: Any) -> Any:
    names = kernel.torch_impl.__code__.co_varnames
    before = tree_map_tensors(torch.clone, args)
    result = chosen(*args)
    for name, arg, was in zip(names, args, before, strict=False):
        for t, old in zip(tensors(arg), tensors(was), strict=True):
            same = name in kernel.mutates or equal_bits(t, old)
            assert same, f"kernel {kernel.name!r} wrote to {name}: write to a tensor of its own, or declare mutates=({name!r},)"
            shared = [t.numel() > 0 and _memory(r) == _memory(t) for r in tensors(result)]
            assert not any(shared), f"kernel {kernel.name!r} returned memory of {name}: a kernel returns fresh tensors"
    if chosen is not kernel.torch_impl:
        got, want = (one if isinstance(one, tuple) else (one,) for one in (result, kernel.torch_impl(*before)))
        said = f"Triton returned {', '.join(map(describe, got))}, torch {', '.join(map(describe, want))}"
        right = len(got) == len(want) and all(map(_alike, got, want))
        assert right, f"kernel {kernel.name!r}: {said}"
    return result


def _alike(got: Any, want: Any) -> bool:
    """Whether two results have one form; a torch body may add up at once, [1, N], what Triton returns as partial sums, [P, N]."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return got is want
    summed = want.dim() == got.dim() > 1 and want.shape[0] == 1 and want.shape[1:] == got.shape[1:]
    return got.dtype is want.dtype and (got.shape == want.shape or summed)


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


Layout = Callable[[Tensor], Tensor]
FAR = 977  # a stride that no code expects


def column_major(t: Tensor) -> Tensor:
    """Lay t out with stride 1 in the first dimension."""
    back = list(reversed(range(t.dim())))
    return t.permute(back).clone(memory_format=torch.contiguous_format).permute(back)


def transposed(t: Tensor) -> Tensor:
    """Exchange the last two dimensions in memory."""
    return t if t.dim() < 2 else t.mT.clone(memory_format=torch.contiguous_format).mT


def rolled(t: Tensor) -> Tensor:
    """Make the last dimension the outermost one in memory."""
    return t if t.dim() < 2 else t.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def spread(t: Tensor) -> Tensor:
    """Lay t out as every second element of a row."""
    return _within(t, (*t.shape, 2), (..., 0))


def sliced(t: Tensor) -> Tensor:
    """Lay the rows out within rows that are longer by 3: with an offset, and unaligned addresses."""
    if t.dim() == 0:
        return spread(t)
    return _within(t, (*t.shape[:-1], t.shape[-1] + 3), (..., slice(1, -2)))


def odd_ones(t: Tensor) -> Tensor:
    """Change the strides of dimensions of size 1 of a contiguous tensor, which have no effect."""
    t = t.contiguous()
    strides = [FAR if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides, t.storage_offset())


def _within(t: Tensor, shape: tuple[int, ...], place: Any) -> Tensor:
    """Lay t out in a part of a larger tensor, whose other elements are NaN (of integers: 0)."""
    room = t.new_full(shape, float("nan") if t.is_floating_point() else 0)
    room[place] = t
    return room[place]


LAYOUTS: dict[str, Layout] = {f.__name__: f for f in (column_major, transposed, rolled, spread, sliced, odd_ones)}


def expanded(t: Tensor, dim: int) -> Tensor:
    """Repeat the first values of t along `dim`, with stride 0; this layout changes the values."""
    return t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape) if t.dim() else t


def law_split(case: Case, dtype: torch.dtype) -> None:
    """`bwd` equals `dgrad` then `wgrad`, bit for bit; donated or not, and into accumulators wider than the gradients."""
    params, x, _, residuals, dy, (dparams, dx) = run(case, dtype)
    dx2, pending = case.op.dgrad(residuals, dy, case.cfg)
    same_bits(dx, dx2, "dx")
    same_bits(dparams, case.op.wgrad(pending, case.cfg), "dparams")
    _, again = case.op.fwd(params, x, case.cfg)
    same_bits((dparams, dx), case.op.bwd(donate(again), dy, case.cfg), "donated bwd")
    if tensors(params):
        _split_into(case, dtype, residuals, dy, pending, dparams)
    if pending is not None:
        tree_map_tensors(Tensor.zero_, case.op.wgrad(pending, case.cfg))
        same_bits(dparams, case.op.wgrad(pending, case.cfg), "wgrad after a write to the gradients of an earlier one")
        same_bits(dparams, case.op.wgrad(donate(pending), case.cfg), "donated wgrad")


def _split_into(case: Case, dtype: torch.dtype, residuals: Any, dy: Any, pending: Any, dparams: Any) -> None:
    """Check accumulators as wide as sums are: both ways into them give the same bits, the gradient rounded once or not at all."""
    into, other = (tree_map(lambda g: None if g is None else torch.ones_like(g, dtype=wide(g.dtype)), dparams) for _ in range(2))
    total, _ = case.op.bwd(residuals, dy, case.cfg, into=into)
    _returned(f"{case.op.name}_bwd", total, into)
    _returned(f"{case.op.name}_wgrad", case.op.wgrad(pending, case.cfg, into=other), other)
    _returned(f"{case.op.name}_wgrad of None", case.op.wgrad(None, case.cfg, into=other), other)
    same_bits(into, other, "into through bwd and through wgrad")
    want = tree_map(lambda g: None if g is None else g.to(wide(g.dtype)) + 1, dparams)
    assert_close(total, want, dtype=dtype, by_leaf=True, what="into")
    if not case.unrounded or dtype in (torch.float64, torch.float32):
        return
    params, x = tree_map_tensors(lambda t: t.double() if t.is_floating_point() else t, case.make(dtype))
    y, exact = case.op.fwd(params, x, case.cfg)
    d_exact, _ = case.op.bwd(exact, tree_map(lambda d, o: None if d is None else d.to(o.dtype), dy, y), case.cfg)
    found, sought = paths({"params": total}), paths({"params": d_exact})
    for path in case.unrounded:
        assert_close(found[path] - 1, sought[path], dtype=torch.float32, length=4096, what=f"into.{path}, unrounded,")


def _returned(function: str, found: Any, into: Any) -> None:
    for (path, mine), a in zip(paths({"into": into}).items(), leaves(found), strict=True):
        assert a is mine, f"{function} returns another tensor for {path}: it must add to that one and return it (see accumulate)"


def law_pure(case: Case, dtype: torch.dtype) -> None:
    """No argument is written to, by a kernel neither, and the same call gives the same bits."""
    with kernels_checked():
        _pure(case, dtype)


def _pure(case: Case, dtype: torch.dtype) -> None:
    params, x = case.make(dtype)
    given: dict[str, Any] = {"params": params, "x": x}
    before = tree_map_tensors(torch.clone, given)
    y, residuals = case.op.fwd(params, x, case.cfg)
    _unwritten(f"{case.op.name}_fwd", given, before)
    same_bits(y, case.op.fwd(params, x, case.cfg)[0], "y of a second forward")
    if case.op.recompute is not None:
        kept_for_it = case.op.fwd(params, x, case.cfg, needs=Needs.ALL.with_recompute())[1]
        same_bits(case.op.recompute(kept_for_it, case.cfg), y, "y recomputed")
    dy = float_like(y, 7)
    given |= {"dy": dy, "y": y}
    before |= tree_map_tensors(torch.clone, {"dy": dy, "y": y})
    kept = _objects(residuals)
    _, pending = case.op.dgrad(residuals, dy, case.cfg)
    _unwritten(f"{case.op.name}_dgrad", given, before)
    waiting = _objects(pending)
    case.op.wgrad(pending, case.cfg)
    _unwritten(f"{case.op.name}_wgrad", given, before)
    first = case.op.bwd(residuals, dy, case.cfg)
    _unwritten(f"{case.op.name}_bwd", given, before)
    assert _objects(residuals) == kept and _objects(pending) == waiting, "a backward changes residuals or pending"
    same_bits(first, case.op.bwd(residuals, dy, case.cfg), "a second backward")
    with poisoned_empties():
        y2, residuals = case.op.fwd(params, x, case.cfg)
        same_bits((y, first), (y2, case.op.bwd(residuals, dy, case.cfg)), "a run with NaN in fresh memory")


def _unwritten(function: str, given: Any, before: Any) -> None:
    for (path, t), was in zip(paths(given).items(), leaves(before), strict=True):
        same = not isinstance(t, Tensor) or _same(t, was)
        assert same, f"{function} wrote to {path}: its arguments are the caller's"


def _objects(tree: Any) -> dict[str, int]:
    return {path: id(t) for path, t in paths(tree).items()}


def law_mirror(case: Case, dtype: torch.dtype) -> None:
    """Gradients have the structure, shapes and dtypes of params and x; None where not needed. If y has named outputs, None for a
    part of dy counts as zero."""
    params, x, y, residuals, dy, (dparams, dx) = run(case, dtype)
    if type(y) is WithExtras:
        _none_is_zero(case, residuals, dy, dtype)
    params, x = dense((params, x))
    made = tree_map(lambda t: t, case.op.init(case.cfg, key=random.key(0), dtype=dtype))
    for path, t in paths({"params": made}).items():
        right = not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype in (dtype, wide(dtype))
        assert right, f"{case.op.name}_init made {path} of {t.dtype}, wanted {dtype}"
    _mirrors(dparams, params, "dparams")
    _mirrors(dx, x, "dx")
    for (path, t), d in zip(paths({"x": x}).items(), leaves(dx), strict=True):
        wanted = isinstance(t, Tensor) and t.is_floating_point()
        assert (d is not None) == wanted, (
            f"d{path} is {'None' if d is None else 'a tensor'}, wanted {'a gradient' if wanted else 'None'}"
        )
    for path, t in [] if case.casts else paths({"y": dense(y)}).items():
        right = not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype is dtype
        assert right, f"{path} is {t.dtype} for an x of {dtype}: give the case casts=True if it is to be"
    _, residuals = case.op.fwd(*case.make(dtype), case.cfg)
    same_bits(case.op.bwd(residuals, None, case.cfg), (nothing_like(dparams), nothing_like(dx)), "bwd of dy=None")


def _none_is_zero(case: Case, residuals: Any, dy: Any, dtype: torch.dtype) -> None:
    for path, d in paths(dy).items():
        if d is not None:
            none, zero = (case.op.bwd(residuals, put(dy, path, part), case.cfg) for part in (None, torch.zeros_like(d)))
            none = tree_map(lambda g, z: torch.zeros_like(z) if g is None and z is not None else g, none, zero)
            assert_close(none, zero, dtype=dtype, what=f"gradients of a dy without {path}")


def _mirrors(gradient: Any, tree: Any, what: str) -> None:
    assert same_structure(gradient, tree), f"{what} has leaves {list(paths(gradient))}, wanted {list(paths(tree))}"
    for (path, d), t in zip(paths(gradient).items(), leaves(tree), strict=True):
        same = d is None or (d.shape, d.dtype) == (t.shape, t.dtype)
        assert same, f"{join_path(what, path)} is {describe(d)}, wanted {describe(t)}"


def law_right(case: Case, dtype: torch.dtype) -> None:
    """y and all gradients match PyTorch autograd in float64 through the reference, on the same inputs."""
    params, x, y, _, dy, (dparams, dx) = run(case, dtype)
    ref_params, ref_x, want = by_reference(case, params, x)
    length = max([t.numel() for t in tensors((params, x, y))] + [1])
    detached = tree_map_tensors(torch.detach, want)
    assert_close(dense(y), detached, dtype=dtype, length=length, bits=case.bits, what=f"y of {case}")
    wanted = [t for t in tensors((ref_params, ref_x)) if t.requires_grad]
    outputs = [(o, d.double()) for o, d in zip(leaves(want), leaves(dy), strict=True) if d is not None]
    found = torch.autograd.grad([o for o, _ in outputs], wanted, [d for _, d in outputs], allow_unused=True)
    by_id = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)}
    reference = tree_map(lambda t: by_id.get(id(t)), (ref_params, ref_x))
    got = tree_map(lambda g, t: torch.zeros_like(t) if g is None and t is not None else g, (dparams, dx), reference)
    named: list[Any] = [{"params": params, "x": x} for params, x in (got, reference)]
    close: dict[str, Any] = dict(dtype=dtype, length=length, by_leaf=True, cancels=case.cancels, bits=case.bits)
    assert_close(*named, **close, what=f"gradients of {case}")


def by_reference(case: Case, params: Any, x: Any) -> tuple[Any, Any, Any]:
    """Copies of params and x in float64 that require gradients, and y of the case's reference from them, on the case's device."""

    def double(t: Any) -> Any:
        return t.double().requires_grad_() if t.is_floating_point() else t

    params, x = tree_map_tensors(double, dense((params, x)))
    with torch.device(case.device):  # of the tensors that a reference makes
        return params, x, case.reference(params, x, case.cfg)


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

    torch.compiler.reset()
    got = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)(params, x, dy)
    assert_close(got, (y, gradients), dtype=dtype, what="compiled")


def law_edges(case: Case, dtype: torch.dtype) -> None:
    """Inputs and cotangents of any strides give the same values as contiguous ones, whatever fresh memory holds; an x without
    leading dimensions, if the op takes one, gives the same values as one row."""
    params, x, y, residuals, dy, gradients = run(case, dtype)
    _without_leading(case, params, x, dtype)
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


def _without_leading(case: Case, params: Any, x: Any, dtype: torch.dtype) -> None:
    """Check an x of [D] where `[*, D]` is declared. An op that raises for it, or for its row [1, D], is let off."""
    leading = max([t.dim() for t in tensors(x)], default=0) - 1
    if leading < 1 or any(0 in t.shape[:leading] for t in tensors(x)):
        return
    bare = tree_map_tensors(lambda t: t[(0,) * min(leading, t.dim())], x)
    row = tree_map_tensors(lambda t, of: t.unsqueeze(0) if of.dim() else t, bare, x)
    try:
        y, residuals = case.op.fwd(params, bare, case.cfg)
        want, kept = case.op.fwd(params, row, case.cfg)
    except (TypeError, ValueError):
        return
    dy = float_like(y, 7)
    try:
        dparams, dx = case.op.bwd(residuals, dy, case.cfg)
    except Exception as error:
        shapes = ", ".join(str(list(t.shape)) for t in tensors(bare))
        raise AssertionError(
            f"bwd of an x without leading dimensions, {shapes}, which fwd takes, raised {type(error).__name__}: {error}"
        ) from error
    as_row = case.op.bwd(kept, _shaped(dy, want), case.cfg)
    _mirrors(dparams, as_row[0], "dparams of an x without leading dimensions")
    _mirrors(dx, dense(bare), "dx of an x without leading dimensions")
    for what, got, expected in (("y", y, want), ("gradients", (dparams, dx), as_row)):
        assert_close(_shaped(got, expected), dense(expected), dtype=dtype, what=f"{what} of an x without leading dimensions")


def _shaped(tree: Any, like: Any) -> Any:
    return tree_map(lambda t, of: t.reshape(of.shape) if isinstance(t, Tensor) else t, dense(tree), dense(like))


LAWS: dict[str, Callable[[Case, torch.dtype], None]] = {
    law.__name__.removeprefix("law_"): law
    for law in (
        law_pure,
        law_split,
        law_mirror,
        law_frugal,
        law_right,
        law_finite_differences,
        law_traceable,
        law_edges,
        law_loud,
        law_guarded,
        law_invariant,
        law_compiles,
    )
}


def _check_paths(case: Case) -> None:
    """Check that the leaves have the given paths: a wrong path would silently have no effect."""
    if not (case.free or case.cancels or case.unrounded):
        return
    params, x = case.make(case.dtypes[0])
    of_params, of_x = (list(paths({side: tree})) for side, tree in (("params", params), ("x", x)))
    for name, known in (("free", [*of_x, *of_params]), ("cancels", [*of_x, *of_params]), ("unrounded", of_params)):
        for path in getattr(case, name):
            ok = path in known or (name == "free" and path.partition(".")[0] == "dy")
            require(ok, "check_op", name, f"paths among {', '.join(known) or '(the op has no params)'}", repr(path))


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
    cancels: tuple[str, ...] = (),
    unrounded: tuple[str, ...] = (),
    casts: bool = False,
) -> None:
    """Check an op by the laws. Raises `AssertionError` naming the law, the leaf and the numbers, or the error that the op raised.

    x: a function of a `Draw` that makes x (or a tree of tensors, cast to each dtype); reference: plain differentiable
    PyTorch for y, `reference(params, x, cfg)`; params: likewise, by default drawn in the shapes of `op.init`;
    free: paths of leaves that may have any size (`"x"`, `"x.0"`), which are left out of the bad calls; cancels: paths of leaves
    whose gradients' terms cancel; unrounded: paths of params (`"params.weight"`) whose wider accumulators get the sum before it is
    rounded; casts: whether y has another float dtype than x. Raises `ValueError` for laws and paths that do not exist.

    >>> from funcops import ScaleConfig, scale
    >>> from funcops.testing import LAWS, check_op
    >>> list(LAWS)[:5]
    ['pure', 'split', 'mirror', 'frugal', 'right']
    >>> laws, x = ("split", "mirror", "right"), lambda draw: draw.randn(3)
    >>> check_op(scale, cfg=ScaleConfig(2.0), x=x, reference=lambda params, x, cfg: 2.0 * x, laws=laws)
    >>> try:
    ...     check_op(scale, cfg=ScaleConfig(2.0), x=x, reference=lambda params, x, cfg: 3.0 * x, laws=laws)
    ... except AssertionError as error:
    ...     print(str(error).partition(";")[0])
    ...
    law 'right', torch.float64: y of scale-ScaleConfig(factor=2.0) differs
    """

    def maker(value: Any) -> Any:
        if value is None or callable(value):
            return value
        return lambda d: tree_map_tensors(lambda t: t.to(d.dtype) if t.is_floating_point() else t, value)

    case = Case(
        op=op,
        cfg=cfg,
        x=maker(x),
        reference=reference,
        params=maker(params),
        dtypes=dtypes,
        free=free,
        cancels=cancels,
        unrounded=unrounded,
        casts=casts,
    )
    right = isinstance(laws, tuple) and laws and set(laws) <= LAWS.keys()
    require(bool(right), "check_op", "laws", f"a tuple of some of {', '.join(LAWS)}", repr(laws))
    require(bool(dtypes), "check_op", "dtypes", "at least one dtype", repr(dtypes))
    _check_paths(case)
    for dtype in dtypes:
        for name in sorted(laws, key="frugal".__eq__):  # last: other rules of fusion run under masks, so a wrong y shows there too
            if name == "compiles" and dtype is not dtypes[0]:
                continue
            try:
                LAWS[name](case, dtype)
            except Exception as error:
                raised = "" if isinstance(error, AssertionError) else f"the op raised {type(error).__name__}: "
                said = f"{raised}{error}{_lacking(case, dtype, error)}{_ran(case, dtype)}"
                raise AssertionError(f"law {name!r}, {dtype}: {said}") from error


def _lacking(case: Case, dtype: torch.dtype, error: Exception) -> str:
    """The declared fields that the forward did not save, beside an error such as that None has no attribute."""
    if not isinstance(error, (AttributeError, TypeError)) or "NoneType" not in str(error):
        return ""
    try:
        kept = case.op.fwd(*case.make(dtype), case.cfg)[1]
    except Exception:
        return ""
    names = (*kept.fields, *kept.names) if isinstance(kept, Saved) else ()
    lacks = [n for n in dict.fromkeys(names) if getattr(kept, n) is None and n != "inputs"]
    return "; " * bool(lacks) + ", ".join([f"{type(kept).__name__}.{n} is None: was it given to keep?" for n in lacks])


def _ran(case: Case, dtype: torch.dtype) -> str:
    """The rules of fusion in the plan of a combinator, any of which may be at fault."""
    first = next(iter(tensors(case.make(dtype)[1])), None)
    if case.op.lower is None or first is None or not (wants_triton(first) or first.numel() >= FEW):
        return ""
    planned = plan(case.cfg, device_type="cuda" if wants_triton(first) else "cpu", dtype=dtype)
    names = dict.fromkeys(line.rule.name for line in (*planned.forward, *planned.backward) if line.rule is not None)
    return "; rules of fusion that ran: " * bool(names) + ", ".join(names)
