"""Modules follow torch.autocast as torch.nn does; ops refuse it."""

import contextlib
import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from funcops import TorchConfig, differentiable, donate, op_from_torch, with_policy
from funcops import nn as fnn
from funcops.engine.program.rules import FEW
from funcops.engine.trees import cast, tensors
from funcops.testing import assert_close
from funcops.testing.checks import float_like

D = 8


def _loaded():
    for path in sorted((Path(__file__).parents[1] / "cases").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"autocast_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module.CASES[0]


CASES = list(_loaded())  # the first of every operator and combinator


@contextlib.contextmanager
def on_for(kind, dtype=torch.float16):
    """Autocast for a kind of device, whether or not the machine has one."""
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ops_refuse_autocast(case):
    """Every function of every op raises, but not if autocast is off or for another device."""
    params, x = case.make(torch.float32)
    op, cfg = case.op, case.cfg
    y, residuals = op.fwd(params, x, cfg)
    dy = float_like(y, 7) if residuals is not None else None
    calls = {"fwd": lambda: op.fwd(params, x, cfg)}
    if residuals is not None:
        pending = op.dgrad(residuals, dy, cfg)[1]
        calls |= {
            "dgrad": lambda: op.dgrad(residuals, dy, cfg),
            "bwd": lambda: op.bwd(residuals, dy, cfg),
            "bwd, donated": lambda: op.bwd(donate(op.fwd(params, x, cfg)[1]), dy, cfg),
        }
        if pending is not None:
            calls["wgrad"] = lambda: op.wgrad(pending, cfg)
    for name, call in calls.items():
        want = call()
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match="must run outside of torch.autocast") as error,
        ):
            call()
        assert "funcops.trees.cast(tree, dtype)" in str(error.value) and "torch.autocast('cpu', enabled=False)" in str(error.value)
        for region in (torch.autocast("cpu", enabled=False), on_for("cuda")):
            with region:
                again = call()
            if name != "fwd":
                pairs = zip(tensors(again), tensors(want), strict=True)
                assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs), name
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        calls["fwd"]()


def test_the_remedy_works():
    case = next(c for c in CASES if c.op.name == "linear")
    params, x = case.make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="linear_fwd: must run outside"):
            with_policy(case.op, "minimal").fwd(params, x, case.cfg)
        with pytest.raises(RuntimeError, match="linear: must run outside"):
            differentiable(case.op)(params, x, case.cfg)
        with torch.autocast("cpu", enabled=False):
            given = cast((params, x), torch.bfloat16)
            assert differentiable(case.op)(*given, case.cfg).dtype is torch.bfloat16
    softplus = op_from_torch(lambda params, x, cfg: nn.functional.softplus(x), name="softplus")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="softplus_fwd: must run outside"):
        softplus.fwd(None, x, TorchConfig())


# What follows, as torch does.


PAIRS = {
    "Linear": lambda lib: lib.Linear(D, 16),
    "Linear without bias": lambda lib: lib.Linear(D, 16, bias=False),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "GELU": lambda lib: lib.GELU(),
    "SiLU": lambda lib: lib.SiLU(),
    "ReLU": lambda lib: lib.ReLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "GLU": lambda lib: lib.GLU(),
    "Dropout": lambda lib: lib.Dropout(0.0),
    "MLP": lambda lib: lib.Sequential(lib.Linear(D, 16), lib.GELU(), lib.Linear(16, D)),
    "norm and MLP": lambda lib: lib.Sequential(lib.LayerNorm(D), lib.Linear(D, 16), lib.SiLU(), lib.Linear(16, D)),
    "MLP and norm": lambda lib: lib.Sequential(lib.Linear(D, 16), lib.Sigmoid(), lib.Linear(16, D, bias=False), lib.RMSNorm(D)),
    "activation first": lambda lib: lib.Sequential(lib.Tanh(), lib.Linear(D, 16), lib.GLU()),
    "dropout within": lambda lib: lib.Sequential(lib.Linear(D, 16), lib.Dropout(0.0), lib.ReLU()),
    "others within": lambda lib: lib.Sequential(lib.Linear(D, 16), nn.Softplus(), lib.Linear(16, D), nn.Identity()),
    "in one another": lambda lib: lib.Sequential(lib.RMSNorm(D), lib.Sequential(lib.Linear(D, D), lib.GELU()), lib.Linear(D, D)),
    "hooked": lambda lib: hooked(lib.Sequential(lib.Linear(D, 16), lib.GELU(), lib.Linear(16, D))),
    "parametrized": lambda lib: nn.utils.parametrizations.weight_norm(lib.Linear(D, D)),
    "adaptive": lambda lib: lib.Sequential(lib.Linear(D, D), frozen(lib.Linear(D, D)), lib.GELU(), lib.Linear(D, D)),
}


