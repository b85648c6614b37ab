"""Modules of a user's op: what a class derived from `OpModule` may leave out, and its errors."""

from dataclasses import field

import pytest
import torch

from funcops import nn as fnn
from funcops.adapters.autograd.differentiable import backward_calls
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.trees import leaf, tree


@config
class GainConfig(OpConfig):
    dim: int = field(kw_only=False)
    factor: float = 1.0


@tree
class GainParams:
    weight: torch.Tensor = leaf("[D]")


class GainResiduals(Residuals):
    x: torch.Tensor = saved("[*, D]", alias="x", needed_by=WGRAD)
    weight: torch.Tensor = saved("[D]", alias="params.weight", needed_by=DGRAD)


class GainPending(Pending):
    x: torch.Tensor = saved("[*, D]", alias="residuals.x", needed_by=WGRAD)
    dy: torch.Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)


def gain_init(cfg, *, key=None, device=None, dtype=None):
    return GainParams(torch.full((cfg.dim,), 2.0, device=device, dtype=dtype))


@forward(GainConfig, GainParams)
def gain_fwd(params, x, cfg, *, needs=Needs.ALL):
    check("gain_fwd", "x", x, (..., cfg.dim), FLOATS)
    check("gain_fwd", "params.weight", params.weight, (cfg.dim,), x.dtype, x)
    return x * params.weight * cfg.factor, GainResiduals.keep(cfg, needs, x=x, weight=params.weight)


@dgrad_of(GainResiduals)
def gain_dgrad(residuals, dy, cfg):
    dx = dy * residuals.weight * cfg.factor if residuals.needs.x else None
    return dx, GainPending.keep(cfg, residuals.needs, x=residuals.x, dy=dy)


@wgrad_of(GainPending, GainParams)
def gain_wgrad(pending, cfg, *, into=None):
    dw = (pending.dy * pending.x * cfg.factor).reshape(-1, cfg.dim).sum(0)
    return accumulate("gain_wgrad", GainParams(dw), into)


gain = make_op("gain", GainConfig, init=gain_init, fwd=gain_fwd, dgrad=gain_dgrad, wgrad=gain_wgrad)


class Gain(fnn.OpModule):
    op, params_class, fields, values = gain, GainParams, ("weight",), ("dim", "factor")

    def __init__(self, dim, factor=1.0):
        super().__init__()
        self.dim, self.factor, self.weight = dim, factor, torch.nn.Parameter(torch.full((dim,), 2.0))


def test_values_make_the_config():
    module, x = Gain(3, 5.0), torch.randn(2, 3)
    assert module.cfg == GainConfig(3, factor=5.0)
    torch.testing.assert_close(module(x), 10 * x)
    module.factor = 1.0
    torch.testing.assert_close(module(x), 2 * x)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0))


CHANGES = {
    "value": lambda module: setattr(module, "factor", 1.0),
    "parameter": lambda module: setattr(module, "weight", torch.nn.Parameter(torch.ones(3))),
    "registered": lambda module: module.register_parameter("weight", torch.nn.Parameter(torch.ones(3))),
    "other": lambda module: setattr(module, "note", "unread"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_a_new_config_at_once(change):
    """Setting what the config may be made from makes it anew, and a call finds it; setting anything else does not."""
    made = []

    class Noting(Gain):
        def make_cfg(self):
            made.append(super().make_cfg())
            return made[-1]

    module = Noting(3, 5.0)
    for _ in range(2):
        made.clear()
        CHANGES[change](module)
        assert made[-1:] == [GainConfig(3, factor=module.factor)] * (change != "other")
        count = len(made)
        module(torch.ones(2, 3))
        assert len(made) == count


@pytest.mark.slow
def test_one_that_was_never_called_compiles():
    x = torch.randn(2, 3)
    torch.testing.assert_close(torch.compile(Gain(3), fullgraph=True, backend="aot_eager")(x), 2 * x)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            dict(values=("width",)),
            r"Own: values must be fields of GainConfig: dim, factor \(optional\); or the class has a make_cfg",
        ),
        (dict(values=("factor",)), r"Own: values must be fields of GainConfig: .*, got \('factor',\)"),
        (dict(autocast="LOWER"), r'Own: autocast must be "", "lower", "float32" or an operator of torch .*, got \'LOWER\''),
        (dict(autocast="fp32"), "Own: autocast must be"),
        (dict(autocast="aten::no_such"), "Own: autocast must be"),
        (dict(autocast=None), "Own: autocast must be"),
    ],
)
def test_a_class_that_makes_no_module_raises_when_defined(attributes, said):
    with pytest.raises(ValueError, match=said):
        type("Own", (fnn.OpModule,), dict(op=gain, params_class=GainParams, fields=("weight",), values=("dim",)) | attributes)


