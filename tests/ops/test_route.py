"""The router: equal to Hugging Face's, its choice among equal scores, its kept tensors; rows to experts and back."""

import dataclasses
import importlib
from random import Random

import pytest
import torch

from funcops import (
    ChainConfig,
    LinearConfig,
    LinearParams,
    Needs,
    PermuteConfig,
    RouteConfig,
    RouteParams,
    Step,
    UnpermuteConfig,
    WithExtras,
    chain,
    linear,
    optim,
    permute,
    random,
    report,
    route,
    unpermute,
)
from funcops.adapters.graphs import check_capturable
from funcops.engine.backend import backend
from funcops.library.kernels.route import route_fwd
from funcops.library.kernels.routing import sort_by_expert
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

STRANGE = float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0
DEEPSEEK = dict(score="sigmoid", bias=True, groups=4, top_groups=2, scale=2.5)
CONFIGS = {
    "softmax": RouteConfig(8, 3),
    "softmax, not normalised": RouteConfig(8, 3, normalize=False),
    "sigmoid": RouteConfig(8, 3, score="sigmoid"),
    "sigmoid, not normalised": RouteConfig(8, 3, score="sigmoid", normalize=False, scale=2.0),
    "DeepSeek-V3": RouteConfig(16, 4, **DEEPSEEK),
    "odd groups": RouteConfig(15, 4, score="sigmoid", groups=3, top_groups=2),
    "losses": RouteConfig(8, 3, aux=0.1, z=0.01),
    "losses of sequences": RouteConfig(8, 3, score="sigmoid", aux=0.1, sequence_wise=True, z=0.01),
    "jitter and capacity": RouteConfig(8, 3, jitter=0.1, capacity=0.75),
}
every_config = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)


def given(cfg, *rows, dtype=torch.float32, seed=0):
    """params and x; the logits have few values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (*rows, cfg.experts), generator=generator).to(dtype)
    params = RouteParams(torch.randint(-2, 3, (cfg.experts,), generator=generator).to(dtype) / 4 if cfg.bias else None)
    return params, (logits, random.key(1)) if cfg.jitter else logits


def as_of(model):
    """A model's router of Hugging Face, its config, ours, and the place of its logits."""
    name, router, fields, cfg = {
        "Mixtral": ("mixtral", "TopKRouter", dict(num_experts_per_tok=2, num_local_experts=8), RouteConfig(8, 2)),
        "Qwen3Moe": (
            "qwen3_moe",
            "TopKRouter",
            dict(num_experts_per_tok=3, num_experts=8, norm_topk_prob=False),
            RouteConfig(8, 3, normalize=False),
        ),
        "DeepseekV3": (
            "deepseek_v3",
            "TopkRouter",
            dict(num_experts_per_tok=4, num_local_experts=16, n_routed_experts=16, n_group=4, topk_group=2),
            RouteConfig(16, 4, **DEEPSEEK),
        ),
        "GptOss": ("gpt_oss", "TopKRouter", dict(num_experts_per_tok=4, num_local_experts=8), RouteConfig(8, 4)),
    }[model]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(module, f"{model}Config")(hidden_size=24, **fields)
    return getattr(module, model + router)(config), cfg


