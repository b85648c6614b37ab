"""Wrong and missing declarations of an author's op: make_op adds the checks of a plain function, and the rest is refused by
name."""

from dataclasses import field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from funcops import ChainConfig, LinearConfig, StaleResidualError, Step, chain, linear, random
from funcops.engine.backend import kernel
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Pending, Residuals, saved
from funcops.engine.trees import leaf, tree


@config
class SwishConfig(OpConfig):
    dim: Any = field(kw_only=False)


@tree
class SwishParams:
    beta: Tensor = leaf("[D]")


class SwishPending(Pending):
    x: Tensor = saved("[*, D]", alias="residuals.x", needed_by=WGRAD)
    beta: Tensor = saved("[D]", alias="residuals.beta", needed_by=WGRAD)
    dy: Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)


class SwishResiduals(Residuals):
    x: Tensor = saved("[*, D]", alias="x", needed_by=DGRAD | WGRAD | RECOMPUTE)
    beta: Tensor = saved("[D]", alias="params.beta", needed_by=DGRAD | WGRAD | RECOMPUTE)


def swish_of(residuals=SwishResiduals, pending=SwishPending, decorate=("fwd", "recompute")):
    """y = x sigmoid(beta x), with these classes; the functions not named are plain."""

    def swish_init(cfg, *, key=None, device=None, dtype=None):
        return SwishParams(torch.ones(cfg.dim, device=device, dtype=dtype))

    def swish_fwd(params, x, cfg, *, needs=Needs.ALL):
        return x * torch.sigmoid(params.beta * x), residuals.keep(cfg, needs, x=x, beta=params.beta)

    def swish_recompute(kept, cfg):
        return kept.x * torch.sigmoid(kept.beta * kept.x)

    @dgrad_of(residuals)
    def swish_dgrad(kept, dy, cfg):
        s = torch.sigmoid(kept.beta * kept.x)
        dx = dy * s * (1 + kept.beta * kept.x * (1 - s))
        return dx, pending.keep(cfg, kept.needs, x=kept.x, beta=kept.beta, dy=dy)

    @wgrad_of(pending, SwishParams)
    def swish_wgrad(waiting, cfg, *, into=None):
        s = torch.sigmoid(waiting.beta * waiting.x)
        return accumulate("swish_wgrad", SwishParams((waiting.dy * waiting.x.square() * s * (1 - s)).sum(0)), into)

    return make_op(
        "swish",
        SwishConfig,
        init=swish_init,
        fwd=forward(SwishConfig, SwishParams)(swish_fwd) if "fwd" in decorate else swish_fwd,
        dgrad=swish_dgrad,
        wgrad=swish_wgrad,
        recomputable="elementwise",
        recompute=recompute_of(residuals)(swish_recompute) if "recompute" in decorate else swish_recompute,
    )


@pytest.mark.parametrize("decorate", [("fwd", "recompute"), ("fwd",), ()], ids=["all", "plain recompute", "plain"])
def test_a_plain_recompute_is_checked_as_a_decorated_one(decorate):
    swish, x = swish_of(decorate=decorate), torch.randn(3, 4)
    cfg = ChainConfig(
        steps=(Step("up", linear, LinearConfig(4, 4)), Step("act", swish, SwishConfig(4)), Step("down", linear, LinearConfig(4, 2)))
    )
    params = chain.init(cfg, key=random.key(0))
    y, kept = chain.fwd(params, x, cfg, needs=Needs(x=True, params=("down.weight",)))
    _, pending = chain.dgrad(kept, torch.ones_like(y), cfg)
    params["act"].beta.mul_(3)
    with pytest.raises(StaleResidualError, match="beta must be as the forward left it"):
        chain.wgrad(pending, cfg)
    _, kept = swish.fwd(params["act"], x, SwishConfig(4))
    with pytest.raises(ValueError, match="swish_recompute: cfg must be the config of the forward"):
        swish.recompute(kept, SwishConfig(5))
    params["act"].beta.mul_(3)
    with pytest.raises(StaleResidualError, match="swish_recompute: residuals.beta must be"):
        swish.recompute(kept, SwishConfig(4))
    with pytest.raises(TypeError, match="swish_fwd: cfg must be SwishConfig"):
        swish.fwd(params["act"], x, LinearConfig(4, 4))
    with pytest.raises(TypeError, match="swish_fwd: params must be SwishParams"):
        swish.fwd(None, x, SwishConfig(4))


