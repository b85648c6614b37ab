"""One op from a torch function, called with arguments that differ in one property: each call is right, whatever came before."""

import contextlib
from dataclasses import field

import pytest
import torch
import torch.nn.functional as F

from funcops import Needs, TorchConfig, differentiable, op_from_torch
from funcops.engine.contract.op import OpConfig, config
from funcops.engine.trees import cast, leaves, tree_map_tensors


@config
class Factor(OpConfig):
    by: object = field(kw_only=False)


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def normed(params, x, cfg):
    return F.group_norm(x, 2) * x


def windows(params, x, cfg):
    return x.as_strided((2, 2), (1, 1)) * x.as_strided((1, 2), (2, 1), x.storage_offset())


def parts(params, x, cfg):
    return x.real.exp() * x.imag, torch.view_as_real(x * x.conj())


def doubled(params, x, cfg):
    return x * 2


def scaled(params, x, cfg):
    return x * cfg.by


def softened(params, x, cfg):
    return torch.softmax(x * 2, -1)


def filled(params, x, cfg):
    return x * torch.full((2,), 0.1), torch.arange(2.0) * x.detach()


def pair(params, x, cfg):
    if isinstance(x, dict):
        return {"y": x["a"] * x["b"].exp()}
    return x[0].exp() * x[1] if x[0].dim() == 1 else (x[0] - x[1], x[0])


SQUARE, LINE, COMPLEX, INTS = drawn(4, 4, 4), drawn(24), drawn(6, dtype=torch.complex128), torch.arange(3)
PAIR = drawn(2, 3)
FAMILIES = {
    "strides": (normed, [SQUARE, SQUARE.mT, SQUARE.permute(2, 1, 0), SQUARE[:1].expand(4, 4, 4), SQUARE[:, :, :1].expand(4, 4, 4)]),
    "shapes": (softened, [SQUARE, SQUARE[:0], SQUARE[:, :, :0], SQUARE[:, :2]]),
    "offsets": (windows, [LINE[:4], LINE[3:7], LINE[5:9].clone()]),
    "bits": (parts, [COMPLEX, COMPLEX.conj(), COMPLEX.conj().resolve_conj(), torch._neg_view(COMPLEX)]),
    "negative": (normed, [SQUARE, torch._neg_view(SQUARE)]),
    "leaves": (pair, [(PAIR[0], PAIR[0]), (PAIR[0], PAIR[1]), (PAIR[1], PAIR[0])]),
    "trees": (pair, [tuple(PAIR), (PAIR, PAIR), {"a": PAIR[0], "b": PAIR[1]}, {"b": PAIR[0], "a": PAIR[1]}, list(PAIR)]),
    "dtypes": (doubled, [LINE, LINE.float(), LINE.to(torch.complex64), torch.arange(4)]),
}
CFGS = {
    "numbers": (scaled, INTS, [Factor(1), Factor(1.0), Factor(True), Factor(2)]),
    "zeros": (scaled, LINE, [Factor(0.0), Factor(-0.0), Factor(0)]),
}
STATES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def able(t):
    return t.is_floating_point() or t.is_complex()


def by_autograd(fn, x, cfg):
    with torch.inference_mode(False), torch.enable_grad():
        own = tree_map_tensors(lambda t: t.detach().clone().requires_grad_(able(t)), x)
        y = fn(None, own, cfg)
        flat = [t for t in leaves(own) if t.requires_grad]
        ys = [t for t in leaves(y) if t.requires_grad]
        dys = iter([drawn(*t.shape, dtype=t.dtype) for t in ys])
        dy = tree_map_tensors(lambda t: next(dys) if t.requires_grad else None, y)
        found = (
            torch.autograd.grad(ys, flat, [drawn(*t.shape, dtype=t.dtype) for t in ys], allow_unused=True) if ys and flat else []
        )
        spread = iter(found)
        dx = tree_map_tensors(lambda t: next(spread) if t.requires_grad else None, own)
        return tree_map_tensors(torch.Tensor.detach, y), dy, dx


def signs(t):
    """0.0 and -0.0 differ in sign, though they are close."""
    return t.signbit() if t is not None and t.is_floating_point() else t


def same(got, want):
    torch.testing.assert_close(got, want, equal_nan=True)
    got, want = (list(map(signs, leaves(one))) for one in (got, want))
    assert all(a is b or torch.equal(a, b) or a.is_complex() for a, b in zip(got, want, strict=True))


def check(op, fn, x, cfg):
    want, dy, dwant = by_autograd(fn, x, cfg)
    y, residuals = op.fwd(None, x, cfg)
    same(y, want)
    if residuals is not None:
        same(op.bwd(residuals, dy, cfg)[1], dwant)


ROWS = [(name, fn, [(x, TorchConfig()) for x in xs]) for name, (fn, xs) in FAMILIES.items()] + [
    (name, fn, [(x, cfg) for cfg in cfgs]) for name, (fn, x, cfgs) in CFGS.items()
]