def test_a_class_that_lacks_its_op_or_values_says_so_when_called():
    with pytest.raises(TypeError, match="Bare: op must be an op, set as an attribute of the class, got none"):
        type("Bare", (fnn.OpModule,), {})()(torch.ones(3))
    with pytest.raises(ValueError, match=r"Bare: values must be fields of GainConfig: .*, got \(\)"):
        type("Bare", (fnn.OpModule,), {"op": gain})()(torch.ones(3))


@pytest.mark.parametrize("place", ["instance", "class", "later"])
def test_an_attribute_that_values_leaves_out_is_named(place):
    class Own(Gain):
        values = ("dim",)
        if place == "class":
            factor = 3.0

        def __init__(self, dim):
            fnn.OpModule.__init__(self)
            self.dim, self.weight = dim, torch.nn.Parameter(torch.ones(dim))
            if place == "instance":
                self.factor = 3.0

    module, x = Own(3), torch.ones(2, 3)
    if place == "later":
        torch.testing.assert_close(module(x), x)
        module.factor = 3.0
    with pytest.raises(
        ValueError, match=r"Own: values must be with 'factor', a field of GainConfig and an attribute, .*, got \('dim',\)"
    ):
        module(x)

    class Made(Own):
        def make_cfg(self):
            return GainConfig(self.dim, factor=2.0)

    torch.testing.assert_close(Made(3)(x), 2 * x)


def test_a_mode_and_a_parameter_are_no_values_left_out():
    @config
    class BiasedConfig(OpConfig):
        training: bool = True
        weight: bool = True

    def fwd(params, x, cfg, *, needs=Needs.ALL):
        return x * params.weight, None

    biased = gain._replace(config=BiasedConfig, fwd=forward(BiasedConfig, GainParams)(fwd))

    class Own(fnn.OpModule):
        op, params_class, fields, values = biased, GainParams, ("weight",), ()

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    with torch.no_grad():
        torch.testing.assert_close(Own()(torch.ones(3)), torch.ones(3))


def test_a_class_of_values_of_other_names_makes_its_config_itself():
    class Own(Gain):
        values = ("width",)

        def make_cfg(self):
            return GainConfig(self.width)

        def __init__(self, width):
            super().__init__(width)
            self.width = width

    assert Own(3).cfg == GainConfig(3)


@pytest.mark.parametrize(("autocast", "dtype"), [("lower", torch.bfloat16), ("float32", torch.float32)])
def test_autocast_as_the_class_says(autocast, dtype):
    class Own(Gain):
        pass

    Own.autocast = autocast
    net = fnn.Sequential(fnn.Linear(4, 3), Own(3))
    with torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(2, 4))
    y.float().sum().backward()
    assert y.dtype is dtype and {p.grad.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("autocast", ["", "aten::layer_norm"])  # for the second CPUs have no rule
def test_autocast_that_casts_nothing_is_named_where_the_op_needs_one_dtype(autocast):
    class Own(Gain):
        pass

    Own.autocast = autocast
    net = fnn.Sequential(fnn.Linear(4, 3), Own(3))
    said = r'gain_fwd: params.weight must be bfloat16, got float32: .* \(torch.autocast is on: Own.autocast = "lower" or "float32"'
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=said):
        net(torch.randn(2, 4))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"x must be \[\.\.\., 3\], got \[2, 4\]$"):
        net[1](torch.randn(2, 4))


def test_x_that_the_op_does_not_take_where_torch_has_no_such_module():
    said = r"Gain: x and parameters must be plain tensors, x of .*, because .* no plain\(x\), got Tensor of torch.int64, Parameter"
    with pytest.raises(TypeError, match=said):
        Gain(3)(torch.ones(3, dtype=torch.int64))


def test_a_class_inherits_whether_it_can_be_a_step():
    """A class whose forward, or a parent's, does more than its op is called as a module: one that does not is a step."""
    ran = []

    class Same(fnn.Linear):
        pass

    class Twice(fnn.Linear):
        def forward(self, x):
            ran.append(type(self).__name__)
            return 2 * super().forward(x)

    class Heir(Twice):
        pass

    for cls, calls in ((Same, []), (Twice, ["Twice"]), (Heir, ["Heir"])):
        layer, x = cls(3, 3), torch.randn(2, 3)
        with backward_calls() as count:
            y = fnn.Sequential(layer, fnn.GELU())(x)
            y.sum().backward()
        assert ran == calls and count() == 1 + bool(calls), cls
        torch.testing.assert_close(y, torch.nn.functional.gelu(layer(x)))
        ran.clear()
