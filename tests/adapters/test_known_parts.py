"""Parts of an unmodified module that run as this library's ops where Triton is chosen: here by its interpreter."""

import collections
import copy
import subprocess
import sys

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from products import Products
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import Needs, TorchConfig, backend, op_from_module, report
from funcops import nn as fnn
from funcops.adapters.from_function.formulas import ATTENTION, FORMULAS, rotation, rotation_rounded
from funcops.adapters.from_function.joint import Like, joint_graph
from funcops.adapters.from_function.matched import Finder, Forward
from funcops.engine.trees import tensors
from funcops.testing import assert_close

CFG, PARAMS = TorchConfig(), Needs(x=False, params=True)
SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=64, num_hidden_layers=2)
HEADS = dict(SIZES, num_key_value_heads=1, head_dim=16)
# by name: the sizes, and how many parts of each kind a forward has
HUGGING_FACE = {
    "Llama": (HEADS, dict(rms_norm=5, rope_apply=4, glu_pair=2, cross_entropy=1)),
    "Gemma2": (HEADS, dict(rms_norm=9, rope_apply=4, glu_pair=2, cross_entropy=1)),
    "Olmo2": (dict(HEADS, eos_token_id=1), dict(rms_norm=9, rope_apply=4, glu_pair=2, cross_entropy=1)),
    "Qwen3": (HEADS, dict(rms_norm=9, rope_apply=4, glu_pair=2, cross_entropy=1)),
    "T5 1.1": (
        dict(vocab_size=64, d_model=32, d_kv=16, num_layers=1, num_heads=2, d_ff=48),
        dict(rms_norm=7, glu_pair=2, cross_entropy=1),
    ),
    "GPT-2": (dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2), dict(layer_norm=5, activation=2, cross_entropy=1)),
    "ViT": (dict(SIZES, image_size=32, patch_size=16), dict(layer_norm=5, cross_entropy=1)),
    "GPTNeoX": (SIZES, dict(layer_norm=5, rope_apply=4, cross_entropy=1)),
    "Phi": (SIZES, dict(layer_norm=3, rope_apply=4, activation=2, cross_entropy=1)),
}


def parts(residuals):
    """How often each of this library's operators is in a forward."""
    names = [str(node.target) for node in residuals.traced.graphs.forward.graph.nodes]
    found = collections.Counter([name.removeprefix("funcops.").partition(".")[0] for name in names if "funcops." in name])
    return {name.removesuffix("_fwd"): count for name, count in found.items()}


def result(out):
    return out if isinstance(out, torch.Tensor) else out.loss


def measured(model, x, choice, needs=PARAMS):
    """The result, gradients, parts, kept bytes and products of a model as an op."""
    with backend(choice):
        op, params = op_from_module(model, x, output=result)
        torch.manual_seed(1)
        y, residuals = op.fwd(params, x, CFG, needs=needs)
    with Products() as products:
        dparams, dx = op.bwd(residuals, torch.ones_like(y), CFG)
    kept = report(residuals, params, (x, list(model.buffers()))).kept_bytes
    return y, dparams, dx, parts(residuals), kept, products.count


def wide(t):
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def wanted(model, x):
    """The gradients by autograd in float64."""
    model = copy.deepcopy(model).double()
    y = result(model(**{n: wide(t) for n, t in x.items()}) if isinstance(x, dict) else model(wide(x)))
    return y, dict(zip(dict(model.named_parameters()), torch.autograd.grad(y.sum(), list(model.parameters())), strict=True))


def check(model, x, expected, dtype=torch.float32):
    y, dparams, _, found, kept, products = measured(model, x, "triton")
    _, _, _, none, without, also = measured(model, x, "torch")
    assert found == expected and none == {}
    want, grads = wanted(model, x)
    assert y.dtype is result(model(**x) if isinstance(x, dict) else model(x)).dtype
    assert_close((y, dparams), (want.detach().to(y.dtype), {n: g.to(dparams[n].dtype) for n, g in grads.items()}), dtype=dtype)
    assert all([dparams[n].dtype is p.dtype for n, p in model.named_parameters()])
    assert kept <= without and products <= also


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in HUGGING_FACE if name not in ("Llama", "GPT-2")]