@pytest.mark.slow  # transformers take seconds to import
@pytest.mark.parametrize("model", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_weights_and_gradients_are_hugging_faces(model):
    pytest.importorskip("transformers")
    theirs, cfg = as_of(model)
    torch.manual_seed(0)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    bias = getattr(theirs, "bias", None)
    if cfg.bias:
        theirs.e_score_correction_bias.normal_(std=0.2)
    x = torch.randn(20, 24, requires_grad=True)
    out = theirs(x)
    weights, indices = out[1:] if len(out) == 3 else theirs.route_tokens_to_experts(out)
    dense = torch.zeros(20, cfg.experts).scatter(1, indices, weights)
    dy = torch.randn(20, cfg.experts)
    leaves = [x, *theirs.parameters()]
    dx, dweight, *dbias = torch.autograd.grad((dense * dy).sum(), leaves)

    gate = LinearConfig(24, cfg.experts, bias=bias is not None)
    whole = ChainConfig(steps=(Step("gate", linear, gate), Step("route", route, cfg)))
    own = RouteParams(theirs.e_score_correction_bias if cfg.bias else None)
    params = {"gate": LinearParams(theirs.weight.detach(), None if bias is None else bias.detach()), "route": own}
    y, kept = chain.fwd(params, x.detach(), whole)
    assert_close(torch.zeros(20, cfg.experts).scatter(1, y[1].long(), y[0]), dense.detach(), dtype=torch.float32)
    assert torch.equal(y[2], indices.flatten().bincount(minlength=cfg.experts).int())
    grads, ours = chain.bwd(kept, (dy.gather(1, y[1].long()), None, None, None), whole)
    got = ours, grads["gate"].weight, *([grads["gate"].bias] if dbias else [])
    assert_close(got, (dx, dweight, *dbias), dtype=torch.float32, by_leaf=True)
    assert grads["route"].bias is None


@pytest.mark.slow
def test_the_loss_is_hugging_faces_over_k():
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(30, 8, requires_grad=True)
    theirs = module.load_balancing_loss_func((logits,), 8, 3)
    (want,) = torch.autograd.grad(theirs, logits)
    cfg = RouteConfig(8, 3, aux=3.0)
    y, kept = route.fwd(RouteParams(None), logits.detach(), cfg)
    _, dx = route.bwd(kept, (None, None, None, torch.ones(())), cfg)
    assert_close((y[3], dx), (theirs.detach(), want), dtype=torch.float32, by_leaf=True)


def test_the_loss_of_an_even_load_is_its_factor():
    logits = torch.eye(6).repeat(4, 1) * 5
    assert_close(route.fwd(RouteParams(None), logits, RouteConfig(6, 1, aux=0.25))[0][3], torch.tensor(0.25), dtype=torch.float32)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_equal_logits_choose_the_first(name):
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0] * 5, [0.0, -0.0, 0.0, -0.0, 0.0], [-inf, 2, -inf, 2, -inf], [1, nan, 2, nan, 3], [-inf] * 4 + [1]])
    with backend(name):
        _, found, load, _ = route.fwd(RouteParams(None), rows, RouteConfig(5, 3))[0]
        grouped = RouteConfig(6, 3, score="sigmoid", groups=3, top_groups=2)
        groups = route.fwd(RouteParams(None), torch.tensor([[0.0] * 6, [0.0, 1, 3, -inf, 1, 0]]), grouped)[0][1]
    assert found.tolist() == [[0, 1, 2], [0, 1, 2], [1, 3, 0], [1, 3, 4], [4, 0, 1]] and load.tolist() == [4, 5, 2, 2, 2]
    assert groups.tolist() == [[0, 1, 2], [1, 4, 0]]


