"""Ops from torch functions obey the laws, like any op."""

import functools
import gc
import weakref
from dataclasses import field

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from funcops import (
    ChainConfig,
    LinearConfig,
    Needs,
    Step,
    TorchConfig,
    chain,
    differentiable,
    linear,
    op_from_torch,
    random,
    report,
    value_and_grad,
    vjp,
)
from funcops.engine.contract.op import OpConfig, config
from funcops.engine.trees import paths
from funcops.testing import LAWS, Case


def weights(**shapes):
    """The init of a dict of weights."""

    def init(cfg, *, key=None, device=None, dtype=None):
        return {name: torch.ones(shape, device=device, dtype=dtype) for name, shape in shapes.items()}

    return init


def convolution(params, x, cfg):
    return F.relu(F.conv1d(x, params["w"], params["b"], padding=1))


def attention_pool(params, x, cfg):
    q, k = x
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ k


def running(params, x, cfg):
    return torch.cumsum(x * params["scale"], -1).tanh()


def spectral(params, x, cfg):
    return torch.fft.irfft(torch.fft.rfft(x) * params["filter"], n=x.shape[-1])


def rnn_cell(params, x, cfg):
    t, h = x
    return torch.tanh(F.linear(t, params["w"], params["b"]) + F.linear(h, params["u"]))


def group_norm(params, x, cfg):
    return F.group_norm(x, cfg.groups, params["w"], params["b"])


def written(params, x, cfg):
    y = x.clone()
    y[..., 0] *= 2
    return y * params["scale"], y.sum(-1)


@config
class GroupConfig(OpConfig):
    groups: int = field(kw_only=False)


FUNCTIONS = [
    (convolution, weights(w=(4, 3, 3), b=(4,)), lambda d: d.randn(2, 3, 7), TorchConfig()),
    (attention_pool, None, lambda d: (d.randn(2, 5, 4), d.randn(2, 6, 4)), TorchConfig()),
    (running, weights(scale=(5,)), lambda d: d.randn(3, 5), TorchConfig()),
    (spectral, weights(filter=(4,)), lambda d: d.randn(2, 6), TorchConfig()),
    (rnn_cell, weights(w=(4, 3), u=(4, 4), b=(4,)), lambda d: (d.randn(2, 3), d.randn(2, 4)), TorchConfig()),
    (group_norm, weights(w=(6,), b=(6,)), lambda d: d.randn(2, 6, 4), GroupConfig(3)),
    (written, weights(scale=(3,)), lambda d: d.randn(2, 3), TorchConfig()),
]


def made(fn, init, x, cfg):
    op = op_from_torch(fn, init=init, config=type(cfg))
    return Case(op=op, cfg=cfg, x=x, reference=fn, name=fn.__name__, dtypes=(torch.float64, torch.float32))


CASES = [made(*row) for row in FUNCTIONS]


