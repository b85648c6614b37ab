"""The engine with two operators of a user's, in a chain, a skip and a repeat. `tests/engine/test_proof.py` runs this file beside a
copy of the engine, where nothing else of the package is."""

import pickle

import pytest
import torch
from two_ops import BODY, LAYERS, MODEL, ProductConfig, SoftplusConfig, product, softplus

from funcops.engine import random
from funcops.engine.compose.add import AddConfig, add
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.fork import ForkConfig, fork
from funcops.engine.compose.identity import IdentityConfig, identity
from funcops.engine.compose.interleave import InterleaveConfig, interleave
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.repeat import repeat
from funcops.engine.compose.skip import SkipConfig, skip
from funcops.engine.compose.step import Step
from funcops.engine.compose.vjp import value_and_grad
from funcops.engine.errors import DonatedError
from funcops.engine.program.explain import explain
from funcops.engine.residuals import donate, pack, report, unpack
from funcops.engine.residuals.policy import Compress
from funcops.engine.trees import paths, tensors
from funcops.testing.case import Case
from funcops.testing.laws import LAWS

softplus_of = torch.nn.functional.softplus


def model():
    return chain.init(MODEL, key=random.key(0), dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)


def by_autograd(params, x):
    leaves = {path: t.clone().requires_grad_() for path, t in paths(params).items() if t is not None}
    h = x = x.clone().requires_grad_()
    for i in range(LAYERS.times):
        h = h + softplus_of(h @ leaves[f"blocks.{i}.up.weight"].mT)
    y = h @ leaves["out.weight"].mT
    y.sum().backward()
    return y.detach(), x.grad, {path: t.grad for path, t in leaves.items()}


def test_gradients_are_autograds():
    params, x = model()
    y, residuals = chain.fwd(params, x, MODEL)
    dparams, dx = chain.bwd(donate(residuals), torch.ones_like(y), MODEL)
    want_y, want_dx, want = by_autograd(params, x)
    torch.testing.assert_close((y, dx), (want_y, want_dx))
    assert want.keys() == {path for path, t in paths(dparams).items() if t is not None}
    torch.testing.assert_close({path: paths(dparams)[path] for path in want}, want)
    with pytest.raises(DonatedError):
        chain.bwd(residuals, torch.ones_like(y), MODEL)


def test_halves_are_the_whole_to_the_bit():
    params, x = model()
    y, residuals = chain.fwd(params, x, MODEL)
    whole, dx = chain.bwd(residuals, torch.ones_like(y), MODEL)
    dx_first, pending = chain.dgrad(residuals, torch.ones_like(y), MODEL)
    assert torch.equal(dx, dx_first)
    assert all(torch.equal(a, b) for a, b in zip(tensors(whole), tensors(chain.wgrad(donate(pending), MODEL)), strict=True))


def test_what_is_kept_is_printed_packed_and_explained():
    params, x = model()
    y, residuals = chain.fwd(params, x, MODEL)
    assert "up.x (x 2)" in str(report(residuals, params, x))
    small = pack(residuals, Compress("bf16"))
    assert report(small, params, x).kept_bytes < report(residuals, params, x).kept_bytes
    dparams, _ = chain.bwd(unpack(small), torch.ones_like(y), MODEL)
    want, _ = chain.bwd(residuals, torch.ones_like(y), MODEL)
    torch.testing.assert_close(tensors(dparams), tensors(want), rtol=0.02, atol=0.02)
    again = pickle.loads(pickle.dumps(residuals))
    assert all(torch.equal(a, b) for a, b in zip(tensors(residuals), tensors(again), strict=True))
    assert "up" in str(explain(BODY))


def test_a_loss_and_its_gradients():
    params, x = model()
    head = ChainConfig(steps=(*MODEL.steps, Step("one", product, ProductConfig(2, 1))))
    params = chain.init(head, key=random.key(0), dtype=torch.float64)
    loss, grads = value_and_grad(chain)(params, x[:1].sum(0), head)
    assert loss.numel() == 1 and paths(grads).keys() == paths(params).keys()


def of_layers(params, x, times):
    for i in range(times):
        x = x + softplus_of(x @ params[i]["up"].weight.mT)
    return x


CASES = [
    Case(
        op=softplus,
        cfg=SoftplusConfig(),
        x=lambda d: d.randn(3, 4),
        reference=lambda p, x, cfg: softplus_of(x),
        free=("x",),
        name="softplus",
    ),
    Case(
        op=product, cfg=ProductConfig(4, 2), x=lambda d: d.randn(3, 4), reference=lambda p, x, cfg: x @ p.weight.mT, name="product"
    ),
    Case(op=add, cfg=AddConfig(), x=lambda d: (d.randn(2, 3), d.randn(2, 3)), reference=lambda p, x, cfg: x[0] + x[1], name="add"),
    Case(op=fork, cfg=ForkConfig(), x=lambda d: d.randn(2, 3), reference=lambda p, x, cfg: (x, x), free=("x",), name="fork"),
    Case(op=identity, cfg=IdentityConfig(), x=lambda d: d.randn(2, 3), reference=lambda p, x, cfg: x, free=("x",), name="identity"),
    Case(
        op=chain, cfg=BODY, x=lambda d: d.randn(3, 4), reference=lambda p, x, cfg: softplus_of(x @ p["up"].weight.mT), name="chain"
    ),
    Case(
        op=skip,
        cfg=SkipConfig(chain, BODY),
        x=lambda d: d.randn(3, 4),
        reference=lambda p, x, cfg: x + softplus_of(x @ p["up"].weight.mT),
        name="skip",
    ),
    Case(op=repeat, cfg=LAYERS, x=lambda d: d.randn(3, 4), reference=lambda p, x, cfg: of_layers(p, x, cfg.times), name="repeat"),
    Case(
        op=parallel,
        cfg=ParallelConfig(branches=(Step("a", product, ProductConfig(4, 2)), Step("b", softplus, SoftplusConfig()))),
        x=lambda d: d.randn(3, 4),
        reference=lambda p, x, cfg: (x @ p["a"].weight.mT, softplus_of(x)),
        name="parallel",
    ),
    Case(
        op=interleave,
        cfg=InterleaveConfig(chain, BODY, 2),
        x=lambda d: d.randn(4, 4),
        reference=lambda p, x, cfg: softplus_of(x @ p["up"].weight.mT),
        name="interleave",
    ),
]
QUICK = [name for name in LAWS if name not in ("compiles", "finite_differences", "traceable")]  # which take seconds each


@pytest.mark.parametrize("law", QUICK)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_law(case, law):
    if law not in case.exempt:
        LAWS[law](case, torch.float64)