@pytest.mark.parametrize(("experts", "top_k"), [(32, 5), (32, 1), (6, 6)])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_close_and_distant_scores_are_in_order(name, experts, top_k):
    """Scores that differ in their last bits, which a key of few bits does not tell apart, and scores far below the best; and what a
    program counts in tiles that it routes twice. One expert has one order, and all experts leave none out."""
    generator = torch.Generator().manual_seed(1)
    cfg = RouteConfig(experts, top_k, score="sigmoid", bias=True, normalize=False)
    close = 1 + torch.randperm(experts, generator=generator) * 2.0**-23  # at 1.5, whose last bit is 2^-23
    distant = -(torch.randperm(experts, generator=generator).float() ** 2) / 12
    for logits, bias in ((torch.zeros(40, experts), close), (distant.expand(3, -1), torch.zeros(experts))):
        wanted = torch.sort(torch.sigmoid(logits) + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
        with backend(name):
            _, found, load, _ = route.fwd(RouteParams(bias), logits, cfg)[0]
        assert torch.equal(found.long(), wanted)
        assert torch.equal(load.long(), torch.bincount(wanted.flatten(), minlength=experts))


@every_config
def test_both_implementations_choose_the_same(cfg):
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        params, x = given(cfg, 3, 7, dtype=dtype, seed=seed)
        (weights, indices, load, loss), _ = route.fwd(params, x, cfg)
        with backend("triton"):
            (others, same, as_many, as_high), _ = route.fwd(params, x, cfg)
        assert torch.equal(indices, same) and torch.equal(load, as_many)
        assert_close((weights, loss), (others, as_high), dtype=torch.float32)


@every_config
def test_a_part_of_dy_that_is_None_counts_as_zero(cfg):
    params, x = given(cfg, 2, 5)
    (weights, _, _, loss), kept = route.fwd(params, x, cfg)
    dweights, dloss = torch.randn_like(weights), torch.randn_like(loss)
    for some, all_of_it in (
        ((dweights, None, None, None), (dweights, None, None, torch.zeros_like(loss))),
        ((None, None, None, dloss), (torch.zeros_like(weights), None, None, dloss)),
    ):
        assert_close(route.bwd(kept, some, cfg), route.bwd(kept, all_of_it, cfg), dtype=torch.float32)
    same_bits(route.bwd(kept, (None,) * 4, cfg), route.bwd(kept, None, cfg), "nothing")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_tokens_bits_are_its_own(name):
    """Whatever the other tokens are, except in the losses, which are over all tokens."""
    for cfg in (CONFIGS["softmax"], CONFIGS["DeepSeek-V3"]):
        params, logits = given(cfg, 9)
        others = torch.cat((given(cfg, 40, seed=2)[1], logits[4:5], logits[:3]))
        dweights = torch.randn(1, cfg.top_k)

        def run(rows, at, params=params, cfg=cfg, dweights=dweights):
            (weights, indices, *_), kept = route.fwd(params, rows, cfg)
            _, dx = route.bwd(kept, (dweights.expand_as(weights).contiguous(), None, None, None), cfg)
            return weights[at], indices[at], dx[at]

        with backend(name):
            same_bits(run(logits, 4), run(others, 40), f"{cfg}")


def test_load_and_loss_leave_a_chain_by_name():
    """With a key passed to the router, and a dy of None for outputs without a gradient."""
    cfg = RouteConfig(8, 3, jitter=0.1, aux=0.2)
    gate, names = LinearConfig(5, 8), ("indices", "load", "loss")
    steps = Step("gate", linear, gate), Step("route", route, cfg, takes=("key",), gives=names)
    whole = ChainConfig(steps=steps, extras=("key",), outputs=names)
    params, x, key = chain.init(whole, key=random.key(0)), torch.randn(6, 5), random.key(3)
    y, kept = chain.fwd(params, WithExtras(x, {"key": key}), whole)
    logits, _ = linear.fwd(params["gate"], x, gate)
    want, own = route.fwd(params["route"], (logits, random.fold_in(key, random.path_id("route"))), cfg)
    same_bits((y.main, *[y.extras[name] for name in names]), want, "y")
    dweights, dloss = torch.randn_like(y.main), torch.ones(())
    grads, _ = chain.bwd(kept, WithExtras(dweights, {"indices": None, "load": None, "loss": dloss}), whole)
    _, (dlogits, _) = route.bwd(own, (dweights, None, None, dloss), cfg)
    assert_close(grads["gate"].weight, dlogits.mT @ x, dtype=torch.float32)


@every_config
def test_kept_tensors(cfg):
    params, x = given(cfg, 4, 16, dtype=torch.bfloat16)
    y, kept = route.fwd(params, x, cfg)
    logits, choices = x[0] if cfg.jitter else x, 64 * cfg.top_k
    given_bytes = {id(t) for t in (logits, *y)}
    found = [getattr(kept, name) for name in kept.fields]
    fresh = sum(t.nbytes for t in found if t is not None and id(t) not in given_bytes and t.dtype is not torch.int64)
    scores = cfg.score == "sigmoid" and cfg.normalize and not cfg.aux
    wanted = 8 * choices if cfg.capacity else 4 * choices * scores + 4 * 4 * cfg.experts * cfg.sequence_wise
    assert fresh == wanted
    of_rows = cfg.aux or cfg.z or (cfg.score == "softmax" and not cfg.normalize)
    assert (kept.logits is logits) == bool(of_rows), "logits are kept where the gradient takes all of a row"
    assert report(kept, x=x).kept_bytes >= fresh


@every_config
def test_nothing_waits_for_the_device(cfg):
    params, x = given(cfg, 3, 7)

    def step(params, x):
        y, kept = route.fwd(params, x, cfg)
        return y, route.bwd(kept, (torch.ones_like(y[0]), None, None, torch.ones_like(y[3])), cfg)

    assert check_capturable(step, params, x) == []


def test_balance_evens_the_load():
    """A router prefers some experts; by the rule of arXiv 2408.15664 the fullest expert's share falls."""
    cfg = RouteConfig(8, 2, score="sigmoid", bias=True)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 8, generator=generator) + torch.linspace(-1, 1, 8)
    bias, loads = torch.zeros(8), []
    for _ in range(60):
        (_, _, load, _), _ = route.fwd(RouteParams(bias), logits, cfg, needs=Needs.NONE)
        loads.append(int(load.max()))
        before, bias = bias, optim.balance(bias, load, 0.01)
        assert_close(bias - before, 0.01 * torch.sign(125.0 - load), dtype=torch.float32)
    assert loads[0] > 200 and loads[-1] < 140
    assert optim.balance(torch.zeros(2), torch.tensor([1.5, 0.5]), 0.5).tolist() == [-0.5, 0.5], "a mean over ranks"


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_permute_and_unpermute_are_each_others_backward(name):
    draw = Random(name)
    for experts, used in ((6, (1, 2, 4)), (3, (0, 1, 2, 3)), (4, (2,)), (4, (4,))):  # empty ones, dropped rows, one for all
        tokens, choices, width = draw.randint(1, 9), draw.randint(1, 4), draw.randint(1, 20)
        indices = torch.tensor([[draw.choice(used) for _ in range(choices)] for _ in range(tokens)], dtype=torch.int32)
        x, cfg = torch.randn(tokens, width), PermuteConfig(experts)
        with backend(name):
            (rows, offsets, place), kept = permute.fwd(None, (x, indices), cfg)
            y, kept_back = unpermute.fwd(None, (rows, place), UnpermuteConfig())
            _, (dx, _) = permute.bwd(kept, (rows, None, None), cfg)
            _, (drows, _) = unpermute.bwd(kept_back, x, UnpermuteConfig())
        same_bits(dx, y, "the gradient of rows is their sum")
        end = int(offsets[-1])
        same_bits(drows[:end], rows[:end], "the gradient of a sum is its rows")
        assert end == int((indices < experts).sum()) and not rows[end:].any()
        assert_close(y, x * (indices < experts).sum(1, keepdim=True), dtype=torch.float32)
        assert {id(t) for t in (kept.place, kept.offsets)} == {id(place), id(offsets)} and kept_back.place is place