SLOW += [pytest.param(f"{name} by products", marks=pytest.mark.slow) for name in ("Llama", "GPT-2", "Olmo2")]


@pytest.mark.parametrize("name", ["Llama", "GPT-2", *SLOW])
def test_parts_of_models_of_hugging_face(name):
    name, _, written = name.partition(" by ")
    sizes, expected = HUGGING_FACE[name]
    model = tiny_models.tiny(name, **sizes).eval()
    if written:
        model.set_attn_implementation("eager")
        expected = dict(expected, scored_attention=2)
    batch = tiny_models.batch_of(model, rows=1, length=5)
    if "input_ids" in batch:
        batch = {n: t % 64 for n, t in batch.items()} | {"use_cache": False}
    check(model, batch, expected)


class Norm(nn.Module):
    def __init__(self, fn, dim=16, bias=False, dtype=None):
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(dim, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(dim, dtype=dtype)) if bias else None

    def forward(self, x):
        return self.fn(x, self.weight) if self.bias is None else self.fn(x, self.weight, self.bias)


class Block(nn.Module):
    """A norm, a gated or plain MLP, and a residual, as several projects write one."""

    def __init__(self, norm, mlp, gated, dtype=None):
        super().__init__()
        self.norm, self.mlp = norm, mlp
        self.up, self.down = nn.Linear(16, 48 if gated else 24, dtype=dtype), nn.Linear(24, 16, bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down(self.mlp(self.up(self.norm(x))))


def torchtune(x, w):
    n = x.float()
    return (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * w


def x_transformers_glu(x):
    x, gate = x.chunk(2, dim=-1)
    return x * F.gelu(gate)


def phi3_glu(x):
    gate, up = x.chunk(2, dim=-1)
    return up * F.silu(gate)


PROJECTS = {
    "torchtune": (torchtune, phi3_glu, True, dict(rms_norm=1, glu=1)),
    "torch": (lambda x, w: F.rms_norm(x, (16,), w, 1e-5), F.silu, False, dict(rms_norm=1)),
    # F.normalize bounds the norm from below, which is another function
    "x_transformers": (lambda x, w: F.normalize(x, dim=-1) * 4 * w, x_transformers_glu, True, dict(glu=1)),
    "convnext": (lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-6), lambda x: F.relu(x).square(), False, None),
}


@pytest.mark.turns("name", "dtype", every=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROJECTS)
def test_parts_as_other_projects_write_them(name, dtype):
    norm, mlp, gated, expected = PROJECTS[name]
    torch.manual_seed(0)
    bias = name == "convnext"
    model = Block(Norm(norm, bias=bias, dtype=dtype), mlp, gated, dtype)
    check(model, torch.randn(2, 3, 16, dtype=dtype), expected or dict(layer_norm=1, activation=1), dtype)


def joint_of(fn, given):
    """The joint graph of a function."""

    def run(flat):
        y = fn(*flat)
        return list(y) if isinstance(y, tuple) else [y]

    outputs = [Like.of(y).dense() for y in run(given)]
    asked = [t.is_floating_point() for t in given]
    return joint_graph(run, given, outputs, asked)


def found_in(fn, given):
    return Finder(ATTENTION + FORMULAS, lambda t: True)(Forward(joint_of(fn, given), len(given)))


TABLES = rotation, rotation_rounded  # which are rotations only if their halves are equal
DRAWN = [formula for formula in (*FORMULAS, *ATTENTION) if formula.fn not in TABLES]


def drawn(like):
    if like.dtype is torch.bool:
        return torch.rand(like.shape) < 0.3
    if not like.dtype.is_floating_point:
        return torch.randint(0, 8, like.shape)
    return torch.randn(like.extent()).to(like.dtype).as_strided(like.shape, like.stride)


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
@pytest.mark.turns("formula", every=12)
@pytest.mark.parametrize("formula", DRAWN, ids=[f"{i} {getattr(f.fn, '__name__', 'partial')}" for i, f in enumerate(DRAWN)])
def test_each_formula_is_its_op_and_is_found(formula):
    torch.manual_seed(2)
    numbers = {name: {"eps": 1e-2, "ignore": 3, "scale": 0.5}[name] for name, _ in formula.numbers}
    seen = 0
    for dtype in formula.dtypes:
        for likes in formula.examples(dtype):
            given = [drawn(like) for like in likes]
            y = formula.fn(*given, **numbers)
            if y.dtype is not dtype:  # float32 weights widen it
                continue
            op = formula.op(Like.of(y), *likes, **numbers)
            if op is None:
                continue
            seen += 1
            assert len(found_in(lambda *t: formula.fn(*t, **numbers), given)) == 1
            own, theirs = [[t.detach().requires_grad_(t.is_floating_point()) for t in given] for _ in range(2)]
            exact = [wide(t.detach()).requires_grad_(t.requires_grad) for t in theirs]
            trained = [i for i, t in enumerate(own) if t.requires_grad]
            dy = torch.randn(y.shape)
            pairs = []
            for fn, args in ((op, own), (lambda *t: formula.fn(*t, **numbers), exact if dtype is not torch.float32 else theirs)):
                z = fn(*args)
                pairs.append((z, torch.autograd.grad(z, [args[i] for i in trained], dy.to(z.dtype))))
            (got, grads), (want, others) = [(z.detach(), dz) for z, dz in pairs]
            assert got.dtype is y.dtype and all([g.dtype is given[i].dtype for i, g in zip(trained, grads, strict=True)])
            narrow = min([t.dtype for t in (*given, y) if t.is_floating_point()], key=lambda d: d.itemsize)
            others = [other.to(g.dtype) for other, g in zip(others, grads, strict=True)]
            assert_close((got, *grads), (want.to(got.dtype), *others), dtype=narrow)
    assert seen


class Rotated(nn.Module):
    def __init__(self, angles, rounded, trained=False):
        super().__init__()
        self.rounded, self.angles = rounded, nn.Parameter(angles, requires_grad=trained)

    def forward(self, x):
        angles = torch.cat((self.angles, self.angles), dim=-1)
        x, cos, sin = x.transpose(1, 2), angles.cos() * 1.5, angles.sin() * 1.5
        return rotation_rounded(x, cos, sin) if self.rounded else rotation(x, cos.to(x.dtype), sin.to(x.dtype))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_rotations(dtype, rounded, batch):
    torch.manual_seed(0)
    model, x = Rotated(torch.randn(batch, 4, 8), rounded), torch.randn(2, 4, 3, 16, dtype=dtype)
    y, _, dx, found, *_ = measured(model, x, "triton", Needs.ALL)
    given = x.double().requires_grad_()
    want = copy.deepcopy(model).double()(given)
    (grad,) = torch.autograd.grad(want.sum(), [given])
    assert found == dict(rope_apply=1) and y.dtype is dtype and y.stride() == model(x).stride()
    assert_close((y, dx), (want.detach().to(dtype), grad.to(dtype)), dtype=dtype)


def test_angles_that_are_trained_have_their_gradient():
    torch.manual_seed(0)
    model, x = Rotated(torch.randn(1, 4, 8), False, trained=True), torch.randn(2, 4, 3, 16)
    _, dparams, _, found, *_ = measured(model, x, "triton", Needs.ALL)
    (want,) = torch.autograd.grad(model(x).sum(), [model.angles])
    assert found == {}
    assert_close(dparams["angles"], want, dtype=torch.float32)


class Attention(nn.Module):
    """nanoGPT's, with a causal mask and perhaps dropout."""

    def __init__(self, p=0.0):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(p)
        self.register_buffer("seen", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = [part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(x).split(c, dim=2)]
        scores = (q @ k.transpose(-2, -1)) * (1.0 / 8**0.5)
        scores = scores.masked_fill(self.seen[:, :, :t, :t] == 0, float("-inf"))
        y = self.drop(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


@pytest.mark.parametrize(("p", "expected"), [(0.0, dict(scored_attention=1)), (0.5, {})])
def test_attention_by_products(p, expected):
    torch.manual_seed(0)
    model, x = Attention(p), torch.randn(2, 8, 16)
    if p:
        assert measured(model, x, "triton")[3] == expected
    else:
        check(model, x, expected)


X, W = torch.randn(3, 8, 8), torch.randn(8)


def rms(x, w, *, eps=1e-6, dim=-1):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps) * w


def two_readers(x, w):
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * r * w, r


def near_gelu(x, w):
    return 0.5 * x * (1.0 + torch.tanh(0.797 * (x + 0.044715 * torch.pow(x, 3.0))))


def low_statistics(x, w):
    x = x.bfloat16()
    return rms(x, w.bfloat16())


def late_cast(x, w):
    n = x.bfloat16().float()
    return w * n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + 1e-6)


def unbiased(x, w):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * w


def root_and_eps(x, w):
    return w * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6))


