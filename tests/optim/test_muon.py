"""Muon against torch.optim.Muon, and in float64 against the polynomial of the singular values."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from optim_model import close, equal, gradients, missing, model
from torch.fx.experimental.proxy_tensor import make_fx

import funcops.optim.muon as muon
from funcops.engine.errors import GradModeError
from funcops.engine.trees import leaves, paths, tensors, tree_map, tree_map_tensors
from funcops.optim import (
    NO_MATRIX,
    AdamWConfig,
    MuonConfig,
    MuonState,
    adamw_init,
    adamw_update,
    combine,
    decay_mask,
    matrix_mask,
    muon_init,
    muon_update,
    partition,
)

CONFIGS = [
    MuonConfig(lr=0.05),
    MuonConfig(lr=0.05, momentum=0.5, nesterov=False, weight_decay=0.0),
    MuonConfig(lr=0.05, adjust_lr_fn="match_rms_adamw"),
    MuonConfig(lr=0.05, momentum=0.0, ns_steps=2, ns_coefficients=(2.0, -1.5, 0.5), eps=1e-3),
]
SHAPES = (5, 3), (3, 5), (4, 4), (1, 6), (6, 1), (17, 40)


def matrices(dtype=torch.float32, shapes=SHAPES):
    g = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_ten_steps_equal_torch(cfg, dtype, in_place):
    """To the rounding of bfloat16 products, whose sums torch adds in another order for a stack. Without nesterov torch divides the
    momentum of bfloat16 params by its norm, in place."""
    if dtype is torch.bfloat16 and not cfg.nesterov:
        cfg = dataclasses.replace(cfg, nesterov=True)
    params = matrices(dtype)
    ps = [torch.nn.Parameter(p.clone()) for p in tensors(params)]
    given = {name: getattr(cfg, name) for name in ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")}
    theirs = torch.optim.Muon(ps, lr=cfg.lr, weight_decay=cfg.weight_decay, **given)
    state = muon_init(params, cfg)
    for step in range(10):
        grads = gradients(params, step)
        grads = missing(grads, 1) if step % 3 == 1 else grads
        for p, g in zip(ps, leaves(grads), strict=True):
            p.grad = None if g is None else g.clone()
        theirs.step()
        params, state = muon_update(params, grads, state, cfg, in_place=in_place)
    for ours, p in zip(tensors(params), ps, strict=True):
        moved = 10 * cfg.lr * (0.2 * math.sqrt(max(p.shape)) if cfg.adjust_lr_fn == "match_rms_adamw" else 1.0)
        rounded = 10 * torch.finfo(dtype).eps * float(p.detach().abs().max())
        assert float((ours - p.detach()).abs().max()) <= 0.02 * moved + rounded
    for ours, p in zip(tensors(state), ps, strict=True):
        torch.testing.assert_close(ours, theirs.state[p]["momentum_buffer"])


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_a_step_in_float64_is_the_formula(cfg, shape, lead):
    """Each iteration maps a singular value s to a s + b s^3 + c s^5, and leaves singular vectors as they are."""
    g = torch.Generator().manual_seed(1)
    p, grad, u = (torch.randn(*lead, *shape, generator=g, dtype=torch.float64) for _ in range(3))
    params, state = muon_update(p, grad, MuonState(u), cfg)
    u = cfg.momentum * u + (1 - cfg.momentum) * grad
    given = cfg.momentum * u + (1 - cfg.momentum) * grad if cfg.nesterov else u
    left, s, right = torch.linalg.svd(given, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=cfg.eps)
    a, b, c = cfg.ns_coefficients
    for _ in range(cfg.ns_steps):
        s = a * s + b * s**3 + c * s**5
    m, n = shape
    factor = 0.2 * math.sqrt(max(m, n)) if cfg.adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1.0, m / max(n, 1)))
    want = p * (1 - cfg.lr * cfg.weight_decay) - cfg.lr * factor * (left * s[..., None, :]) @ right
    torch.testing.assert_close(params, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state.momentum, u, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_matrices_of_one_shape_are_updated_as_alone(cfg):
    """So are the matrices of a stack, with a rate that is a tensor, a mask of decay, and gradients of a narrower dtype."""
    params = matrices(torch.float64, [(4, 3), (3, 4), (4, 3), (2, 4, 3), (4, 3)])
    grads = gradients(params, 0)
    flags = {name: name != "w2" for name in params}
    new, state = muon_update(params, grads, muon_init(params, cfg), cfg, decay=flags, lr=torch.tensor(0.1))
    for name, p in params.items():
        one, alone = muon_update(p, grads[name], muon_init(p, cfg), cfg, decay=flags[name], lr=0.1)
        close((new[name], state.momentum[name]), (one, alone.momentum), 1e-8)
    narrow = tree_map_tensors(lambda t: t.bfloat16(), grads)
    wide = tree_map_tensors(lambda t: t.double(), narrow)
    state = muon_init(params, cfg)
    assert equal(muon_update(params, narrow, state, cfg), muon_update(params, wide, state, cfg))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_16_bits_are_rounded_once(cfg, dtype):
    """A decay of one rounding and a step of another lose what is below half a digit of each."""
    params = matrices(dtype)
    grads = gradients(params, 0)
    wide = [tree_map_tensors(torch.Tensor.float, tree) for tree in (params, grads)]
    new, state = muon_update(params, grads, muon_init(params, cfg), cfg)
    exact, after = muon_update(*wide, muon_init(wide[0], cfg), cfg)
    assert equal((new, state), tree_map_tensors(lambda t: t.to(dtype), (exact, after)))


def test_pure_leaves_its_arguments_alone_and_in_place_does_not():
    cfg, params = MuonConfig(), matrices()
    state, grads = muon_init(params, cfg), missing(gradients(params, 0), 2)
    before = copy.deepcopy((params, grads, state))
    new = muon_update(params, grads, state, cfg)
    assert equal((params, grads, state), before) and not equal(new[0], params)
    assert new[0]["w2"] is params["w2"] and new[1].momentum["w2"] is state.momentum["w2"]
    held = [*leaves(params), *leaves(state)]
    done = muon_update(params, grads, state, cfg, in_place=True)
    assert done[0] is params and done[1] is state and equal(done, new)
    assert all(a is b for a, b in zip(held, [*leaves(params), *leaves(state)], strict=True))
    nothing = tree_map(lambda _: None, params)
    assert equal(muon_update(params, nothing, state, cfg), (params, state))


@pytest.mark.parametrize("turned", range(3))
def test_an_update_does_not_depend_on_strides(turned):
    cfg, p = MuonConfig(), torch.randn(5, 3, dtype=torch.float64)
    trees = [p, torch.randn_like(p), torch.randn_like(p)]
    want = muon_update(*trees[:2], MuonState(trees[2]), cfg)
    for layout in (lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), -1)[..., 0]):
        given = [layout(t) if i == turned else t.clone() for i, t in enumerate(trees)]
        close(muon_update(*given[:2], MuonState(given[2]), cfg, in_place=turned != 1), want, 1e-13)


@pytest.mark.slow
def test_a_trace_and_a_compiled_update_are_the_update_that_runs():
    cfg, params = MuonConfig(lr=0.1), matrices(torch.float64, [(4, 3), (3, 4), (4, 3)])
    state, grads = muon_init(params, cfg), missing(gradients(params, 0), 1)
    want = muon_update(params, grads, state, cfg)
    close(make_fx(lambda *trees: muon_update(*trees, cfg))(params, grads, state)(params, grads, state), want, 1e-12)
    compiled = torch.compile(
        lambda *trees: muon_update(*trees, cfg, lr=torch.tensor(0.1, dtype=torch.float64)), fullgraph=True, backend="aot_eager"
    )
    close(compiled(params, grads, state), want, 1e-12)


def test_a_model_is_split_and_joined():
    params = model()
    mask = matrix_mask(params)
    assert {path for path, flag in paths(mask).items() if flag} == {"blocks.0.up.weight", "blocks.1.up.weight", "empty"}
    split, rest = partition(params, mask)
    assert all((a is None) == (not flag) for a, flag in zip(leaves(split), leaves(mask), strict=True))
    assert all(a is b for a, b in zip(leaves(combine(split, rest)), leaves(params), strict=True))
    assert all(a is b for a, b in zip(leaves(combine(rest, split)), leaves(params), strict=True))
    every = matrix_mask(params, ())
    assert {path for path, flag in paths(every).items() if flag} == {
        path for path, p in paths(params).items() if p is not None and p.dim() > 1
    }


def test_two_optimisers_train_a_model():
    """Muon for the matrices, AdamW for the rest: each leaf is what its optimiser alone makes of it."""
    muon, adamw, params = MuonConfig(), AdamWConfig(), model()
    mask, decay = matrix_mask(params), decay_mask(params)
    trees = [partition(tree, mask) for tree in (params, gradients(params, 0), decay)]
    (p, g, d), (p2, g2, d2) = zip(*trees, strict=True)
    new, _ = muon_update(p, g, muon_init(p, muon), muon, decay=d)
    rest, _ = adamw_update(p2, g2, adamw_init(p2, adamw), adamw, decay=d2)
    whole, _ = adamw_update(params, gradients(params, 0), adamw_init(params, adamw), adamw, decay=decay)
    every = zip(*map(leaves, (mask, combine(new, rest), whole, params)), strict=True)
    for flag, made, by_adamw, before in every:
        assert (
            made is None
            or (not flag and torch.equal(made, by_adamw))
            or (flag and (before.numel() == 0 or (made != by_adamw).any()))
        )


VECTOR = {"w": torch.ones(2, 2), "b": torch.ones(2)}
WEIGHT = {"w": torch.ones(2, 2)}
ERRORS = {
    "muon_init: params.b must be a matrix [..., m, n]": (ValueError, lambda: muon_init(VECTOR, MuonConfig())),
    "muon_init: params.w must be a float tensor or None, got int64[2, 2]": (
        TypeError,
        lambda: muon_init({"w": torch.ones(2, 2, dtype=torch.int64)}, MuonConfig()),
    ),
    "muon_init: params.1 must be a tensor of its own": (ValueError, lambda: muon_init((WEIGHT["w"], WEIGHT["w"]), MuonConfig())),
    "muon_init: cfg must be MuonConfig, got AdamWConfig": (TypeError, lambda: muon_init(WEIGHT, AdamWConfig())),
    "muon_update: params.b must be a matrix [..., m, n]": (
        ValueError,
        lambda: muon_update(VECTOR, VECTOR, MuonState(VECTOR), MuonConfig()),
    ),
    "muon_update: grads.w must be [2, 2], got [3, 2]": (
        ValueError,
        lambda: muon_update(WEIGHT, {"w": torch.ones(3, 2)}, MuonState(WEIGHT), MuonConfig()),
    ),
    "muon_update: state.momentum.w must be float32, got float64": (
        TypeError,
        lambda: muon_update(WEIGHT, WEIGHT, MuonState({"w": torch.ones(2, 2).double()}), MuonConfig()),
    ),
    "muon_update: state must be MuonState": (
        TypeError,
        lambda: muon_update(WEIGHT, WEIGHT, adamw_init(WEIGHT, AdamWConfig()), MuonConfig()),
    ),
    "muon_update: params must be tensors that do not require grad": (
        GradModeError,
        lambda: muon_update({"w": torch.ones(2, 2, requires_grad=True)}, WEIGHT, MuonState(WEIGHT), MuonConfig()),
    ),
    "MuonConfig: momentum must be a number in [0, 1), got 1.0": (ValueError, lambda: MuonConfig(momentum=1.0)),
    "MuonConfig: ns_coefficients must be three finite numbers": (ValueError, lambda: MuonConfig(ns_coefficients=(1.0, 2.0))),
    "MuonConfig: ns_steps must be an int from 1 to 99, got 0": (ValueError, lambda: MuonConfig(ns_steps=0)),
    "MuonConfig: adjust_lr_fn must be 'original' or 'match_rms_adamw', got 'none'": (
        ValueError,
        lambda: MuonConfig(adjust_lr_fn="none"),
    ),
    "matrix_mask: exclude must be globs that match paths among b, w, got '*.gamma'": (
        ValueError,
        lambda: matrix_mask(VECTOR, ("*.gamma",)),
    ),
    "matrix_mask: exclude must be a sequence of globs, got '*norm*'": (TypeError, lambda: matrix_mask(VECTOR, NO_MATRIX[2])),
    "partition: mask must be a tree of bools like": (ValueError, lambda: partition(VECTOR, {"w": True})),
    "partition: mask.b must be a bool, got 1": (TypeError, lambda: partition(VECTOR, {"w": True, "b": 1})),
    "combine: second must be a tree like": (ValueError, lambda: combine(VECTOR, WEIGHT)),
    "combine: second.w must be None, as the first tree has this leaf": (
        ValueError,
        lambda: combine(VECTOR, {"w": torch.ones(1), "b": None}),
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_wrong_calls_are_refused_by_name(text):
    error, call = ERRORS[text]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 6, 16), (2, 16, 6), (2, 1, 5)], ids=str)
def test_a_cpu_without_products_of_bfloat16_takes_them_in_float32(shape, monkeypatch):
    """They are of the same numbers, and rounded once, as products of bfloat16 are; a float64 stack stays as it is."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = {}
    for quick in (True, False):
        monkeypatch.setattr(muon, "MULTIPLIES_BFLOAT16", quick)
        found[quick] = muon.orthogonal(x.bfloat16(), MuonConfig())
        assert found[quick].dtype is torch.bfloat16 and muon.orthogonal(x.double(), MuonConfig()).dtype is torch.float64
    torch.testing.assert_close(found[False], found[True], rtol=0, atol=2**-6)  # a few of bfloat16's last places, near 1
