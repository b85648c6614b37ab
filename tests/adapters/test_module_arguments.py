"""`op_from_module`: wrong arguments are named, right ones of every kind pass; threads, and an interrupted trace."""

import itertools
import re
import threading

import pytest
import torch
from own_models import CFG, MODELS, draw, made
from torch import nn
from torch.nn.modules import module as hooks

from funcops import WithExtras, op_from_module
from funcops.engine.errors import GradModeError
from funcops.engine.trees import put, tensors

X = draw(2, 5, 6)
RUNS = "x must be arguments with which Mlp runs, got "
OF_X = {
    "shape": (draw(2, 5, 7), ValueError, RUNS + "float64[2, 5, 7], on cpu, with params of float64 on cpu: Given normalized_shape"),
    "dims": (draw(), ValueError, RUNS + "float64[]"),
    "dtype": (X.float(), ValueError, RUNS + "float32[2, 5, 6], on cpu, with params of float64 on cpu: "),
    "ints": (X.long(), ValueError, RUNS + "int64[2, 5, 6]"),
    "meta": (X.to("meta"), ValueError, "x must be a tensor with values, as a trace runs the module, got one on the meta device"),
    "too many": ((X, X), TypeError, RUNS + "(float64[2, 5, 6], float64[2, 5, 6]), on cpu"),
    "too few": ((), TypeError, RUNS + "(), with params"),
    "a list": ([X], TypeError, RUNS + "[float64[2, 5, 6]]"),
    "a name": ({"y": X}, TypeError, RUNS + "{'y': float64[2, 5, 6]}"),
    "none": (None, TypeError, RUNS + "None"),
    "text": ("abc", TypeError, RUNS + "'abc'"),
    "an array": (X.numpy(), TypeError, "x must be a tensor, got ndarray"),
    "trained": (X.clone().requires_grad_(), GradModeError, "x must be a tensor that does not require grad, got one that does"),
}


@pytest.mark.parametrize("what", OF_X)
def test_a_wrong_x_is_named(what):
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    given, error, text = OF_X[what]
    with pytest.raises(error, match=re.escape(f"Mlp_fwd: {text}")):
        op.fwd(params, given, CFG)
    y, residuals = op.fwd(params, x, CFG)
    assert torch.equal(y, module(x)), "afterwards all is as before"
    if what not in ("trained", "dims"):  # which would do for an example, or has no gradient to ask for
        with pytest.raises(error, match=re.escape(f"Mlp_fwd: {text}")):
            op_from_module(module, given)


OF_PARAMS = {
    "shape": (draw(12, 7), ValueError, "params.up.weight must be of the shape [12, 6], as the module's, got float64[12, 7]"),
    "none": (None, TypeError, "params.up.weight must be a tensor, got None"),
    "dtype": (draw(12, 6).float(), ValueError, f"{RUNS}float64[2, 5, 6], on cpu, with params of float64 on cpu, float32 on cpu: "),
    "meta": (draw(12, 6).to("meta"), ValueError, "params.up.weight must be a tensor with values"),
    "trained": (draw(12, 6).requires_grad_(), GradModeError, "params.up.weight must be a tensor that does not require grad"),
}


@pytest.mark.parametrize("what", OF_PARAMS)
def test_a_wrong_param_is_named(what):
    op, params = op_from_module(*made("mlp"))
    given, error, text = OF_PARAMS[what]
    with pytest.raises(error, match=re.escape(f"Mlp_fwd: {text}")):
        op.fwd({**params, "up.weight": given}, X, CFG)


