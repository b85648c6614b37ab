"""Another library computes the products of linear layers: a stand-in under the laws of the op, and quack's calls."""

import inspect
import types
from typing import Literal, Optional

import pytest
import torch
from law_cases import CASES

from funcops import ActivationConfig, ChainConfig, LinearConfig, SkipConfig, Step, activation, chain, linear, random, skip
from funcops.engine.backend import backend, gemm, wide
from funcops.engine.trees import tree_map_tensors
from funcops.library.kernels import fused_linear
from funcops.library.kernels import linear as kernels
from funcops.library.kernels.activation import ACTIVATIONS
from funcops.library.kernels.triton import matmul as products
from funcops.library.kernels.triton import quack_products
from funcops.library.kernels.triton.providers import PRODUCTS, register_provider, unregister_provider
from funcops.testing import LAWS, Draw
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")


class Products:
    """A provider that computes by torch, and counts what it took; it takes what `takes` says."""

    def __init__(self, takes=lambda *_: True):
        self.takes, self.taken, self.left = takes, [], []

    def __call__(self, a, b, out, e):
        assert a.dim() == b.dim() == out.dim() == 2 and a.shape[1] == b.shape[0] > 0 and out.is_contiguous() and out.numel()
        assert not a.requires_grad or not torch.is_grad_enabled()
        if not self.takes(a, b, out, e):
            self.left.append(e)
            return False
        self.taken.append(e)
        z = e.scale * (a.to(wide(a.dtype)) @ b.to(wide(a.dtype)))
        z = z if e.bias is None else z + e.bias
        f = ACTIVATIONS[e.kind] if e.kind else None
        if e.mode == "keep":
            e.z.copy_(z)
        if e.mode == "derivative":
            x = e.z.to(z.dtype)
            z = f.backward(z, x, f.forward(x) if f.reads_y else None)
        elif f is not None:
            z = f.forward(z)
        out.copy_(z if e.add is None else z + e.add)
        return True


@pytest.fixture
def provided():
    """Registers a provider as "theirs"."""

    def register(provider):
        register_provider("theirs", provider)
        return provider

    yield register
    if "theirs" in PRODUCTS:
        unregister_provider("theirs")


LAWFUL = ("right", "edges", "split", "pure", "mirror")


@pytest.mark.turns("law", "case")
@pytest.mark.parametrize("law", LAWFUL)
@pytest.mark.parametrize("case", [case for case, dtype in CASES if case.op is linear and dtype is torch.float32], ids=str)
def test_a_linear_layer_by_it_obeys_the_laws(law, case, provided):
    theirs = provided(Products())
    with backend("triton"), gemm("theirs"):
        LAWS[law](case, torch.float32)
    assert theirs.taken or not case.x(Draw(torch.float32)).numel()


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def every_product(dtype, kind):
    """All calls of a linear layer's kernels, plain and fused, with what is written in place."""
    generator = torch.Generator().manual_seed(0)
    x, w, b, z, residual, dy = (
        torch.randn(s, generator=generator).to(dtype) for s in ((2, 5, 24), (40, 24), (40,), (2, 5, 24), (2, 5, 40), (2, 5, 40))
    )
    x.requires_grad_()
    sums = [torch.ones(s, dtype=wide(dtype)) for s in ((2, 5, 24), (40, 24), (40,))]
    with torch.enable_grad():
        found = [kernels.linear_fwd(x, w, b), kernels.linear_fwd(x, w, None), kernels.linear_dgrad(dy, w)]
        found += [*kernels.linear_wgrad(dy, x, True), *kernels.linear_bwd(dy, x, w, True)]
        for r, keep in ((None, False), (None, True), (residual, False), (residual, True)):
            found += fused_linear.fused_linear_fwd(x, w, b, r, kind, 0.5, keep)
        found += [fused_linear.fused_linear_dgrad(dy, w, z if kind else None, kind, 0.5)]
        found += [fused_linear.fused_linear_dgrad_add(dy, w, 0.5, z), *fused_linear.fused_linear_wgrad(dy, x, 0.5, True)]
        fused_linear.fused_linear_dgrad_into(dy, w, 0.5, sums[0])
        fused_linear.fused_linear_wgrad_into(dy, x, 0.5, sums[1], sums[2])
    return tree_map_tensors(torch.detach, (found, sums))