def test_rows_are_sorted_by_expert_and_stable():
    indices = torch.randint(0, 41, (300, 5), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    order, token, offsets, place = sort_by_expert(indices, 40)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(1500), key=lambda row: flat[row]) and torch.equal(token, order // 5)
    assert offsets.tolist() == [sum(e < i for e in flat) for i in range(41)]
    assert torch.equal(place.flatten()[order.long()], torch.arange(1500, dtype=torch.int32))
    assert all(t.dtype is torch.int32 and t.is_contiguous() for t in (order, token, offsets, place))
    many = sort_by_expert(torch.tensor([[39999, 40000, 3]], dtype=torch.int32), 40000)  # more than 16 bits count
    assert many[0].tolist() == [2, 0, 1] and many[2][-1] == 2


def test_a_capacity_is_of_the_first_tokens():
    logits = torch.tensor([[3.0, 2, 0], [3, 2, 0], [3, 0, 2], [3, 0, 2]])
    cfg = RouteConfig(3, 2, capacity=0.75)  # two of each expert
    (weights, indices, load, _), _ = route.fwd(RouteParams(None), logits, cfg)
    (whole, *_), _ = route.fwd(RouteParams(None), logits, dataclasses.replace(cfg, capacity=None))
    assert indices.tolist() == [[0, 1], [0, 1], [3, 2], [3, 2]] and load.tolist() == [4, 2, 2]
    assert torch.equal(weights, whole * (indices < 3)), "normalised before"


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_do_not_depend_on_how_far_the_logits_are(normalize, name):
    """Softmax of logits that are shifted, within float32's rounding of the weights: no logsumexp is rounded at the logits' size."""
    logits = torch.randint(-40, 40, (33, 8), generator=torch.Generator().manual_seed(0)).double() / 8
    cfg = RouteConfig(8, 3, normalize=normalize)
    chosen = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :3]
    want = torch.softmax(logits, -1).gather(-1, chosen)
    want = want / want.sum(-1, keepdim=True) if normalize else want
    for shift in (0.0, 300.0, 4096.0):  # sums that float32 has exactly
        with backend(name):
            weights, indices, *_ = route.fwd(RouteParams(None), (logits + shift).float(), cfg)[0]
        assert torch.equal(indices.long(), chosen)
        torch.testing.assert_close(weights.double(), want, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice encountered")
@pytest.mark.parametrize(("experts", "top_k"), [(5, 5), (40, 3), (128, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_strange_logits_and_equal_ones_are_in_torch_order(dtype, experts, top_k):
    """A stable descending sort: NaN first, of either sign, and zeros of both signs equal, the lowest index first."""
    pytest.importorskip("triton")
    rng = torch.Generator().manual_seed(experts)
    logits = torch.tensor(STRANGE)[torch.randint(len(STRANGE), (1, 37, experts), generator=rng)]
    logits[:, ::2] = torch.randint(-2, 3, (1, 19, experts), generator=rng).float()
    logits = logits.to(dtype)
    logits.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[0, 1, -1] = -1  # a NaN of negative sign
    with backend("triton"):
        _, indices, _, counts, _ = route_fwd(logits, None, top_k, "softmax", True, 1.0, 1, 1, 0.0, 0.0, False)
    wanted = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(indices.long(), wanted.indices[..., :top_k])
    assert torch.equal(counts[0], torch.bincount(wanted.indices[..., :top_k].flatten(), minlength=experts).int())


@pytest.mark.parametrize("gathered", [False, True])
def test_rows_that_are_sorted_without_a_gradient_give_none(gathered):
    cfg, tokens, indices = PermuteConfig(3, gathered=gathered), torch.randn(4, 5), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    x = (torch.rand(4, 2), tokens, indices.int()) if gathered else (tokens, indices.int())
    y, kept = permute.fwd(None, x, cfg)
    assert permute.dgrad(kept, (None,) * len(y), cfg) == ((None,) * len(x), None)
