"""For every input that torch.nn's modules accept, `funcops.nn` gives the same result or an error in the standard wording."""

import inspect
import itertools

import pytest
import torch
from tiers import drawn
from torch import nn

import funcops.nn as fnn

pytestmark = pytest.mark.filterwarnings(
    "ignore:Complex modules",
    "ignore:Casting complex",
    "ignore:Mismatch dtype between input and weight",
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
)
D = 6
MODULES = {
    "Linear": lambda lib: lib.Linear(D, 4),
    "Linear without bias": lambda lib: lib.Linear(D, 4, bias=False),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "LayerNorm of two": lambda lib: lib.LayerNorm((3, D)),
    "LayerNorm without weight": lambda lib: lib.LayerNorm(D, elementwise_affine=False),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "RMSNorm without weight": lambda lib: lib.RMSNorm(D, elementwise_affine=False),
    "GELU": lambda lib: lib.GELU(),
    "ReLU": lambda lib: lib.ReLU(),
    "ReLU in place": lambda lib: lib.ReLU(inplace=True),
    "SiLU": lambda lib: lib.SiLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "GLU": lambda lib: lib.GLU(),
    "Dropout without p": lambda lib: lib.Dropout(0.0),
    "Dropout in eval": lambda lib: lib.Dropout(0.5).eval(),
    "Dropout of all": lambda lib: lib.Dropout(1.0),
    "Dropout in place": lambda lib: lib.Dropout(0.0, inplace=True),
    "Embedding": lambda lib: lib.Embedding(9, 3),
    "Embedding with padding": lambda lib: lib.Embedding(9, 3, padding_idx=-2),
    "GroupNorm": lambda lib: lib.GroupNorm(1, 3),
    "GroupNorm without weight": lambda lib: lib.GroupNorm(1, 3, affine=False),
    "Softmax": lambda lib: lib.Softmax(-1),
    "Softmax along another": lambda lib: lib.Softmax(0),
    "GLU along another": lambda lib: lib.GLU(0),
    "Sequential": lambda lib: lib.Sequential(lib.LayerNorm(D), lib.Linear(D, 8), lib.Dropout(0.0), lib.GELU(), lib.Linear(8, D)),
    "Sequential of Dropout": lambda lib: lib.Sequential(lib.Dropout(0.0), lib.Dropout(0.0)),
    "Sequential of ReLU": lambda lib: lib.Sequential(lib.ReLU(), lib.Sigmoid()),
    "Sequential of Embedding": lambda lib: lib.Sequential(lib.Embedding(9, D), lib.RMSNorm(D)),
    "empty Sequential": lambda lib: lib.Sequential(),
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
SHORT = (torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
SHAPES = ((), (D,), (3, D), (0, D), (2, 3, D), (3, 5), (0,))
WORDING = r"^[\w. \[\]']+: .+ must be .+, got .+"


def given(shape, dtype, strided):
    x = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64)
    x = (x if dtype in FLOATS else x.abs() * 3).to(dtype)
    return torch.stack([x, x], -1)[..., 0] if strided and x.dim() else x


def outcome(module, *args):
    """y and the gradients of x and of parameters, or the error."""
    x = args[0].clone(memory_format=torch.preserve_format)
    module.zero_grad()
    leaf = x.requires_grad_() if x.is_floating_point() or x.is_complex() else x
    try:
        y = module(leaf * 1, *args[1:])  # what a layer before gives
        if y.requires_grad:
            (y * torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype)).abs().sum().backward()
        return y.detach(), [leaf.grad, *(p.grad for p in module.parameters())] if y.requires_grad else []
    except Exception as error:
        return error


def compare(name, want, got, text):
    """Check an input that torch accepts: ours gives the same result, or an error in the standard wording."""
    if isinstance(want, Exception):
        return
    if isinstance(got, Exception):
        with pytest.raises(type(got), match=WORDING):
            raise got
        return
    assert len(got[1]) == len(want[1]), (name, text)
    found = [(a, b) for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True) if a is not None or b is not None]
    few = any(t.dtype in SHORT for pair in found for t in pair)
    for i, (a, b) in enumerate(found):
        loss = name == "CrossEntropyLoss" and i == 0 and b.dtype in SHORT  # the loss of short logits may be wider
        assert (a.dtype is b.dtype or (loss and a.dtype is torch.float32)) and a.shape == b.shape, (name, text)
        a, b = a.to(torch.complex128), b.to(torch.complex128)
        assert torch.equal(a.isnan(), b.isnan()), (name, text)
        apart = (a - b).nan_to_num().norm() / (1 + b.nan_to_num().norm())
        assert apart < (0.05 if few else 1e-5), (name, text, apart)