@pytest.mark.turns("dtype", "kind")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["", *ACTIVATIONS])
def test_every_product_and_epilogue_is_its(kind, dtype, provided):
    theirs, want = provided(Products()), every_product(dtype, kind)
    with backend("triton"), gemm("theirs"):
        got = every_product(dtype, kind)
    assert_close(got, want, dtype=dtype, length=24)
    assert len(theirs.taken) == 15 and not theirs.left


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_it_does_not_take_goes_where_it_goes_by_default(dtype, provided, monkeypatch):
    """To the library, unless the table has ours for another tensor that is added."""
    theirs, ours, plan_of = provided(Products(lambda a, b, out, e: e.bias is None and e.add is not out)), [], products.plan_of
    monkeypatch.setattr(products, "plan_of", lambda *given: ours.append(given) or plan_of(*given))
    want = every_product(dtype, "gelu")
    with backend("triton"), gemm("theirs"):
        got = every_product(dtype, "gelu")
    assert_close(got, want, dtype=dtype, length=24)
    assert len(theirs.left) == 7 and len(theirs.taken) == 8 and not ours
    dy, w, add = (torch.randn(s).to(dtype) for s in ((256, 16), (16, 256), (256, 256)))
    theirs.takes = lambda *_: False
    with backend("triton"), gemm("theirs"):
        fused_linear.fused_linear_dgrad_add(dy, w, 1.0, add)
    assert len(ours) == (dtype is not torch.float32)


@pytest.mark.parametrize("shape", [(0, 24, 40), (5, 0, 40), (5, 24, 0)], ids=str)
def test_products_of_nothing_are_not_its(shape, provided):
    m, k, n = shape
    theirs, x, w = provided(Products()), torch.randn(m, k), torch.randn(n, k)
    with backend("triton"), gemm("theirs"):
        got = fused_linear.fused_linear_fwd(x, w, torch.ones(n), None, "relu", 1.0, True)
    assert_close(got, fused_linear.fused_linear_fwd(x, w, torch.ones(n), None, "relu", 1.0, True), dtype=torch.float32)
    assert not theirs.taken


def test_a_chain_runs_its_fused_products_by_it(provided):
    """Steps that fuse have their activation and residual in the epilogues of their products."""
    steps = [Step("up", linear, LinearConfig(8, 16)), Step("act", activation, ActivationConfig("gelu"))]
    steps += [Step("down", linear, LinearConfig(16, 8))]
    cfg = SkipConfig(chain, ChainConfig(steps=tuple(steps)))
    params, x = skip.init(cfg, key=random.key(0)), torch.randn(4, 8)

    def run():
        y, kept = skip.fwd(params, x, cfg)
        return y, skip.bwd(kept, torch.ones_like(y), cfg)

    want, theirs = run(), provided(Products())
    with backend("triton"), gemm("theirs"):
        got = run()
    assert_close(got, want, dtype=torch.float32, length=16)
    found = {(e.kind, e.mode, e.add is not None) for e in theirs.taken}
    assert {("gelu", "keep", False), ("", "", True)} <= found and not theirs.left


def test_names_are_new_and_known(provided):
    with pytest.raises(ValueError, match="gemm: name must be .* or 'quack', got 'theirs'"):
        gemm("theirs").__enter__()
    for taken in ("auto", "quack", "not a name"):
        with pytest.raises(ValueError, match=f"register_provider: name must be an identifier other than auto, .*, got '{taken}'"):
            register_provider(taken, Products())
    with pytest.raises(TypeError, match="register_provider: provider must be a function"):
        register_provider("theirs", 3)
    provided(Products())
    with pytest.raises(ValueError, match="register_provider: name"):
        register_provider("theirs", Products())
    unregister_provider("theirs")
    for name in ("theirs", "quack", "cublas"):
        with pytest.raises(ValueError, match=f"unregister_provider: name must be a registered one, got '{name}'"):
            unregister_provider(name)


Kind = Optional[Literal["relu", "relu_sq", "gelu_tanh_approx"]]
ACTS = {None: "", "relu": "relu", "relu_sq": "squared_relu", "gelu_tanh_approx": "gelu_tanh"}