def test_a_recompute_that_nothing_can_check_is_refused():
    swish = swish_of()
    with pytest.raises(TypeError, match=r"make_op 'swish': recompute must be decorated with @recompute_of\(Residuals\)"):
        make_op(
            "swish",
            SwishConfig,
            fwd=lambda params, x, cfg, *, needs: swish.fwd(params, x, cfg, needs=needs),
            dgrad=lambda kept, dy, cfg: swish.dgrad(kept, dy, cfg),
            bwd=swish.bwd,
            recomputable="norm",
            recompute=lambda kept, cfg: kept.x,
        )


PATHS = {
    "alias of params": ("params.bta", {}, r"SwishResiduals.beta: alias must be a leaf of SwishParams, .*beta.*, got 'params.bta'"),
    "of": ("params.beta", dict(of=("params.bta",)), r"SwishResiduals.beta: of must be a leaf of SwishParams, .*got 'params.bta'"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_declared_path_of_no_leaf_is_refused(name):
    alias, options, message = PATHS[name]

    class SwishResiduals(Residuals):
        x: Tensor = saved("[*, D]", alias="x", needed_by=DGRAD | WGRAD | RECOMPUTE)
        beta: Tensor = saved("[D]", alias=alias, needed_by=DGRAD | WGRAD | RECOMPUTE, **options)

    with pytest.raises(ValueError, match=f"make_op 'swish', {message}"):
        swish_of(SwishResiduals)


def test_a_pending_that_aliases_no_field_of_the_residuals_is_refused():
    class OtherPending(Pending):
        x: Tensor = saved("[*, D]", alias="residuals.z", needed_by=WGRAD)

    with pytest.raises(ValueError, match=r"OtherPending.x: alias must be a field of the residuals, x or beta, got 'residuals.z'"):
        swish_of(pending=OtherPending)


@pytest.mark.parametrize("needed_by", [DGRAD, DGRAD | WGRAD, WGRAD | RECOMPUTE], ids=str)
def test_only_wgrad_reads_a_pending(needed_by):
    with pytest.raises(ValueError, match=r"OddPending.x: needed_by must be WGRAD, as only wgrad reads a pending, got "):

        class OddPending(Pending):
            x: Tensor = saved("[*, D]", needed_by=needed_by)


def test_a_field_that_cannot_be_hashed_is_named():
    for value in ([1, 2], {"a": 1}, {1}):
        with pytest.raises(TypeError, match=r"SwishConfig: dim must be hashable \(a tuple .*\), got "):
            Step("act", swish_of(), SwishConfig(value))
    inner = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)),))
    assert hash(SwishConfig(inner)) == hash(SwishConfig(inner))
    with pytest.raises(TypeError, match=r"^SwishConfig: dim must be hashable .*, got \[1\]"):
        hash(SwishConfig(SwishConfig([1])))


def test_an_undeclared_field_is_refused_with_its_class():
    with pytest.raises(TypeError, match=r"SwishResiduals.keep\(\) got an unexpected keyword argument 's'"):
        SwishResiduals.keep(None, Needs.ALL, s=torch.ones(1))


def test_a_kernel_without_annotations_or_parentheses_is_refused():
    def plain(x, y: Tensor) -> Tensor:
        return x

    def resultless(x: Tensor):
        return x

    with pytest.raises(TypeError, match="kernel 'plain': x must be annotated: Tensor, "):
        kernel()(plain)
    with pytest.raises(TypeError, match="kernel 'resultless': return must be annotated: Tensor, "):
        kernel()(resultless)
    with pytest.raises(TypeError, match=r"kernel 'plain': the decorator must be called, @kernel\(\), got @kernel"):
        kernel(plain)
    with pytest.raises(ValueError, match=r"kernel 'kept': mutates must be names of its arguments, x, got 'z'"):

        @kernel(mutates=("z",))
        def kept(x: Tensor) -> Tensor:
            return x + 1


def test_a_fake_gets_the_arguments_that_it_names():
    @kernel()
    def turned(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return y.mT * (scale * float(x.sum()))  # which no tracer could run

    with pytest.raises(ValueError, match="fake of kernel 'turned': an argument must be one of x, y, scale, got 'z'"):
        turned.fake(lambda y, z: y)

    @turned.triton
    def _(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return y.mT.contiguous()

    @turned.fake
    def _(y: Tensor, scale: float = 2.0) -> Tensor:
        return y.new_empty(y.shape[::-1])

    for given in ((), (2.0,), (3.0,)):
        with FakeTensorMode():
            made = turned.kernel.operator()(torch.ones(3), torch.ones(2, 5), *given)
        assert made.shape == (5, 2) and isinstance(made, FakeTensor)