def dropped(x, w):
    return F.dropout(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), 0.5) * w


def softmaxed(x, mask, dim):
    p = torch.softmax(x @ x.transpose(-2, -1) * 0.5 + mask, dim)
    return (p @ x).transpose(1, 2).contiguous()


def backwards(x, a):
    return x * a.cos().unsqueeze(1) + torch.cat((x[..., 4:], -x[..., :4]), -1) * a.sin().unsqueeze(1)


NEAR = {
    "the root and then eps": (root_and_eps, (X, W)),
    "eps below zero": (lambda x, w: rms(x, w, eps=-1e-6), (X, W)),
    "another dim": (lambda x, w: rms(x, w, dim=1), (X, W)),
    "a mean of fourth powers": (lambda x, w: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6) * w, (X, W)),
    "an unbiased variance": (unbiased, (X, W)),
    "a second reader": (two_readers, (X, W)),
    "a weight of one number": (rms, (X, torch.randn(1))),
    "a weight by row": (rms, (X, torch.randn(3, 8, 1))),
    "a wider weight": (rms, (torch.randn(3, 8, 1), W)),
    "statistics in 16 bits": (low_statistics, (X, W)),
    "a result that is wider than x": (late_cast, (X, W)),
    "dropout between": (dropped, (X, W)),
    "another constant": (near_gelu, (X, W)),
    "a sum with a factor": (lambda x, w: torch.add(w * F.layer_norm(x, (8,)), w, alpha=2), (X, W)),
    "a norm without a weight": (lambda x, w: F.layer_norm(x, (8,)) + w, (X, W)),
    "a gate of one number a row": (lambda x, w: torch.sigmoid(x[..., :1]) * x, (X, W)),
    "unequal halves": (lambda x, w: F.silu(x.split([3, 5], -1)[0]) * x[..., :1], (X, W)),
    "a loss in 16 bits": (lambda x, labels: F.cross_entropy(x.bfloat16(), labels), (X[0], torch.arange(8))),
    "a loss with weights": (lambda x, w: F.cross_entropy(x[0], torch.arange(8), W.abs()), (X, W)),
    "a smoothed loss": (lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1), (X[0], torch.arange(8))),
    "a rotation whose halves differ": (lambda x, a: rotation(x[None], a.cos(), a.sin()), (X, torch.randn(1, 8, 8))),
    "a rotation backwards": (lambda x, a: backwards(x[None], torch.cat((a, a), -1)), (X, torch.randn(1, 8, 4))),
    "scores of another dim": (lambda x, w: softmaxed(x[None], w, -2), (X, W)),
    "a mask for each row of x": (lambda x, m: softmaxed(x[None], m, -1), (X, torch.randn(8, 8))),
    "a transposed result": (lambda x, w: rms(x.transpose(0, 1), w), (X, W)),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_are_left_as_they_are(name):
    fn, given = NEAR[name]
    assert found_in(fn, list(given)) == {}


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, dy):
        return dy