class Many(nn.Module):
    """Arguments and results of many kinds."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, ids, mask=None, *, use_cache=True, options=None, times=1, labels):
        h = self.embed(ids) * times
        if mask is not None:
            h = h * mask[..., None]
        if options:
            h = h + options["shift"][0]
        return {"logits": self.out(h * 2 if use_cache else h), "cache": None, "inner": (labels * 1.0,)}


IDS = torch.arange(6).view(2, 3)
FIRST = {"ids": IDS, "use_cache": False, "labels": draw(2)}
KINDS = [
    FIRST,
    {**FIRST, "use_cache": True, "times": 3},
    {**FIRST, "times": 1.5},
    {**FIRST, "options": {"shift": (draw(6), None, 3)}, "mask": draw(2, 3)},
    {**FIRST, "mask": None},
    {**FIRST, "ids": IDS.t()},
    {**FIRST, "ids": IDS[:0], "labels": draw(0)},
]


def test_layouts_with_gaps_and_at_other_places():
    """A copy in other strides would be traced as another graph."""

    class Places(nn.Module):
        def forward(self, x):
            return x.as_strided((2,), (1,), x.storage_offset()).exp() * x.reshape(-1).sum()

    base = draw(8, 9, 4)
    for module in (Places(), nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1)).double()):
        op, params = op_from_module(module, base)
        for x in (base[2:, ::3], base[1:, :2].mT.mT, base[:, :1].expand(8, 9, 4), base.mT[:, :, :4], base[::2]):
            y, residuals = op.fwd(params, x, CFG)
            leaf = x.detach().requires_grad_()
            want = module(leaf)
            assert torch.equal(y, want)
            assert torch.equal(op.bwd(residuals, y, CFG)[1], torch.autograd.grad(want, leaf, y)[0])


@pytest.mark.parametrize("x", KINDS, ids=lambda x: ", ".join(x))
def test_arguments_by_name_of_every_kind(x):
    module = Many().double()
    op, params = op_from_module(module, FIRST)
    y, residuals = op.fwd(params, x, CFG)
    want = module(**x)
    assert y.keys() == {"logits", "inner"} and torch.equal(y["logits"], want["logits"])
    dparams, dx = op.bwd(residuals, {"logits": torch.ones_like(y["logits"]), "inner": (None,)}, CFG)
    want["logits"].sum().backward()
    assert all(torch.equal(dparams[n], p.grad) for n, p in module.named_parameters())
    assert dx.keys() == x.keys() and dx["ids"] is dx["use_cache"] is None, "like x, with None in place of what has none"
    if x.get("options"):
        assert dx["options"]["shift"][1:] == (None, None) and dx["options"]["shift"][0].shape == (6,)


def test_a_dy_unlike_y_is_named():
    op, params = op_from_module(Many().double(), FIRST)
    y, residuals = op.fwd(params, FIRST, CFG)
    given = {"logits": torch.ones_like(y["logits"]), "inner": (None,)}
    for wrong, text in (
        ({"logits": given["logits"]}, "dy must be a dict of logits, inner, as y is, got dict {'logits': float64[2, 3, 3]}"),
        ({**given, "more": None}, "dy must be a dict of logits, inner, as y is"),
        (given["logits"], "dy must be a dict of logits, inner, as y is, got Tensor float64[2, 3, 3]"),
        ({**given, "inner": ()}, "dy.inner must be a tuple of 0, as y is, got tuple ()"),
    ):
        for half in (op.dgrad, op.bwd):
            with pytest.raises(TypeError, match=re.escape(text)):
                half(residuals, wrong, CFG)
    conv, x = made("conv")
    op, params = op_from_module(conv, x)
    y, residuals = op.fwd(params, x, CFG)
    with pytest.raises(TypeError, match="Convolved_bwd: dy must be WithExtras of main, extras, as y is, got Tensor"):
        op.bwd(residuals, y.main, CFG)
    op.bwd(residuals, WithExtras(y.main, None), CFG)


def test_under_no_grad_and_in_inference_mode():
    module, x = made("mlp")
    want = module(x)
    with torch.no_grad():
        op, params = op_from_module(module, x)
        assert torch.equal(op.fwd(dict(module.named_parameters()), x.clone().requires_grad_(), CFG)[0], want)
    with torch.inference_mode():
        module, x = made("mlp")
        op, params = op_from_module(module, x)
        y, residuals = op.fwd(params, x, CFG)
        assert torch.equal(y, want)
        inside = op.bwd(residuals, y, CFG)
    op, params = op_from_module(made("mlp")[0], x)
    y, residuals = op.fwd(params, x, CFG)
    assert all(torch.equal(a, b) for a, b in zip(tensors(op.bwd(residuals, y, CFG)), tensors(inside), strict=True))


def test_threads_at_once():
    module, x = made("block")
    op, params = op_from_module(module, x)
    given = [draw(1 + i % 3, 5 + i % 2, 6, seed=i) for i in range(12)]
    found, errors = [None] * len(given), []

    def work(first):
        try:
            for i in range(first, len(given), 4):
                y, residuals = op.fwd(params, given[i], CFG)
                found[i] = y, *op.bwd(residuals, y, CFG)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for x, (y, dparams, dx) in zip(given, found, strict=True):
        x = x.clone().requires_grad_()
        want = module(x)
        grads = torch.autograd.grad(want, [x, *module.parameters()], want.detach())
        assert torch.equal(y, want) and all(torch.equal(a, b) for a, b in zip((dx, *dparams.values()), grads, strict=True))


class Interrupts(nn.Module):
    """Counts its runs by an iterator, whose state a trace does not compare."""

    def __init__(self):
        super().__init__()
        self.layers, self.runs, self.at = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.GRU(6, 6)), itertools.count(1), 0
        self.register_buffer("gain", torch.ones(6))

    def forward(self, x):
        h = self.layers[1](self.layers[0](x * self.gain))
        if next(self.runs) == self.at:
            raise KeyboardInterrupt
        return self.layers[2](h)[0]


def state(module):
    kept = [len(getattr(hooks, name)) for name in vars(hooks) if name.startswith("_global_") and "hooks" in name]
    flags = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_rng_state().tolist(),
    )
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return kept, flags, modes, [(sorted(vars(part)), list(map(id, part._buffers.values()))) for part in module.modules()]


def test_an_interrupted_trace_leaves_nothing():
    """In each of the runs of the module from which a trace is made."""
    module, x, longer = Interrupts(), torch.randn(3, 6), torch.randn(4, 6)
    before = state(module)
    op, params = op_from_module(module, x)
    assert state(module) == before
    runs = next(module.runs) - 1
    assert runs > 2
    for at in range(1, runs + 1):
        module.runs, module.at = itertools.count(1), at
        with pytest.raises(KeyboardInterrupt):
            op.fwd(params, longer, CFG)
        assert state(module) == before, at
    module.at = 0
    assert torch.equal(op.fwd(params, longer, CFG)[0], module(longer))


def test_paths_with_numbers_at_the_end():
    """A residual's name may be the beginning of another one's."""
    op, params = op_from_module(*made("recurrent"))
    kept = op.fwd(params, MODELS["recurrent"][1](), CFG)[1].kept
    name = next(name for name in kept if name.rpartition(".")[0] in kept)
    assert put({"kept": kept}, f"kept.{name}", None)["kept"][name] is None