class Quack:
    """The functions of `quack.gemm_interface` by their own arguments (quack 0.3), computed by torch."""

    def __init__(self):
        self.calls = []

    def gemm(self, A, B, out=None, bias=None, alpha=1.0, out_dtype=None, *, tuned=True):
        self.run("gemm", A, B, out, bias, alpha)

    def gemm_add(self, A, B, C, out=None, alpha=1.0, beta=1.0, out_dtype=None, *, tuned=True):
        assert C is not out and beta == 1.0
        self.run("gemm_add", A, B, out, None, alpha, C)

    def gemm_add_inplace(self, A, B, out, alpha=1.0, beta=1.0, *, tuned=True):
        assert beta == 1.0
        self.run("gemm_add_inplace", A, B, out, None, alpha, out.clone())

    def gemm_act(
        self, A, B, C=None, bias=None, activation: Kind = None, preact_out=None, postact_out=None, *, store_preact=True, tuned=True
    ):
        assert C is None and store_preact is (preact_out is not None)
        z = A.float() @ B.float() + (0 if bias is None else bias.float())
        if store_preact:
            preact_out.copy_(z)
        postact_out.copy_(ACTIVATIONS[ACTS[activation]].forward(z) if activation else z)
        self.calls.append("gemm_act")

    def run(self, name, a, b, out, bias, alpha, add=None):
        assert type(alpha) is float and a.itemsize == 2
        for t in (a, b, out):
            assert 1 in t.stride() and max(t.stride()) % 8 == 0 and t.data_ptr() % 16 == 0
        out.copy_(alpha * (a.float() @ b.float()) + (0 if bias is None else bias.float()) + (0 if add is None else add.float()))
        self.calls.append(name)


@pytest.fixture
def quack(monkeypatch):
    one = Quack()
    monkeypatch.setattr(quack_products, "_interface", lambda: one)
    return one


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["", "relu", "squared_relu", "gelu_tanh", "gelu"])
def test_quack_computes_what_it_has_and_the_table_the_rest(kind, dtype, quack):
    want = every_product(dtype, kind)
    with backend("triton"), gemm("quack"):
        got = every_product(dtype, kind)
    assert_close(got, want, dtype=dtype, length=24)
    assert set(quack.calls) == (set() if dtype is torch.float32 else {"gemm", "gemm_add"})


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["", "relu", "squared_relu", "gelu_tanh", "gelu"])
def test_quack_computes_activations_and_sums_in_its_epilogue(kind, keep, quack):
    x, w, b = (torch.randn(s).bfloat16() for s in ((5, 24), (40, 24), (40,)))
    want = fused_linear.fused_linear_fwd(x, w, b, None, kind, 1.0, keep)
    z, sums = torch.randn(2, 5, 40).bfloat16()
    total = (sums.float() + 0.5 * (x.float() @ w.float().T)).bfloat16()
    more = [(fused_linear.fused_linear_fwd, (x, w, None, z, kind, 1.0, True))] * bool(kind)
    more += [(fused_linear.fused_linear_dgrad, (x, w.T.contiguous(), z, kind, 1.0))] * bool(kind)
    wanted = [f(*args) for f, args in more]
    with backend("triton"), gemm("quack"):
        got = fused_linear.fused_linear_fwd(x, w, b, None, kind, 1.0, keep)
        fused_linear.fused_linear_dgrad_into(x, w.T.contiguous(), 0.5, sums)
        others = [f(*args) for f, args in more]
    assert_close((got, sums, others), (want, total, wanted), dtype=torch.bfloat16, length=24)
    product = [] if kind == "gelu" else ["gemm_act" if kind or keep else "gemm"]
    assert quack.calls == [*product, "gemm_add_inplace"]


@pytest.mark.parametrize("change", ["odd", "shifted"])
def test_quack_gets_no_rows_that_it_cannot_load(change, quack):
    width = 23 if change == "odd" else 24
    x, w = torch.randn(5, width).bfloat16(), torch.randn(40, width).bfloat16()
    if change == "shifted":
        x = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(5, width)
    with backend("triton"), gemm("quack"):
        got = kernels.linear_fwd(x, w, None)
    assert_close(got, x.float() @ w.float().T, dtype=torch.bfloat16, length=width)
    assert not quack.calls


def test_quack_that_is_not_installed_is_refused_by_name(monkeypatch):
    quack_products._interface.cache_clear()
    monkeypatch.setattr(quack_products, "find_spec", lambda name: None)
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    message = r"gemm: name must be one whose library is installed \(pip install quack-kernels\), got 'quack', which is not"
    with backend("triton"), gemm("quack"), pytest.raises(ValueError, match=message):
        kernels.linear_fwd(x, x, None)


def test_quack_is_the_module_of_that_name(monkeypatch):
    module = types.ModuleType("quack.gemm_interface")
    quack_products._interface.cache_clear()
    monkeypatch.setattr(quack_products, "find_spec", lambda name: name == "quack")
    monkeypatch.setattr(quack_products, "import_module", lambda name: {"quack.gemm_interface": module}[name])
    assert quack_products._interface() is module
    quack_products._interface.cache_clear()
    assert set(inspect.signature(register_provider).parameters) == {"name", "provider"}