SERVED = {
    "Linear": FLOATS,
    "RMSNorm": FLOATS,
    "ReLU": (torch.int64,),
    "Tanh": (torch.bool, torch.complex64),
    "Sigmoid": (torch.int32,),
    "Dropout in eval": DTYPES,
    "Sequential of Dropout": DTYPES,
    "Sequential of ReLU": (torch.uint8,),
}


@pytest.mark.turns("name", "dtype", every=2)
@pytest.mark.parametrize(("name", "dtype"), drawn(MODULES, (torch.float32, torch.float64, torch.bfloat16, torch.complex64)))
def test_inputs_that_torch_accepts(name, dtype):
    """98 inputs: of the module's dtype and of others, of two layouts, without rows, and without a batch."""
    torch.manual_seed(0)
    want, got = MODULES[name](nn).to(dtype), MODULES[name](fnn).to(dtype)
    got.load_state_dict(want.state_dict())
    for shape, of_x, strided in itertools.product(SHAPES, DTYPES, (False, True)):
        if not strided or of_x in FLOATS:
            x = given(shape, of_x, strided)
            compare(name, outcome(want, x), outcome(got, x), f"{shape} {of_x} {strided}")


def test_dtypes_left_to_torch():
    for name, dtypes in SERVED.items():
        for dtype in dtypes:
            module = MODULES[name](fnn).to(dtype if dtype in FLOATS else torch.float32)
            x = given((3, D), dtype, False)
            assert not isinstance(outcome(module, x), Exception), (name, dtype)
    mixed = outcome(fnn.RMSNorm(D).double(), torch.randn(3, D))
    assert not isinstance(mixed, Exception), "two dtypes that the op does not have"


def targets(shape, classes):
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    for dtype in (torch.int64, torch.uint8, torch.int32, torch.float64, torch.float32, torch.bfloat16):
        yield torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.randint(classes, rows).to(dtype)
    yield torch.randint(classes, (*rows, 1))


@pytest.mark.turns("options")
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1}], ids=str)
def test_targets_that_torch_accepts(options):
    for shape, dtype in itertools.product(((5, 7), (7,), (2, 7, 3), (2, 7, 3, 2), (0, 7)), FLOATS):
        logits = given(shape, dtype, False)
        for target in targets(shape, 7):
            want, got = (outcome(lib.CrossEntropyLoss(**options), logits, target) for lib in (nn, fnn))
            compare("CrossEntropyLoss", want, got, f"{shape} {dtype} {target.dtype}")
            if dtype is target.dtype:
                assert not isinstance(got, Exception), "soft targets"
    loss, x, labels = fnn.LinearCrossEntropyLoss(D, 7), torch.randn(3, D), torch.tensor([1, 5, 6])
    assert torch.equal(loss(x, labels.int()), loss(x, labels)), "int32 labels"
    assert torch.equal(fnn.CrossEntropyLoss()(x, labels.int() - 1), fnn.CrossEntropyLoss()(x, labels - 1))


def test_dropout_at_rest_is_x_itself():
    """Its y may be written in place, and the generator is not advanced."""
    for drop in (fnn.Dropout(0.0), fnn.Dropout(0.5).eval(), fnn.Sequential(fnn.Dropout(0.0), fnn.Dropout(0.0))):
        x = torch.randn(3, D, requires_grad=True) * 1
        assert drop(x) is x
        drop(x).mul_(2).sum().backward()
    model = fnn.Sequential(fnn.Linear(D, D), fnn.Dropout(0.5), fnn.Linear(D, D))
    x, state = torch.randn(3, D), torch.get_rng_state()
    want = model[2](model[0](x))
    for rest in (model.eval(), model.train()):
        rest[1].p = 0.0 if rest.training else 0.5
        y = rest(x)
        assert torch.equal(torch.get_rng_state(), state) and y.grad_fn.name() == "_NodeBackward"
        torch.testing.assert_close(y, want)
    model[1].p = 0.5
    assert not torch.equal(model(x), model(x))


def everything():
    yield from ((name, make(fnn)) for name, make in MODULES.items())
    yield "mixed", fnn.Sequential(fnn.Linear(D, D), nn.Softplus())
    yield "hooked", fnn.Sequential(fnn.Linear(D, D))
    yield "LinearCrossEntropyLoss", fnn.LinearCrossEntropyLoss(D, 4)
    yield "SwiGLU", fnn.SwiGLU()
    yield "weighted", fnn.CrossEntropyLoss(weight=torch.ones(4))