def hooked(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda dy: dy * 3)
    return y


def without_grad(x):
    with torch.no_grad():
        scale = x.abs().amax()
    return x / scale


def in_place(x):
    return (x * 2).mul_(3)


BEFORE = {"a Function": Straight.apply, "a hook": hooked, "no_grad": without_grad, "a write": in_place}


@pytest.mark.parametrize("name", BEFORE)
def test_a_backward_that_is_not_of_the_forwards_operators_stays_autograds(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Norm(lambda x, w: torchtune(BEFORE[name](x), w)), nn.Linear(16, 16))
    x = torch.randn(3, 16)
    y, dparams, dx, found, *_ = measured(model, x, "triton", Needs.ALL)
    given = x.clone().requires_grad_()
    want = model(given)
    grads = torch.autograd.grad(want.sum(), [given, *model.parameters()])
    assert_close((y, dx, *dparams.values()), (want.detach(), *grads), dtype=torch.float32)
    if found == {}:
        assert torch.equal(y, want) and all(map(torch.equal, [dx, *dparams.values()], grads))
    assert found in ({}, dict(rms_norm=1)) and (found == {} or name in ("a write", "no_grad"))


class Names(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("casts", [False, True])
def test_a_whole_model_runs_with_parts(casts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU("tanh"), nn.Dropout(), nn.Linear(32, 16))
    untouched, x, found = copy.deepcopy(model), torch.randn(8, 16), []
    with backend("triton"):
        fnn.from_torch(model, example=x)
        for one in (model, untouched):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=casts), Names() as ran:
                y = one(x)
                grads = torch.autograd.grad(y.float().square().sum(), list(one.parameters()))
            found.append((y.detach(), *grads))
            assert ("funcops.layer_norm_fwd.default" in ran.names) == (one is model)
    assert_close(*found, dtype=found[0][0].dtype)


