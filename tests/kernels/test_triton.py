"""The Triton implementations, in Triton's interpreter if there is no GPU, under the same laws."""

import itertools
import math
from random import Random

import pytest
import torch
from law_cases import MODULES
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import ExpertsConfig, experts, random
from funcops.engine.backend import backend
from funcops.engine.trees import tensors
from funcops.library.kernels import add_norm, cross_entropy, linear, norm, pointwise
from funcops.testing import LAWS
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HELD = ("split", "pure", "mirror", "frugal", "right", "edges")
LARGEST = 8192  # elements: larger cases are there for the CPU's own branches, and would keep the interpreter busy for minutes
EVERY = [
    (case, j == 0)
    for module in MODULES.values()
    for j, case in enumerate(module.CASES)
    if set(DTYPES) & set(case.dtypes) and sum(t.numel() for t in tensors(case.make(case.dtypes[0]))) <= LARGEST
]


def rows():
    """Every case under Right in two dtypes in turn, the first of an op in every dtype; and, in one dtype in turn, under Edges and
    one other law in turn, the first of an op under all: those compare a kernel with itself. In the first tier: the first of an op
    under Right, and a quarter of the others under their law, in one dtype."""
    others = [law for law in HELD if law not in ("right", "edges")]
    for i, (case, is_first) in enumerate(EVERY):
        dtypes = [dtype for dtype in DTYPES if dtype in case.dtypes]
        own, turn = dtypes[i % len(dtypes)], others[i // 3 % len(others)]
        for law in HELD:
            if law in case.exempt or not (is_first or law in ("right", "edges", turn)):
                continue
            next_one = dtypes[(i + 1) % len(dtypes)]
            for dtype in (own,) if law != "right" else dtypes if is_first else dict.fromkeys((own, next_one)):
                chosen = dtype is own and (law == "right" if is_first else law == turn and i % 4 == 0)
                yield pytest.param(case, law, dtype, marks=() if chosen else pytest.mark.slow)


@pytest.mark.turns("case", "law", "dtype", every=3)
@pytest.mark.parametrize(("case", "law", "dtype"), list(rows()), ids=str)
def test_laws_on_triton(case, law, dtype):
    with backend("triton"):
        LAWS[law](case, dtype)


def has_no_numbers(case):
    found = tensors(case.make(case.dtypes[0])[1])
    return any([t.numel() == 0 for t in found if t.is_floating_point()] or [t.numel() == 0 for t in found])


@pytest.mark.parametrize("case", [case for case, _ in EVERY if has_no_numbers(case)], ids=str)
def test_a_forward_of_no_numbers_launches_nothing(case, monkeypatch):
    """But a weight may be quantised, and a q that sees no key."""
    from triton.runtime.interpreter import InterpretedFunction

    from funcops.testing.aot import name_of

    (params, x), launched, run = case.make(torch.float32), [], InterpretedFunction.__getitem__
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: launched.append(name_of(self.fn)) or run(self, grid))
    with backend("triton"):
        case.op.fwd(params, x, case.cfg)
    quantisers = {"qlinear": "quantize.", "qattention": "scaled_attention.quantize_heads"}.get(case.op.name, "none")
    assert [name for name in launched if not name.startswith(quantisers)] == []


def offset(t, by):
    """The same values at an address that is `by` elements further."""
    return torch.cat((t.new_zeros(by), t.flatten()))[by:].view(t.shape)


