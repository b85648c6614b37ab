"""Traced ops inside of `torch.func.vmap` and `jvp`, and in forward mode: served as torch serves the module, or refused by name."""

from contextlib import nullcontext

import pytest
import torch
from own_models import CFG, Block, Convolved, Mlp, draw
from torch import nn
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import Needs, named_steps, op_from_module, op_from_torch
from funcops.engine.errors import GradModeError
from funcops.engine.trees import tree_map_tensors
from funcops.testing.tolerances import assert_close


def built(name):
    torch.manual_seed(0)
    if name == "function":
        op, x = op_from_torch(lambda params, x, cfg: (x * x).tanh() @ x.mT), draw(4, 6)
        op.fwd(None, x, CFG)
        return lambda x: (x * x).tanh() @ x.mT, op, None, x
    module = {"mlp": Mlp, "convolved": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.GELU())}[name]().double()
    x = draw(2, 5, 6) if name == "mlp" else draw(2, 3, 6, 6)
    op, params = op_from_module(module, x)
    return lambda x, params=params: torch.func.functional_call(module, params, (x,)), op, params, x


def half(op, params, name):
    needs = Needs(x=True, params=params is not None)

    def run(x):
        y, residuals = op.fwd(params, x, CFG, needs=needs)
        if name == "fwd":
            return y
        if name == "bwd":
            return op.bwd(residuals, torch.ones_like(y), CFG)[1]
        dx, pending = op.dgrad(residuals, torch.ones_like(y), CFG)
        return dx, op.wgrad(pending, CFG)

    return run


@pytest.mark.parametrize("which", ["fwd", "bwd", "halves"])
@pytest.mark.parametrize("name", ["mlp", "convolved", "function"])
def test_a_batch_is_the_stack_of_its_calls(name, which):
    if (name, which) == ("function", "halves"):
        which = "fwd"
    _, op, params, x = built(name)
    xs, run = torch.stack([x, x.cos(), 2 * x]), half(op, params, which)
    want = tree_map_tensors(lambda *parts: torch.stack(parts), *[run(one) for one in xs])
    for chunk in (None, 2):
        assert_close(vmap(run, chunk_size=chunk)(xs), want, dtype=torch.float64)
    y = run(x)
    with named_steps():
        assert_close(vmap(run)(xs), want, dtype=torch.float64)
    assert_close(run(x), y, dtype=torch.float64)


def test_a_batch_of_params():
    module, op, params, x = built("mlp")
    several = {n: torch.stack([p, 2 * p]) for n, p in params.items()}
    got = vmap(lambda params: op.fwd(params, x, CFG)[0])(several)
    want = [module(x, {n: p[i] for n, p in several.items()}) for i in range(2)]
    assert_close(got, torch.stack(want), dtype=torch.float64)


@pytest.mark.parametrize("name", ["mlp", "function"])
def test_forward_mode(name):
    module, op, params, x = built(name)
    run, tangent = half(op, params, "fwd"), draw(*x.shape, seed=2)
    want = jvp(module, (x,), (tangent,))
    assert_close(jvp(run, (x,), (tangent,)), want, dtype=torch.float64)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))
        assert_close((got.primal, got.tangent), want, dtype=torch.float64)
        other = torch.cat([x, x], -2)  # traced here, and right afterwards
        run(forward_ad.make_dual(other, torch.ones_like(other)))
    assert_close(run(other), module(other), dtype=torch.float64)
    assert_close(jacfwd(run)(x), jacrev(module)(x), dtype=torch.float64)
    # a product with a tangent of a gradient: forward over what is written out, not over autograd
    got = jvp(half(op, params, "bwd"), (x,), (tangent,))[1]
    assert_close(got, jvp(grad(lambda x: module(x).sum()), (x,), (tangent,))[1], dtype=torch.float64)
    assert_close(functionalize(run)(x), module(x), dtype=torch.float64)


@pytest.mark.parametrize("transform", [vmap, functionalize, lambda run: lambda x: jvp(run, (x,), (x,))], ids=["vmap", "f", "jvp"])
@pytest.mark.parametrize("name", ["mlp", "function"])
def test_a_trace_inside_is_refused(name, transform):
    _, op, params, x = built(name)
    run, held = half(op, params, "fwd"), len(op.traces())
    other = torch.cat([x, x], -2)[None]
    with pytest.raises(RuntimeError, match=r"_fwd: .* must be called once with these shapes, .* outside of transforms"):
        transform(run)(other)
    assert len(op.traces()) == held
    assert run(other).shape[0] == 1, "outside it is traced"
    transform(run)(other[None] if transform is vmap else other)


@pytest.mark.parametrize("transform", [grad, vjp, hessian, jacrev])
def test_reverse_mode_is_refused(transform):
    _, op, params, x = built("mlp")
    with pytest.raises(GradModeError, match=r"Mlp_fwd: x must be a tensor that does not require grad, .* funcops.differentiable"):
        transform(lambda x: op.fwd(params, x, CFG)[0].sum(), *([x] if transform is vjp else []))(x)


REFUSED = {
    "vmap of a batch norm": (Convolved, (2, 3, 6, 6), r"fwd: operator native_batch_norm in module 'norm' .*\(loop over the batch"),
    "jvp of attention": (Block, (2, 5, 6), r"fwd: operator \S*scaled_dot_product\S* must be one .*functional_call"),
    "vmap of dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout()), (3, 6), r"operator \S+ in module '1' .*randomness"),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_an_operator_without_a_rule_is_named(case, named):
    build, shape, text = REFUSED[case]
    op, params = op_from_module(build().double(), draw(*shape))

    def run(x):
        y = op.fwd(params, x, CFG)[0]
        return getattr(y, "main", y)

    x = draw(*shape)
    with pytest.raises(RuntimeError, match=f"^[A-Za-z]+_{text}" if text[0] == "f" else text):
        if named:
            with named_steps():
                vmap(run)(torch.stack([x, x])) if case.startswith("vmap") else jvp(run, (x,), (x,))
        else:
            vmap(run)(torch.stack([x, x])) if case.startswith("vmap") else jvp(run, (x,), (x,))
    run(x)


class Fails(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("of torch")


@pytest.mark.parametrize("inside", [False, True])
def test_other_errors_pass(inside):
    """Outside of a transform an error has the words of torch, and it is the cause of one inside."""
    op, x = op_from_torch(lambda params, x, cfg: x * x), draw(3)
    op.fwd(None, x, CFG)
    with pytest.raises(RuntimeError, match="mul must be one that .* of torch" if inside else "^of torch$") as caught:
        with Fails(), forward_ad.dual_level() if inside else nullcontext():
            op.fwd(None, x, CFG)
    assert not inside or str(caught.value.__context__) == "of torch"