def test_a_trace_holds_for_the_backend_of_its_call():
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), torch.randn(3, 16)
    op, params = op_from_module(model, x)
    ys = []
    for choice in ("torch", "triton", "torch"):
        with backend(choice):
            y, residuals = op.fwd(params, x, CFG)
        ys.append(y)
        assert parts(residuals) == (dict(layer_norm=1) if choice == "triton" else {})
    assert torch.equal(ys[0], ys[2]) and torch.equal(ys[0], model(x))


def test_parts_keep_the_names_of_their_modules_and_their_halves():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(Norm(torchtune), phi3_glu, True) for _ in range(2)])
    x = torch.randn(2, 3, 16)
    with backend("triton"):
        op, params = op_from_module(model, x)
        y, residuals = op.fwd(params, x, CFG)
        dx, pending = op.dgrad(residuals, torch.ones_like(y), CFG)
        dparams = op.wgrad(pending, CFG)
        whole, also = op.bwd(residuals, torch.ones_like(y), CFG)
    named = {str(node.target): node.meta["custom"]["path"] for node in residuals.traced.graphs.forward.graph.nodes if node.meta}
    assert named["funcops.rms_norm_fwd.default"] == "1.norm" and named["funcops.glu_fwd.default"] == "1"
    assert all([name == "x" or name.removeprefix("params.").partition(".")[0] in "01" for name in residuals.kept])
    assert torch.equal(dx, also) and all(map(torch.equal, tensors(dparams), tensors(whole)))


ELSEWHERE = """
import torch
residuals = torch.load({path!r}, weights_only=False)
assert any("funcops.layer_norm_bwd" in str(node.target) for node in residuals.traced.graphs.backward.graph.nodes)
found = residuals.traced.graphs.backward.forward(*residuals.kept.values(), torch.ones(3, 16))
torch.save(found, {path!r})
"""


def test_residuals_in_another_process_find_their_operators(tmp_path):
    torch.manual_seed(0)
    model, x, path = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)), torch.randn(3, 16), str(tmp_path / "residuals")
    with backend("triton"):
        op, params = op_from_module(model, x)
        _, residuals = op.fwd(params, x, CFG)
        dparams, dx = op.bwd(residuals, torch.ones(3, 16), CFG)
    torch.save(residuals, path)
    subprocess.run([sys.executable, "-c", ELSEWHERE.format(path=path)], check=True)
    found = torch.load(path)
    assert torch.equal(found[0], dx) and all(map(torch.equal, found[1:], dparams.values()))