@pytest.mark.parametrize("by", [1, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_addresses(by, dtype):
    x, w, dy = (torch.randn(shape).to(dtype) for shape in ((5, 19), (19,), (5, 19)))
    want = norm.rms_norm_fwd(x, w, 1e-6, False)
    with backend("triton"):
        got = norm.rms_norm_fwd(offset(x, by), offset(w, by), 1e-6, False)
        grads = norm.rms_norm_bwd(offset(dy, by), offset(x, by), offset(w, by), got[1], False, True, True)
        product = linear.linear_fwd(offset(x, by), offset(dy, by), None)
    assert_close(got, want, dtype=dtype)
    dx, parts = norm.rms_norm_bwd(dy, x, w, want[1], False, True, True)
    assert_close((grads[0], grads[1].sum(0)), (dx, parts.sum(0)), dtype=dtype)
    assert_close(product, x @ dy.mT, dtype=dtype)


@pytest.fixture
def fences(monkeypatch):
    """Numbers behind all memory that a kernel's wrapper makes with `new_empty`: a program that writes past its end changes them."""
    fences = []

    def new_empty(t, *shape, dtype=None, device=None):
        shape = shape[0] if shape and not isinstance(shape[0], int) else shape
        room = torch.full((math.prod(shape) + 64,), 7.0, dtype=dtype or t.dtype, device=device or t.device)
        fences.append(room[math.prod(shape) :])
        return room[: math.prod(shape)].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return fences


@pytest.mark.parametrize("width", [4100, 4112, 8208, 8300, 32784])  # one for each way to take rows that a program does not keep
@pytest.mark.parametrize("centre", [False, True])
def test_rows_longer_than_a_program_keeps(centre, width, fences):
    x, dy, w = torch.randn(3, width), torch.randn(3, width), torch.randn(width)

    def run():
        if centre:
            y, mean, rstd = norm.layer_norm_fwd(x, w, w, 1e-5, False)
            dx, dw, db = norm.layer_norm_bwd(dy, x, w, mean, rstd, False, True, True, True)
            return y, dx, dw.sum(0), db.sum(0)
        y, rstd = norm.rms_norm_fwd(x, w, 1e-5, False)
        dx, dw = norm.rms_norm_bwd(dy, x, w, rstd, False, True, True)
        return y, dx, dw.sum(0), None

    want = run()
    with backend("triton"):
        got = run()
    assert_close(got, want, dtype=torch.float32, length=width)
    assert fences and all(bool((fence == 7).all()) for fence in fences)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_that_begin_anywhere(dtype):
    draw = Random(str(dtype))
    for width in (2049, 16 * draw.randrange(129, 512) + draw.randrange(1, 16)):
        x, residual = torch.randn(3, width).to(dtype), torch.randn(3, width).to(dtype)
        w, b, by, eps = torch.randn(width).to(dtype), torch.randn(width).to(dtype), draw.randrange(8), 1e-6
        for kernel, args in (
            (norm.rms_norm_fwd, (w, eps, True)),
            (norm.layer_norm_fwd, (w, draw.choice([None, b]), eps, False)),
            (norm.l2_norm_fwd, (eps,)),
            (add_norm.add_layer_norm_fwd, (residual, w, b, eps, draw.random() < 0.5)),
        ):
            want = kernel(x, *args)
            with backend("triton"):
                got = kernel(offset(x, by), *args)
            assert_close(got, want, dtype=dtype, length=width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_that_are_taken_in_pieces(dtype):
    """Rows fill all pieces, end within one or before one, with any gradients requested, with and without a weight."""
    draw = Random(str(dtype))
    asked = list(itertools.product((False, True), repeat=4))  # 1 + w, dx, dw, db
    for width, (shifted, *wanted) in zip((16384, 12304, 8208), draw.sample(asked, 3), strict=True):
        x, dy, dstream = (torch.randn(3, width).to(dtype) for _ in range(3))
        w = draw.choice([None, torch.randn(width).to(dtype)])
        mean, rstd = torch.randn(3, 1), torch.rand(3, 1) + 0.5
        for kernel, args in (
            (norm.rms_norm_bwd, (dy, x, w, rstd, shifted, *wanted[:2])),
            (norm.layer_norm_bwd, (dy, x, w, mean, rstd, shifted, *wanted)),
            (add_norm.add_rms_norm_bwd, (dy, dstream, x, w, rstd, shifted, *wanted[:2])),
            (add_norm.add_layer_norm_bwd, (dy, dstream, x, w, mean, rstd, shifted, *wanted)),
        ):
            want = kernel(*args)
            with backend("triton"):
                got = kernel(*args)
            assert_close(got[0], want[0], dtype=dtype, length=width)
            summed = [[part if part is None else part.sum(0) for part in parts[1:]] for parts in (got, want)]
            assert_close(*summed, dtype=torch.float32)


def test_a_vocabulary_of_several_blocks():
    logits, labels = torch.randn(3, 9001), torch.tensor([9000, -100, 4096])

    def run():
        losses, lse = cross_entropy.cross_entropy_fwd(logits, labels, 0.1, -100, 1e-3)
        return losses, lse, cross_entropy.cross_entropy_bwd(losses, logits, labels, lse, 0.1, -100, 1e-3)

    want = run()
    with backend("triton"):
        got = run()
    assert_close(got, want, dtype=torch.float32, length=9001)


def test_a_label_outside_the_vocabulary_is_not_a_number():
    with backend("triton"):
        losses, _ = cross_entropy.cross_entropy_fwd(torch.zeros(2, 4), torch.tensor([1, 4]), 0.0, -100, 0.0)
    assert losses[0].isfinite() and losses[1].isnan()


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_inner_dimension_is_split_and_summed(dtype):
    dy, x = torch.randn(5000, 5).to(dtype), torch.randn(5000, 7).to(dtype)
    with backend("triton"):
        dw, db = linear.linear_wgrad(dy, x, True)
        again, _ = linear.linear_wgrad(dy, x, True)
    assert torch.equal(dw, again)
    want = dy.double().mT @ x.double(), dy.double().sum(0)
    assert_close((dw, db), want, dtype=dtype, length=5000)


@pytest.mark.parametrize("n", [1, 3, 1024, 1030, 4099])
def test_dropout_draws_the_same_bits(n):
    x, key = torch.ones(n), random.fold_in(random.key(3), 2**40 + 7)
    want = pointwise.dropout(x, key, 0.3)
    with backend("triton"):
        assert torch.equal(pointwise.dropout(x, key, 0.3), want)


@pytest.mark.parametrize("masks", [(True, True), (True, False), (False, True)])
def test_operators_with_optional_results_trace(masks):
    x, w = torch.randn(4, 6), torch.randn(6)
    with backend("triton"):
        _, rstd = norm.rms_norm_fwd(x, w, 1e-6, False)
        want = norm.rms_norm_bwd(x, x, w, rstd, False, *masks)
        graph = make_fx(lambda x: norm.rms_norm_bwd(x, x, w, rstd, False, *masks))(x)
        assert any("funcops.rms_norm_bwd" in str(node.target) for node in graph.graph.nodes)
        for got, one in zip(graph(x), want, strict=True):
            assert got is one is None or torch.equal(got, one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [4112, 8208])
@pytest.mark.parametrize("centre", [False, True])
def test_sums_of_a_row_are_of_that_row_and_all_of_it(centre, width, dtype):
    """dy has a mean, which the row's own sum removes from dx, and the next row begins with a large element."""
    x, dy, w = torch.randn(3, width).to(dtype), (torch.randn(3, width) + 3).to(dtype), torch.ones(width, dtype=dtype)
    dy[2, 0] = x[2, 0] = 3e4
    (y, *kept), backward = (
        (norm.layer_norm_fwd(x, w, w, 1e-5, False), norm.layer_norm_bwd)
        if centre
        else (norm.rms_norm_fwd(x, w, 1e-5, False), norm.rms_norm_bwd)
    )
    asked = (False, True, True, True) if centre else (False, True, True)
    want = backward(dy, x, w, *kept, *asked)[0]
    with backend("triton"):
        got = backward(dy, x, w, *kept, *asked)[0]
    assert_close(got[:2], want[:2], dtype=dtype)


def test_experts_of_more_columns_than_a_program_takes():
    """Both the width of x and of the hidden layer are several blocks."""
    draw = torch.Generator().manual_seed(0)
    cfg = ExpertsConfig(2, dim=32, hidden=80)
    params = experts.init(cfg, key=random.key(0))
    x = torch.rand(3, 2, generator=draw), torch.randn(3, 32, generator=draw), torch.tensor([[0, 1], [1, 0], [1, 0]])
    found = []
    for name in ("torch", "triton"):
        with backend(name):
            y, kept = experts.fwd(params, x, cfg)
            found.append((y, experts.bwd(kept, torch.sin(torch.arange(y.numel())).view(y.shape), cfg)))
    assert_close(found[1], found[0], dtype=torch.float32, length=80)