@pytest.mark.turns("name", "fn", "calls", every=2)
@pytest.mark.parametrize(("name", "fn", "calls"), ROWS, ids=[row[0] for row in ROWS])
def test_every_order_of_calls(name, fn, calls):
    for order in (calls, calls[::-1]):  # so that each comes after each other
        op = op_from_torch(fn, config=type(calls[0][1]))
        for x, cfg in order:
            check(op, fn, x, cfg)


@pytest.mark.turns("name", "fn", "calls", every=2)
@pytest.mark.parametrize(("name", "fn", "calls"), ROWS, ids=[row[0] for row in ROWS])
def test_every_order_under_autograd(name, fn, calls):
    for order in (calls, calls[::-1]):
        op = op_from_torch(fn, config=type(calls[0][1]))
        for x, cfg in order:
            want, dy, dwant = by_autograd(fn, x, cfg)
            own = tree_map_tensors(lambda t: t.clone().requires_grad_(able(t)), x)
            y = differentiable(op)(None, own, cfg)
            same(tree_map_tensors(torch.Tensor.detach, y), want)
            pairs = list(zip(leaves(y), leaves(dy), strict=True))
            pairs = [(t, d) for t, d in pairs if d is not None and t.requires_grad]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            same(tree_map_tensors(lambda t: t.grad, own), dwant)


@pytest.mark.parametrize("order", [list(STATES), list(STATES)[::-1]], ids=["there", "back"])
def test_every_order_of_states(order):
    op = op_from_torch(filled)
    for state in order:
        with STATES[state]():
            check(op, filled, torch.ones(2, dtype=torch.float64), TorchConfig())


def test_needs_of_one_tensor_given_twice():
    op, cfg = op_from_torch(pair), TorchConfig()
    a = drawn(3)
    for needs, want in ((Needs(x=("0",)), (a.exp() * a, None)), (Needs(x=("1",)), (None, a.exp()))):
        _, residuals = op.fwd(None, (a, a), cfg, needs=needs)
        same(op.bwd(residuals, torch.ones_like(a), cfg)[1], want)
    with pytest.raises(ValueError, match=r"pair_fwd: needs.x must be paths among 0, 1, got '2'"):
        op.fwd(None, (a, a), cfg, needs=Needs(x=("2",)))


MOVES = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("x", FAMILIES["strides"][1], ids=lambda t: str(t.stride()) if isinstance(t, torch.Tensor) else None)
def test_residuals_that_were_moved(x, move):
    op, cfg = op_from_torch(normed), TorchConfig()
    want, dy, dwant = by_autograd(normed, x, cfg)
    moved = tree_map_tensors(lambda t: MOVES[move](t) if t.dim() > 1 else t.clone(), op.fwd(None, x, cfg)[1])
    dx, pending = op.dgrad(moved, MOVES[move](dy), cfg)
    same(dx, dwant)
    assert pending is not None or op.wgrad(None, cfg) is None


def test_moved_into_other_values_raises():
    op, cfg = op_from_torch(normed), TorchConfig()
    _, residuals = op.fwd(None, SQUARE[:1].expand(4, 4, 4), cfg)
    other = tree_map_tensors(lambda t: drawn(*t.shape), residuals)
    with pytest.raises(ValueError, match="residuals.kept.input.0 must be equal at elements that overlapped in the forward"):
        op.dgrad(other, SQUARE, cfg)
    with pytest.raises(
        TypeError, match=r"normed_dgrad: residuals.kept.\S+ must be float64\[4, 4, 4\], as the forward kept it, got f"
    ):
        op.dgrad(cast(residuals, torch.float32), SQUARE, cfg)


def test_a_change_that_a_trace_cannot_see_raises():
    weight = drawn(4, 4).requires_grad_()
    captured = op_from_torch(lambda params, x, cfg: x @ weight, name="captured")
    with pytest.raises(
        ValueError, match="captured_fwd: fn must be a function that takes tensors that require grad as params or x, got float64"
    ):
        captured.fwd(None, SQUARE, TorchConfig())
    chosen = op_from_torch(lambda params, x, cfg: x[x > 0], name="chosen")
    with pytest.raises(ValueError, match="chosen_fwd: fn must be a function whose shapes and steps do not depend on values"):
        chosen.fwd(None, LINE, TorchConfig())
    for other in (object(), LINE.numpy()):
        with pytest.raises(TypeError, match="pair_fwd: x.1 must be a tensor, got"):
            op_from_torch(pair).fwd(None, (LINE, other), TorchConfig())
    op = op_from_torch(normed)
    y, residuals = op.fwd(None, SQUARE, TorchConfig())
    with torch.autocast("cpu", torch.bfloat16):
        for call in (lambda: op.fwd(None, SQUARE, TorchConfig()), lambda: op.dgrad(residuals, y, TorchConfig())):
            with pytest.raises(RuntimeError, match=r"normed_.*: must run outside of torch.autocast"):
                call()
