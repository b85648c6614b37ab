"""torch's functions (OpInfo) as ops: y and dx equal autograd's in float64, for any strides of x and dy."""

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db

from funcops import Needs, TorchConfig, op_from_torch

pytestmark = pytest.mark.slow
SEED = 42  # OpInfo's functions that draw numbers seed themselves with it


def seed():
    """`torch.manual_seed` without its record of the stack for each missing kind of device."""
    torch.default_generator.manual_seed(SEED)
    numpy.random.seed(SEED)


def transposed(t):
    order = range(t.dim())[::-1]
    return t.permute(tuple(order)).contiguous().permute(tuple(order))


def expanded(t):
    return t[:1].expand(t.shape) if t.dim() and t.numel() else t


def expanded_last(t):
    return t[..., :1].expand(t.shape) if t.dim() and t.numel() else t


def one_number(t):
    return t.flatten()[0].expand(t.shape) if t.numel() else t


def strided(t):
    return torch.stack((t, t), -1)[..., 1]


X = {"contiguous": torch.Tensor.contiguous, "transposed": transposed, "expanded": expanded}
DY = {**X, "expanded_last": expanded_last, "one_number": one_number, "strided": strided}
BY_VALUE, WRITES = "its shapes or steps depend on values", "it writes to the running statistics that it is given"
NOT_SERVED = {
    "combinations": BY_VALUE,
    "corrcoef": BY_VALUE,
    "cov": BY_VALUE,
    "linalg.lstsq": BY_VALUE,
    "linalg.lstsq.grad_oriented": BY_VALUE,
    "_batch_norm_with_update": WRITES,
    "_native_batch_norm_legit": WRITES,
    "native_batch_norm": WRITES,
    "nn.functional.batch_norm": WRITES,
    "nn.functional.instance_norm": WRITES,
    "masked_select": BY_VALUE,
    "nn.functional.ctc_loss": BY_VALUE,
    "nn.functional.gaussian_nll_loss": BY_VALUE,
    "tensor_split": "it reads the places of the cuts from a tensor",
}
if torch.__version__ < "2.12":  # whose quantiles look at q on the host
    NOT_SERVED |= dict.fromkeys(("quantile", "nanquantile"), BY_VALUE)
if torch.__version__ >= "2.14":  # whose combinations have steps that no value decides
    del NOT_SERVED["combinations"]
INFOS = {
    f"{info.name}.{info.variant_test_name}".rstrip("."): info
    for info in op_db
    if info.supports_autograd
    and torch.float64 in info.dtypes
    and not info.name.startswith("sparse.")
    and not (info.name == "view_copy" and torch.__version__ < "2.12")  # its fake tensors take no view of a transposed one
}


def sampled(info):
    """The function of info's first sample, and its tensors, which require grad where torch differentiates them."""
    seed()
    for sample in info.sample_inputs_func(info, "cpu", torch.float64, True):  # `sample_inputs` looks through the stack for its test
        values, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]

        def fn(params, x, cfg, values=values, spec=spec, places=places, sample=sample):
            given = dict(zip(places, x, strict=True))
            first, args, kwargs = pytree.tree_unflatten([given.get(i, value) for i, value in enumerate(values)], spec)
            y = sample.output_process_fn_grad(info.op(first, *args, **kwargs))
            return tuple(pytree.tree_leaves(y))

        return fn, [values[i] for i in places]


def by_autograd(fn, x, dys):
    """autograd's dx, from contiguous cotangents."""
    seed()
    own = [t.detach().requires_grad_(t.requires_grad) for t in x]
    pairs = [(y, dy.contiguous()) for y, dy in zip(fn(None, own, None), dys, strict=True) if y.requires_grad]
    asked = [t for t in own if t.requires_grad]
    if not pairs or not asked:
        return [None] * len(own)
    found = iter(torch.autograd.grad([y for y, _ in pairs], asked, [dy for _, dy in pairs], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in own]


def cases(name):
    """`(fn, x, ys, dys, dx)` for a contiguous x, and for one with other strides, if torch itself supports those. With each x, dy
    has one of six layouts; which of the two x and six dy a function gets takes turns."""
    fn, leaves = sampled(INFOS[name])
    draw = torch.Generator().manual_seed(1)
    place = sorted(INFOS).index(name)
    contiguous, *others = X.values()
    for turn, lay_x in ((place, contiguous), (place // 2 + 1, others[place % 2])):
        x = tuple(lay_x(t.detach()).requires_grad_() if t.requires_grad else t for t in leaves)
        try:
            seed()
            with torch.no_grad():
                ys = fn(None, x, None)
            drawn = [torch.randn(y.shape, dtype=y.dtype, generator=draw) if _able(y) else None for y in ys]
            lay_dy = list(DY.values())[turn % len(DY)]
            dys = tuple(None if t is None else lay_dy(t) for t in drawn)
            yield fn, x, ys, dys, by_autograd(fn, x, dys)
        except RuntimeError:
            assert lay_x is not torch.Tensor.contiguous, "torch serves its own samples"


def _able(t):
    return t.is_floating_point() or t.is_complex()


def check(name):
    ran = 0
    for fn, x, ys, dys, want in cases(name):
        op, cfg = op_from_torch(fn, name=name), TorchConfig()
        needs = Needs(x=[str(i) for i, t in enumerate(x) if t.requires_grad])
        seed()
        given = tuple(t.detach() for t in x)
        got, residuals = op.fwd(None, given, cfg, needs=needs)
        dx = op.bwd(residuals, dys, cfg)[1] if residuals is not None else [None] * len(x)
        for a, b in zip((*got, *dx), (*ys, *want), strict=True):
            if a is None or b is None:
                assert a is None and b is None or not (b if a is None else a).any(), name
            else:
                assert a.shape == b.shape and a.dtype is b.dtype, name
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * _scale(b), equal_nan=True)
        ran += 1
    assert ran or not sampled(INFOS[name])[1]


def _scale(t):
    finite = t[t.isfinite()]
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(INFOS.keys() - NOT_SERVED.keys()))
def test_functions(name):
    check(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOT_SERVED)
def test_not_served(name):
    fn, leaves = sampled(INFOS[name])
    with pytest.raises((ValueError, RuntimeError)):
        op_from_torch(fn, name=name).fwd(None, tuple(t.detach() for t in leaves), TorchConfig())
