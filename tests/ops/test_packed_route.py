"""The router of packed rows: results and gradients equal the documents' one by one, and padding changes none of them."""

import dataclasses
from random import Random

import pytest
import torch
from cases.route import reference

from funcops import RouteConfig, RouteParams, dist, optim, route
from funcops.adapters.graphs import check_capturable
from funcops.engine.backend import backend
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close


def drawn(seed):
    """A config, and the lengths of documents, empty ones between them, with padding behind them."""
    draw = Random(seed)
    groups = draw.choice([1, 1, 2])
    experts = groups * draw.choice([2, 3, 4])
    top_groups = draw.randint(1, groups)
    cfg = RouteConfig(
        experts,
        draw.randint(1, experts // groups * top_groups),
        score=draw.choice(["softmax", "sigmoid"]),
        normalize=draw.random() < 0.5,
        bias=draw.random() < 0.5,
        scale=draw.choice([1.0, 2.5]),
        groups=groups,
        top_groups=top_groups,
        aux=draw.choice([0.0, 0.3]),
        sequence_wise=draw.random() < 0.5,
        z=draw.choice([0.0, 0.1]),
        capacity=draw.choice([None, 0.4, 1.0, 1.25]),
        packed=True,
    )
    lengths = [draw.choice([0, 1, 2, 5, 9]) for _ in range(draw.randint(0, 5))]
    return cfg, lengths, draw.choice([0, 0, 1, 3, 40])


def given(cfg, lengths, padding, dtype=torch.float64, seed=0):
    """params, x and dy; the logits of a row are different multiples of 1/16, which every dtype holds."""
    rng, total = torch.Generator().manual_seed(seed), sum(lengths) + padding
    logits = torch.stack([torch.randperm(64, generator=rng)[: cfg.experts] for _ in range(total)] or [torch.zeros(0, cfg.experts)])
    logits = ((logits - 32) / 16).to(dtype)[:total].view(1, total, cfg.experts)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    bias = torch.randperm(cfg.experts, generator=rng).to(dtype) / 64 + 1 / 128 if cfg.bias else None
    dy = torch.randn(1, total, cfg.top_k, generator=rng, dtype=dtype), torch.randn((), generator=rng, dtype=dtype)
    return RouteParams(bias), (logits, ends), dy


def documents_one_by_one(params, x, dy, cfg):
    logits = x[0].detach().requires_grad_()
    y = reference(params, (logits, x[1]), cfg)
    (dx,) = torch.autograd.grad((y[0] * dy[0]).sum() + y[3] * dy[1], logits, allow_unused=True)
    return [t.detach() for t in y], torch.zeros_like(logits) if dx is None else dx


def ours(params, x, dy, cfg):
    y, kept = route.fwd(params, x, cfg)
    _, (dx, none) = route.bwd(kept, (dy[0], None, None, dy[1]), cfg)
    assert none is None
    return y, dx


@pytest.mark.parametrize("seed", [s if s < 40 else pytest.param(s, marks=pytest.mark.slow) for s in range(400)])
def test_a_packed_row_equals_its_documents_one_by_one(seed):
    cfg, lengths, padding = drawn(seed)
    params, x, dy = given(cfg, lengths, padding, seed=seed)
    (want, dwant), (y, dx) = documents_one_by_one(params, x, dy, cfg), ours(params, x, dy, cfg)
    assert_close((y, dx), (tuple(want), dwant), dtype=torch.float64)
    if cfg.bias:
        moved = optim.balance(params.bias, y[2], 0.1)
        assert torch.equal(moved, optim.balance(params.bias, want[2], 0.1))


@pytest.mark.parametrize("seed", [s if s < 1006 else pytest.param(s, marks=pytest.mark.slow) for s in range(1000, 1120)])
def test_a_packed_row_by_triton_equals_its_documents_one_by_one(seed):
    pytest.importorskip("triton")
    cfg, lengths, padding = drawn(seed)
    params, x, dy = given(cfg, lengths, padding, dtype=torch.float32, seed=seed)
    wide = RouteParams(None if params.bias is None else params.bias.double()), (x[0].double(), x[1]), [t.double() for t in dy]
    want, dwant = documents_one_by_one(*wide, cfg)
    with backend("triton"):
        y, dx = ours(params, x, dy, cfg)
    assert torch.equal(y[1], want[1]) and torch.equal(y[2], want[2])
    assert_close((y[0], y[3], dx), (want[0].float(), want[3].float(), dwant.float()), dtype=torch.float32)


@pytest.mark.parametrize("seed", [s if s < 12 else pytest.param(s, marks=pytest.mark.slow) for s in range(60)])
def test_padding_and_what_it_holds_change_no_bit(seed):
    """The bits of a token, the load and the losses, for padding of another content, NaN and infinity too."""
    cfg, lengths, _ = drawn(seed)
    params, (logits, ends), dy = given(cfg, lengths, 6, seed=seed)
    total, other = sum(lengths), logits.clone()
    other[:, total:] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e4, 0.0, -3.0], dtype=logits.dtype)[:, None]
    dother = torch.cat((dy[0][:, :total], torch.full_like(dy[0][:, total:], 7.0)), 1)
    one, two = ours(params, (logits, ends), dy, cfg), ours(params, (other, ends), (dother, dy[1]), cfg)
    same_bits(one[0], two[0], "y")
    same_bits(one[1][:, :total], two[1][:, :total], "dx")
    assert not one[0][0][:, total:].any() and (one[0][1][:, total:] == cfg.experts).all() and not one[1][:, total:].any()


@pytest.mark.parametrize("seed", range(3))
def test_a_packed_row_waits_for_no_device(seed):
    cfg, lengths, padding = drawn(seed)
    params, x, dy = given(cfg, [*lengths, 3], padding, dtype=torch.float32)
    assert check_capturable(lambda params, x, dy: ours(params, x, dy, cfg), params, x, dy) == []


def test_the_ranks_of_a_context_find_their_documents():
    """Over an axis that shares out tokens in zigzag order, the loads of all ranks add up to the whole row's."""
    cfg = RouteConfig(4, 2, bias=True, score="sigmoid", packed=True)
    params, (logits, ends), dy = given(cfg, [3, 0, 6, 2], 5)
    whole, dwhole = ours(params, (logits, ends), dy, cfg)
    loads = []
    for rank in range(4):
        axis = dist.Mesh.abstract({"cp": 4}, rank)["cp"]
        own = dataclasses.replace(cfg, shared=(dist.Shared(1, axis, zigzag=True),))
        y, dx = ours(params, (dist.zigzag(logits, axis), ends), (dist.zigzag(dy[0], axis), dy[1]), own)
        for got, want in ((y[0], whole[0]), (y[1], whole[1]), (dx, dwhole)):
            assert torch.equal(got, dist.zigzag(want, axis))
        loads.append(y[2])
    assert torch.equal(sum(loads), whole[2])