def test_modules_can_be_looked_at():
    """`hasattr` and `inspect` read every attribute; a module without a config has no such attribute."""
    for name, module in everything():
        if name == "hooked":
            module[0].register_forward_hook(lambda *_: None)
        members = dict(inspect.getmembers(module))
        assert ("cfg" in members) == hasattr(module, "cfg") and "op" in members, name
        if not hasattr(module, "cfg"):
            with pytest.raises(ValueError, match=WORDING):
                fnn.functional(module)
            assert getattr(module, "cfg", 7) == 7


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")  # torch 2.15 calls trace and trace_method deprecated
@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "RMSNorm", "GELU", "GLU", "Dropout in eval", "Embedding", "Sequential"])
def test_fx_and_jit_trace(name):
    module = MODULES[name](fnn)
    x = torch.randint(9, (3, D)) if name == "Embedding" else torch.randn(3, D)
    graph = torch.fx.symbolic_trace(module)  # of torch's functions
    torch.testing.assert_close(graph(x), module(x))
    graph(x).sum().backward() if [*module.parameters()] else None
    with torch.no_grad():
        traced = torch.jit.trace(module, x)
        again = torch.cat([x, x])
        torch.testing.assert_close(traced(again), module(again))
    if [*module.parameters()]:
        with pytest.raises(RuntimeError, match=r"torch.jit.trace must be around calls under torch.no_grad\(\), got a call"):
            torch.jit.trace(module, x)


def test_fx_says_what_it_cannot_trace():
    with pytest.raises(ValueError, match="funcops.nn.SwiGLU: x must be a plain tensor: torch has no swiglu, got Proxy"):
        torch.fx.symbolic_trace(fnn.SwiGLU())


def test_a_gate_of_one_dimension():
    """Along its only one, by whichever name; a number has no halves."""
    x = torch.tensor([100.0, -3.0, 5.0, 2.0])
    for dim in (0, -1):
        y = fnn.GLU(dim, kind="swiglu", gate="first")(x)
        torch.testing.assert_close(y, nn.functional.silu(x[:2]) * x[2:])
    with pytest.raises(ValueError, match="funcops.nn.GLU: x must be a plain tensor: torch has no swiglu, got Tensor"):
        fnn.GLU(0, kind="swiglu", gate="first")(torch.tensor(1.0))


PLAIN_LOSSES = {  # arguments of the loss, the shape of x before D
    "weights of classes": (dict(weight=torch.tensor([1.0, 2.0, 0.5, 3.0])), (2, 3)),
    "each of them": (dict(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]), reduction="none"), (2, 3)),
    "a bias": (dict(bias=True, reduction="none"), (3, 1, 2)),
}


@pytest.mark.parametrize("name", PLAIN_LOSSES)
def test_a_loss_that_the_op_lacks_takes_more_rows(name):
    """It is torch's loss of logits, [rows, classes]."""
    given, shape = PLAIN_LOSSES[name]
    loss, x, target = fnn.LinearCrossEntropyLoss(D, 4, **given), torch.randn(*shape, D), torch.arange(6).view(shape) % 4
    options = {key: value for key, value in given.items() if key != "bias"}
    want = nn.functional.cross_entropy(loss.linear(x).view(6, 4), target.view(6), **options)
    got = loss(x, target)
    assert got.shape == (target.shape if "reduction" in given else ())
    torch.testing.assert_close(got, want.view(got.shape))


def test_arguments_of_a_loss_that_do_not_fit():
    with pytest.raises(ValueError, match=r"LinearCrossEntropyLoss: weight must be \[4\], a weight for each class, got .*\[5\]"):
        fnn.LinearCrossEntropyLoss(D, 4, weight=torch.ones(5))
    loss = fnn.LinearCrossEntropyLoss(D, 4, ignore_index=2)
    with pytest.raises(ValueError, match="ignore_index must be None for targets that are probabilities, got 2"):
        loss(torch.randn(3, D), torch.full((3, 4), 0.25))


@pytest.mark.parametrize("given", ["x", [1.0], None], ids=["text", "a list", "none"])
def test_what_is_no_tensor_is_named(given):
    with pytest.raises(TypeError, match="^Linear: x must be a tensor, got ('x'|list|None)$"):
        fnn.Linear(2, 2)(given)


class OfTheirOwn(torch.Tensor):
    pass


def test_a_linear_layer_of_gpt2_keeps_the_class_of_its_input():
    model = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3))
    x = torch.randn(2, 3)
    want = model(x)
    assert [c.path for c in fnn.from_torch(model).replaced] == ["", "0"]
    got = model(x.as_subclass(OfTheirOwn))
    assert type(got) is OfTheirOwn and type(model(x)) is torch.Tensor
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want)