@pytest.mark.turns("dtype", "law", every=4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("law", ["split", "pure", "mirror", "frugal", "right", "traceable"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_laws(case, law, dtype):
    LAWS[law](case, dtype)


def test_residuals_have_names_and_split():
    case = CASES[0]
    params, x = case.make(torch.float64)
    y, residuals = case.op.fwd(params, x, case.cfg)
    names = set(residuals.kept)
    assert {"input.0", "input.2"} <= names and any("relu" in name for name in names)
    assert residuals.kept["input.2"] is x
    assert "kept.input.2" in str(report(residuals, params, x))
    _, pending = case.op.dgrad(residuals, torch.ones_like(y), case.cfg)
    assert all(isinstance(t, torch.Tensor) for t in paths(pending).values())
    _, frozen = CASES[4].op.fwd(*CASES[4].make(torch.float64), CASES[4].cfg, needs=Needs(params=False))
    assert set(frozen.kept) == {"input.0", "input.1", "tanh"}, "a frozen cell keeps its weights, and no input"
    assert case.op.fwd(params, x, case.cfg, needs=Needs.NONE)[1] is None


def test_in_a_chain():
    cell = op_from_torch(running, init=weights(scale=(5,)), name="running")
    cfg = ChainConfig(
        steps=(Step("a", linear, LinearConfig(4, 5)), Step("b", cell, TorchConfig()), Step("c", linear, LinearConfig(5, 1)))
    )
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64)
    y, residuals = chain.fwd(params, x, cfg)
    dparams, dx = chain.bwd(residuals, torch.ones_like(y), cfg)
    t, s = x.clone().requires_grad_(), params["b"]["scale"].clone().requires_grad_()
    a, c = params["a"], params["c"]
    F.linear(running({"scale": s}, F.linear(t, a.weight, a.bias), None), c.weight, c.bias).sum().backward()
    torch.testing.assert_close((dx, dparams["b"]["scale"]), (t.grad, s.grad))


def test_errors():
    op = op_from_torch(lambda params, x, cfg: (x, 3), name="mixed")
    with pytest.raises(TypeError, match="mixed_fwd: y.1 must be a tensor, got 3"):
        op.fwd(None, torch.ones(2), TorchConfig())
    op = op_from_torch(running, name="bare")
    with pytest.raises(TypeError, match=r"bare_fwd: params must be None \(op_from_torch got no init\)"):
        op.fwd({"scale": torch.ones(2)}, torch.ones(2), TorchConfig())
    with pytest.raises(TypeError, match="bare_fwd: cfg must be TorchConfig"):
        op.fwd(None, torch.ones(2), LinearConfig(1, 1))
    case = CASES[0]
    params, x = case.make(torch.float64)
    _, residuals = case.op.fwd(params, x, case.cfg)
    with pytest.raises(ValueError, match=r"convolution_dgrad: dy must be \[2, 4, 7\], got \[3\]"):
        case.op.dgrad(residuals, torch.ones(3, dtype=torch.float64), case.cfg)


def test_value_and_grad():
    loss = op_from_torch(lambda params, x, cfg: (x * params["w"]).square().sum(), init=weights(w=(3,)), name="loss")
    params, x = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(3, dtype=torch.float64)
    y, dparams = value_and_grad(loss)(params, x, TorchConfig())
    torch.testing.assert_close(dparams["w"], 2 * x * x * params["w"])
    y, (dparams, dx) = value_and_grad(loss, x=True)(params, x, TorchConfig())
    torch.testing.assert_close(dx, 2 * params["w"] ** 2 * x)
    with pytest.raises(ValueError, match=r"value_and_grad: y must be one number, got float64\[3, 5\]"):
        value_and_grad(CASES[2].op)(*CASES[2].make(torch.float64), TorchConfig())


def test_value_and_grad_with_aux():
    op = op_from_torch(
        lambda params, x, cfg: ((x * params["w"]).square().sum(), x + params["w"], x[0]), init=weights(w=(3,)), name="both"
    )
    params, x = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(3, dtype=torch.float64)
    (loss, *aux), dparams = value_and_grad(op, has_aux=True)(params, x, TorchConfig())
    torch.testing.assert_close(dparams["w"], 2 * x * x * params["w"])  # nothing of aux is in it
    torch.testing.assert_close([loss, *aux], [(x * params["w"]).square().sum(), x + params["w"], x[0]])
    with pytest.raises(TypeError, match=r"value_and_grad: y must be tuple, got float64\[3, 5\]"):
        value_and_grad(CASES[2].op, has_aux=True)(*CASES[2].make(torch.float64), TorchConfig())


def test_vjp_may_be_pulled_back_twice():
    case = CASES[4]
    params, x = case.make(torch.float64)
    y, pullback = vjp(case.op, params, x, case.cfg)
    a, b = pullback(torch.ones_like(y)), pullback(2 * torch.ones_like(y))
    torch.testing.assert_close(b[0]["w"], 2 * a[0]["w"])
    torch.testing.assert_close(b[1][1], 2 * a[1][1])


def _checkpointed(reentrant):
    return lambda call, *given: checkpoint(call, *given, use_reentrant=reentrant)


def _hooked(hooks):
    def run(call, *given):
        with hooks():
            return call(*given)

    return run


AROUND = {
    "hooks that change values": _hooked(lambda: saved_tensors_hooks(lambda t: 3 * t, lambda t: t)),
    "an offload": _hooked(save_on_cpu),
    "checkpoint": _checkpointed(False),
    "reentrant checkpoint": _checkpointed(True),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_trace_does_not_see_the_hooks_around_the_first_call(around):
    """An op is traced when it is first called: here with hooks on saved tensors, which belong to that call alone."""

    def fn(params, x, cfg):
        return torch.tanh(x * params["w"]).square()

    of, w, x = differentiable(op_from_torch(fn, name="hooked", init=weights(w=(4,)))), torch.rand(4), torch.rand(3, 4)
    want = gradients(lambda w, x: fn({"w": w}, x, None), w, x)
    hooked = gradients(lambda w, x: AROUND[around](lambda w, x: of({"w": w}, x, TorchConfig()), w, x), w, x)
    if "change" not in around:
        torch.testing.assert_close(hooked, want)
    torch.testing.assert_close(gradients(lambda w, x: of({"w": w}, x, TorchConfig()), w, x), want)


def gradients(f, *given):
    leaves = [t.clone().requires_grad_() for t in given]
    f(*leaves).sum().backward()
    return [t.grad for t in leaves]


RATE = 1.0


def _rate():
    return RATE


class Modal(torch.nn.Module):
    """1 in training, 2 in eval mode, times x."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Dropout(0.0)

    def forward(self, x):
        return x * (1 if self.inner.training else 2)

    def step(self, params, x, cfg):
        return self(x)


def _modal(module):
    return {
        "closure": lambda params, x, cfg: module(x),
        "list": lambda params, x, cfg: [module][0](x),
        "method": module.step,
        "partial": functools.partial(lambda module, params, x, cfg: module(x), module),
        "functional": lambda params, x, cfg: torch.func.functional_call(module, {}, (x,)),
    }


@pytest.mark.parametrize("way", ["closure", "list", "method", "partial", "functional"])
def test_another_mode_of_a_module_from_outside_is_seen(way):
    module = Modal()
    op = op_from_torch(_modal(module)[way], name="modal")
    for training in (True, False, True):
        module.inner.train(training)
        y, residuals = op.fwd(None, torch.ones(2), TorchConfig())
        want = [1.0 if training else 2.0] * 2
        assert y.tolist() == want and op.bwd(residuals, torch.ones(2), TorchConfig())[1].tolist() == want


def _readers():
    """(fn, setter) by the way in which a function reads a number from outside."""
    held, cell, table, tensor = [1.0], 1.0, {"rate": [1.0]}, torch.tensor(1.0)

    def set_cell(value):
        nonlocal cell
        cell = value

    def set_tensor(value):
        nonlocal tensor
        tensor = torch.tensor(value)

    def set_global(value):
        globals()["RATE"] = value

    def helper(x):
        return x * cell

    return {
        "list": (lambda params, x, cfg: x * held[0], lambda value: held.__setitem__(0, value)),
        "variable": (lambda params, x, cfg: x * cell, set_cell),
        "dict": (lambda params, x, cfg: x * table["rate"][0], lambda value: table["rate"].__setitem__(0, value)),
        "tensor": (lambda params, x, cfg: x * tensor, set_tensor),
        "global": (lambda params, x, cfg: x * RATE, set_global),
        "helper": (lambda params, x, cfg: helper(x), set_cell),
        "global helper": (lambda params, x, cfg: x * _rate(), set_global),
        "inner": (lambda params, x, cfg: (lambda y: y * cell)(x), set_cell),
        "partial": (functools.partial(lambda by, params, x, cfg: x * by[0], held), lambda v: held.__setitem__(0, v)),
        "partial helper": (functools.partial(lambda params, x, cfg: helper(x)), set_cell),
    }


@pytest.mark.parametrize("way", list(_readers()))
def test_a_value_from_outside_that_changes_is_seen(way):
    fn, change = _readers()[way]
    op = op_from_torch(fn, name="reads")
    for value in (1.0, 2.0, 1.0, -3.0):
        change(value)
        y, residuals = op.fwd(None, torch.ones(2), TorchConfig())
        assert y.tolist() == [value] * 2 and op.bwd(residuals, torch.ones(2), TorchConfig())[1].tolist() == [value] * 2
    change(1.0)


def test_an_old_value_from_outside_is_not_kept():
    """A weight that is annealed for a whole training leaves one trace, not one for each value, and the last tensor alone."""
    held = [torch.ones(2)]
    op = op_from_torch(lambda params, x, cfg: x * held[0], name="reads")
    old = weakref.ref(held[0])
    for value in range(2, 5):
        op.fwd(None, torch.ones(2), TorchConfig())
        held[0] = torch.full((2,), float(value))
        y, _ = op.fwd(None, torch.ones(2), TorchConfig())
        assert y.tolist() == [float(value)] * 2
        gc.collect()
        assert old() is None
        old = weakref.ref(held[0])


def test_a_weight_gradient_alone_must_run_outside_of_autocast():
    made = op_from_torch(lambda params, x, cfg: x @ params["w"], init=lambda cfg, **given: {"w": torch.ones(3, 3)})
    cfg, x = TorchConfig(), torch.randn(2, 3)
    residuals = made.fwd({"w": torch.randn(3, 3)}, x, cfg)[1]
    pending = made.dgrad(residuals, torch.ones(2, 3), cfg)[1]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="_wgrad: must run outside of torch.autocast"):
        made.wgrad(pending, cfg)
    torch.testing.assert_close(made.wgrad(pending, cfg)["w"], x.T @ torch.ones(2, 3))


CHECKED = {  # functions that raise for some values
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, torch.ones(4, dtype=x.dtype)),
    "an assertion": lambda x: (torch._assert_async((x.sum() > 0), "no sum"), x * x)[1],
}


@pytest.mark.parametrize("name", CHECKED)
def test_values_for_which_a_function_raises_still_raise(name):
    fn, good = CHECKED[name], 2.0 * torch.eye(4, dtype=torch.float64)
    op = op_from_torch(lambda params, x, cfg: fn(x), name="checked")
    y, residuals = op.fwd(None, good, TorchConfig())
    leaf = good.clone().requires_grad_()
    assert torch.equal(op.bwd(residuals, torch.ones_like(y), TorchConfig())[1], torch.autograd.grad(fn(leaf).sum(), leaf)[0])
    for call in (lambda: fn(0.0 * good), lambda: op.fwd(None, 0.0 * good, TorchConfig())):
        with pytest.raises(RuntimeError, match=r"could not be completed|could not be inverted|inversion|solver failed|no sum"):
            call()