def hooked(model):
    model[0].register_forward_hook(lambda m, x, y: y * 2)
    return model


def frozen(model):
    return model.requires_grad_(False)


def outcome(module, x, region, loss=lambda y: y.float().square().mean()):
    """y, gradients, and the bytes that autograd keeps, without parameters."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    parameters, seen = {p.untyped_storage()._cdata for p in module.parameters()}, {}

    def pack(t):
        if t.untyped_storage()._cdata not in parameters:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes(), t
        return t

    with region, saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    found = loss(y)
    found.backward()
    return (
        y if hasattr(y, "loss") else y.detach(),
        [x.grad, *[p.grad for p in module.parameters()]],
        sum(size for size, _ in seen.values()),
    )


def check_follows(want, got, exact, spare=0):
    """Check against torch: the same dtypes, errors no larger, and no more bytes kept."""
    assert got[0].dtype is want[0].dtype
    assert [g is None for g in got[1]] == [w is None for w in want[1]]
    for g, w, e in zip([got[0], *got[1]], [want[0], *want[1]], [exact[0], *exact[1]], strict=True):
        if w is not None:
            assert g.dtype is w.dtype
            errors = [(t.double() - e).norm() / (e.norm() + 1e-9) for t in (g, w)]
            assert errors[0] <= 1.5 * errors[1] + 1e-6, errors
    assert got[2] <= want[2] + spare, (got[2], want[2])


REGIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.turns("given", "dtype", "name", every=2)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own RMSNorm
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", REGIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_modules_follow(name, dtype, given):
    torch.manual_seed(0)
    want = PAIRS[name](nn)
    got = PAIRS[name](fnn)
    got.load_state_dict(want.state_dict())
    exact = copy.deepcopy(want).double()
    if given is torch.float64:  # autocast leaves it alone
        want, got = want.double(), got.double()
    x = torch.randn(FEW // D, D, dtype=given)
    if name == "hooked":
        assert len(got[0]._forward_hooks) == 1
    region = functools.partial(torch.autocast, "cpu", REGIONS[dtype])
    spare = 16 * ("ropout" in name)  # a key, where torch keeps no mask for p = 0
    exact = outcome(exact, x.double(), contextlib.nullcontext())
    check_follows(outcome(want, x, region()), outcome(got, x, region()), exact, spare)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), region():
            assert got(x).dtype is want(x).dtype
    with region(), region(enabled=False):
        other = x.float() if given is torch.bfloat16 else x
        assert got(other).dtype is want(other).dtype is other.dtype
    with on_for("cuda"):
        assert torch.equal(got(other), got(other)) and got(other).dtype is other.dtype


def test_embeddings_and_losses_follow():
    ids, labels = torch.randint(9, (32,)), torch.randint(16, (32,))
    torch.manual_seed(0)
    want = nn.Sequential(nn.Embedding(9, D), nn.Linear(D, 16))
    got, exact = fnn.Sequential(fnn.Embedding(9, D), fnn.Linear(D, 16)), copy.deepcopy(want).double()
    got.load_state_dict(want.state_dict())
    region = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        found = []
        for model, lib in ((want, nn), (got, fnn), (exact, nn)):
            loss = lib.CrossEntropyLoss(**options)
            model.zero_grad()
            with region(enabled=model is not exact):
                y = loss(model(ids), labels)
            y.backward()
            found.append((y.detach(), [p.grad for p in model.parameters()], 0))
        check_follows(*found)
        assert found[1][0].dtype is torch.float32


def test_the_fused_loss_follows():
    torch.manual_seed(0)
    got = fnn.LinearCrossEntropyLoss(D, 32)
    x, labels = torch.randn(24, D), torch.randint(32, (24,))
    found = []
    for module in (lambda t: nn.functional.cross_entropy(got.linear(t), labels), lambda t: got(t, labels)):
        for enabled in (True, False):
            got.zero_grad()
            t = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = module(t)
            y.backward()
            found.append((y.detach(), [t.grad, got.linear.weight.grad], 0))
    check_follows(found[0], found[2], cast(found[1], torch.float64))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own RMSNorm
@pytest.mark.parametrize("lower", REGIONS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_norms_have_the_dtype_that_this_torch_gives_them(kind, given, lower):
    """On fake tensors of a device: autocast treats a norm differently by device and by version."""
    for name in ("LayerNorm", "RMSNorm"):
        with FakeTensorMode(), torch.no_grad():
            x, found = torch.empty(2, D, device=kind, dtype=given), []
            for lib in (nn, fnn):
                module = getattr(lib, name)(D, device=kind, dtype=torch.float64 if given is torch.float64 else None)
                with on_for(kind, REGIONS[lower]):
                    found.append(module(x).dtype)
        assert found[0] is found[1], (name, found)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own RMSNorm
@pytest.mark.parametrize("dtype", REGIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_modules_follow_on_a_gpu(name, dtype):
    torch.manual_seed(0)
    want, got = PAIRS[name](nn).cuda(), PAIRS[name](fnn).cuda()
    got.load_state_dict(want.state_dict())
    for given in (torch.float32, REGIONS[dtype]):
        x, region = torch.randn(FEW // D, D, device="cuda", dtype=given), functools.partial(torch.autocast, "cuda", REGIONS[dtype])
        exact = outcome(copy.deepcopy(want).double(), x.double(), contextlib.nullcontext())
        check_follows(outcome(want, x, region()), outcome(got, x, region()), exact)


def casts_of(parameter, y):
    """The number of casts of a parameter behind y."""
    seen, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [n for n, _ in node.next_functions]
    sources = [n.next_functions[0][0] for n in seen if n.name() == "ToCopyBackward0"]
    return sum(getattr(source, "variable", None) is parameter for source in sources)


def test_a_weight_is_cast_once_in_a_region():
    layer, x = fnn.Linear(D, D), torch.randn(3, D)
    with torch.autocast("cpu"):
        y = layer(layer(x))
        with torch.autocast("cpu", enabled=False):
            pass
        with torch.no_grad():
            assert not layer(x).requires_grad
        assert casts_of(layer.weight, layer(y)) == 1
        with torch.autocast("cpu", torch.float16):
            z = layer(y)
        assert casts_of(layer.weight, z) == 2, "of another dtype"
        with torch.no_grad():
            layer.weight.add_(1.0)
        torch.testing.assert_close(layer(x), nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
        torch.clear_autocast_cache()
        assert casts_of(layer.weight, layer(y)) == 2
    with torch.autocast("cpu", cache_enabled=False):
        assert casts_of(layer.weight, layer(layer(x))) == 2
    with torch.autocast("cpu"):
        assert casts_of(layer.weight, layer(y)) == 2, "a region begins anew"


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("weight", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_the_norm_of_decoders(given, weight, enabled):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    model = nn.ModuleList([modeling.LlamaRMSNorm(D).to(weight)])
    nn.init.normal_(model[0].weight)
    x, found = torch.randn(5, D, dtype=given), []
    for swapped in (False, True):
        if swapped:
            assert fnn.from_torch(model).replaced
        t = x.clone().requires_grad_()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = model[0](t)
        y.float().square().sum().backward()
        found.append((y.detach(), t.grad, model[0].weight.grad))
    coarse = max((given, weight, torch.float32), key=lambda dtype: torch.finfo(dtype).eps)
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    assert_close(cast(found[1], coarse), cast(found[0], coarse), dtype=coarse, length=64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
def test_decoders_follow(family):
    """Norms, MLPs, attention and loss together: errors no larger than torch's, and no more bytes kept."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    if family == "GPT2":
        cfg = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        want = transformers.GPT2LMHeadModel(cfg)
    else:
        cfg = getattr(transformers, f"{family}Config")(num_key_value_heads=1, head_dim=16, **sizes)
        want = getattr(transformers, f"{family}ForCausalLM")(cfg)
    got, exact = copy.deepcopy(want), copy.deepcopy(want)
    fnn.from_torch(got)
    ids = torch.randint(64, (4, 16))
    found = []
    for model in (want, got, exact):
        model.forward = functools.partial(model.forward, labels=ids)
        region = torch.autocast("cpu", torch.bfloat16, enabled=model is not exact)
        logits = []
        loss, gradients, kept = outcome(model, ids, region, loss=lambda y, logits=logits: logits.append(y.logits) or y.loss)
        found.append((logits[0].detach(), gradients, kept))
    check_follows(*found)


@pytest.mark.parametrize("name", ["Linear", "LinearCrossEntropyLoss", "LayerNorm"])
def test_autocast_on_another_kind_of_device_changes_nothing(name):
    """Modules ask first whether autocast is on anywhere, which is quick, then whether it is on for x's device."""
    module = {
        "Linear": lambda: fnn.Linear(D, D),
        "LinearCrossEntropyLoss": lambda: fnn.LinearCrossEntropyLoss(D, 5),
        "LayerNorm": lambda: fnn.LayerNorm(D, elementwise_affine=False),
    }[name]()
    given = (torch.randn(3, D), torch.tensor([0, 4, 2]))[: 1 + (name == "LinearCrossEntropyLoss")]
    want = module(*given)
    with on_for("cuda"):
        got = module(*given)
    assert got.dtype is torch.float32 and torch.equal(got, want)
