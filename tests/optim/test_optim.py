"""Optimisers against torch.optim, bit for bit where the same fused op runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle

import pytest
import torch
from optim_model import ADAMW, OPTIMISERS, close, equal, gradients, missing, model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.engine.errors import GradModeError
from funcops.engine.trees import leaves, nothing_like, paths, tensors, tree_map, tree_map_tensors
from funcops.optim import (
    AdamWConfig,
    AdamWState,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    decay_mask,
    sgd_init,
    sgd_update,
)


def torch_optimiser(ps, cfg):
    if isinstance(cfg, AdamWConfig):
        return torch.optim.AdamW(ps, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)
    return torch.optim.SGD(ps, lr=cfg.lr, momentum=cfg.momentum, nesterov=cfg.nesterov, weight_decay=cfg.weight_decay, fused=True)


EQUAL = [  # but for torch's fused SGD of 16 bits, which on the CPU leaves params of 16 elements or more as they are
    (*optimiser, dtype)
    for optimiser, dtype in itertools.product(OPTIMISERS, (torch.float64, torch.float32, torch.bfloat16))
    if dtype is not torch.bfloat16 or not isinstance(optimiser[2], SGDConfig)
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("init", "update", "cfg", "dtype"), EQUAL)
def test_twenty_steps_equal_torch(init, update, cfg, dtype, in_place):
    params = model(dtype)
    ps = [torch.nn.Parameter(p.clone()) for p in tensors(params)]
    theirs = torch_optimiser(ps, cfg)
    state = init(params, cfg)
    for step in range(20):
        grads = gradients(params, step)
        for i, (p, g) in enumerate(zip(ps, tensors(grads), strict=True)):
            p.grad = None if i == 1 and step % 3 == 1 else g.clone()  # one gradient is absent now and then
        if step % 3 == 1:
            grads = missing(grads, 1)
        theirs.step()
        params, state = update(params, grads, state, cfg, in_place=in_place)
    assert all(torch.equal(a, b) for a, b in zip(tensors(params), ps, strict=True))


@pytest.mark.turns("dtype", "traced", every=3)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_two_steps_are_float64s_rounded(init, update, cfg, dtype, traced):
    """At each size, as vector loops have tails: torch.optim's own loop in float64, of what the first step rounded."""
    g = torch.Generator().manual_seed(0)
    params = {str(n): torch.randn(n, generator=g).to(dtype) for n in (1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 1000)}
    exact = [torch.nn.Parameter(p.double()) for p in params.values()]
    theirs = torch_optimiser(exact, cfg)
    theirs.param_groups[0].update(fused=False, foreach=False)
    state = init(params, cfg)
    for step in range(2):
        grads = gradients(params, step)
        for p, grad in zip(exact, grads.values(), strict=True):
            p.grad = grad.double()
        theirs.step()
        run = make_fx(functools.partial(update, cfg=cfg))(params, grads, state) if traced else functools.partial(update, cfg=cfg)
        params, state = run(params, grads, state)
        for p, want in zip(params.values(), exact, strict=True):
            torch.testing.assert_close(
                p.double(), want.data, rtol=torch.finfo(dtype).eps, atol=2e-6 if step == 0 else 2e-2 * cfg.lr
            )
            want.data.copy_(p)  # what is rounded is not held against the next step


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_pure_leaves_its_arguments_alone_and_in_place_does_not(init, update, cfg):
    params = model()
    state, grads = init(params, cfg), gradients(params, 0)
    before = copy.deepcopy((params, grads, state))
    new_params, new_state = update(params, grads, state, cfg)
    assert equal((params, grads, state), before)
    assert not equal(new_params, params)
    again = update(params, grads, state, cfg)
    assert equal((new_params, new_state), again)
    held = [*leaves(params), *leaves(state)]
    done = update(params, grads, state, cfg, in_place=True)
    assert done[0] is params and done[1] is state
    assert all(a is b for a, b in zip(held, [*leaves(params), *leaves(state)], strict=True))
    assert equal(done, again) and equal(grads, before[1])


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_bfloat16_gradients_of_float32_master_weights(init, update, cfg):
    params = model()
    state, grads = init(params, cfg), gradients(params, 0, torch.bfloat16)
    wide = tree_map_tensors(lambda g: g.float(), grads)
    assert equal(update(params, grads, state, cfg), update(params, wide, state, cfg))


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_strides_do_not_matter(init, update, cfg):
    params = {"a": torch.randn(4, 3), "b": torch.randn(2, 5)}
    grads = {"a": torch.randn(4, 3), "b": torch.randn(2, 5)}
    turned = tree_map(lambda g: g.t().contiguous().t(), grads)
    expected = update(params, grads, init(params, cfg), cfg)
    assert equal(update(params, turned, init(params, cfg), cfg), expected)
    sliced = tree_map(lambda p: torch.cat([p, p], 1)[:, : p.shape[1]], params)
    close(update(sliced, turned, init(sliced, cfg), cfg), expected)
    turned_params = tree_map(lambda p: p.t().contiguous().t(), params)
    close(update(turned_params, grads, init(turned_params, cfg), cfg, in_place=True), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiler_gets_three_operators_for_any_number_of_params(in_place):
    """The norm, the clipping and the update: of each tensor only copies, and views of its count."""

    def step(params, grads, state):
        grads, norm = clip_by_global_norm(grads, 1.0)
        return adamw_update(params, grads, state, AdamWConfig(), in_place=in_place)

    for n in (1, 7):
        params = [torch.ones(2, 3) for _ in range(n)]
        traced = make_fx(step)(params, params, adamw_init(params, AdamWConfig()))
        names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
        ours = [name for name in names if name.startswith("funcops")]
        update = "funcops.adamw_.default" if in_place else "funcops.adamw_new.default"
        assert ours == ["funcops.global_norm.default", "funcops.clipped.default", update]
        views = {"<built-in function getitem>", "aten.select.int", "aten.unbind.int", "aten.clone.default", "aten.copy_.default"}
        assert set(names) - set(ours) <= {*views, "aten.add_.Tensor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimiser", "in_place"),
    [(OPTIMISERS[0], False)] + [pytest.param(OPTIMISERS[i], i < 2, marks=pytest.mark.slow) for i in (0, 1, 3)],
    ids=["adamw-False", "adamw-True", "sgd-True", "nesterov-False"],
)
def test_compiles_whole(optimiser, in_place):
    (init, update, cfg), params = optimiser, {name: part for name, part in model().items() if name != "blocks"}
    mask = decay_mask(params)

    def step(params, grads, state, lr):
        grads, norm = clip_by_global_norm(grads, 1.0)
        return *update(params, grads, state, cfg, lr=lr, decay=mask, in_place=in_place), norm

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    state = init(params, cfg)
    ours, theirs = copy.deepcopy((params, state)), (params, state)
    for i in range(3):
        grads, lr = missing(gradients(params, i), 1), torch.tensor(0.01 * (i + 1))
        *ours, norm = step(ours[0], grads, ours[1], lr)
        *theirs, norm2 = compiled(theirs[0], grads, theirs[1], lr)
        close(ours, theirs)
        close(norm, norm2)


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_decay_only_where_the_mask_says(init, update, cfg):
    params = model()
    mask = decay_mask(params)
    assert {k for k, v in paths(mask).items() if not v} == {
        "norm.weight",
        "norm.bias",
        "blocks.0.up.bias",
        "blocks.1.up.bias",
        "head.bias",
    }
    ps = dict(zip([k for k, p in paths(params).items() if p is not None], tensors(params), strict=True))
    ps = {k: torch.nn.Parameter(p.clone()) for k, p in ps.items()}
    flags = paths(mask)
    theirs = torch_optimiser(
        [
            {"params": [p for k, p in ps.items() if flags[k]]},
            {"params": [p for k, p in ps.items() if not flags[k]], "weight_decay": 0.0},
        ],
        cfg,
    )
    state = init(params, cfg)
    for step in range(3):
        grads = gradients(params, step)
        for p, g in zip(ps.values(), tensors(grads), strict=True):
            p.grad = g
        theirs.step()
        params, state = update(params, grads, state, cfg, decay=mask)
    assert all(torch.equal(a, b) for a, b in zip(tensors(params), ps.values(), strict=True))


def test_lr_overrides_as_a_number_or_a_tensor():
    params = model()
    state, grads = adamw_init(params, ADAMW), gradients(params, 0)
    expected = adamw_update(params, grads, state, AdamWConfig(lr=0.25, weight_decay=0.1))
    assert equal(adamw_update(params, grads, state, ADAMW, lr=0.25), expected)
    assert equal(adamw_update(params, grads, state, ADAMW, lr=torch.tensor(0.25)), expected)


def test_absent_gradients_skip_the_leaf():
    params = model()
    state = adamw_init(params, ADAMW)
    grads = nothing_like(params)
    new, new_state = adamw_update(params, grads, state, ADAMW)
    assert all(a is b for a, b in zip(leaves(new), leaves(params), strict=True))
    assert equal(new_state, state)
    new, new_state = adamw_update(params, missing(gradients(params, 0), 1), state, ADAMW)
    assert new_state.step.tolist() == [1.0, 0.0, *[1.0] * (len(tensors(params)) - 2)]


def test_leaves_of_autograd():
    params = {"w": torch.ones(3, requires_grad=True)}
    grads = {"w": torch.ones(3)}
    state = adamw_init(params, ADAMW)
    with pytest.raises(GradModeError, match="adamw_update: params must be tensors that do not require grad"):
        adamw_update(params, grads, state, ADAMW)
    adamw_update(params, grads, state, ADAMW, in_place=True)
    assert params["w"].requires_grad and params["w"].is_leaf
    assert not state.exp_avg["w"].requires_grad


def test_a_bare_tensor_is_a_tree():
    p, state = adamw_update(torch.ones(2), torch.ones(2), adamw_init(torch.ones(2), ADAMW), ADAMW)
    assert p.shape == (2,) and state.exp_avg.shape == (2,)


def test_state_pickles():
    params = model()
    _, state = adamw_update(params, gradients(params, 0), adamw_init(params, ADAMW), ADAMW)
    assert equal(pickle.loads(pickle.dumps(state)), state)
    adamw_update(params, gradients(params, 1), state, ADAMW, in_place=True)
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        ours = adamw_update(copy.deepcopy(params), gradients(params, 2), copied, ADAMW, in_place=True)
        assert equal(ours, adamw_update(params, gradients(params, 2), state, ADAMW))


LAYOUTS_OF_A_MATRIX = {
    "rows": lambda t: t.clone(memory_format=torch.contiguous_format),
    "columns": lambda t: t.mT.clone(memory_format=torch.contiguous_format).mT,
    "spread": lambda t: torch.stack((t, t), -1)[..., 0],
    "sliced": lambda t: torch.cat((t, t), -1)[:, : t.shape[1]],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("init", "update", "cfg"), [*OPTIMISERS, (adamw_init, adamw_update, AdamWConfig(betas=(0.9, 0.99999)))])
def test_an_update_does_not_depend_on_strides(init, update, cfg, in_place, dtype):
    """Bit for bit, with any layout of params, gradients and means, one of them or all."""
    g = torch.Generator().manual_seed(0)
    p, *grads = (torch.randn(5, 3, generator=g, dtype=torch.float64).to(dtype) for _ in range(4))

    def steps(of_params, of_grads, of_means):
        params = {"w": of_params(p), "b": p[0].clone()}
        state = tree_map_tensors(lambda t: of_means(t) if t.dim() == 2 else t, init(params, cfg))
        for grad in grads:
            params, state = update(params, {"w": of_grads(grad), "b": grad[0].clone()}, state, cfg, in_place=in_place)
        return params, state

    rows = LAYOUTS_OF_A_MATRIX["rows"]
    want = steps(rows, rows, rows)
    for layout in LAYOUTS_OF_A_MATRIX.values():
        for ways in ((layout, rows, rows), (rows, layout, rows), (rows, rows, layout), (layout,) * 3):
            assert equal(steps(*ways), want)


@pytest.mark.turns("betas", "traced")
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.999, 0.99999), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_bias_corrections_are_exact(betas, traced):
    """In float64 against Python's own, at the first steps and at late ones: float32 has only three digits of 1 - 0.99999."""
    cfg, p = AdamWConfig(lr=0.1, betas=betas, eps=0.0, weight_decay=0.0), torch.ones(2, dtype=torch.float64)
    update = torch.compile(adamw_update, fullgraph=True, backend="aot_eager") if traced else adamw_update
    for t in (1, 2, 1000):
        state = AdamWState(torch.tensor([t - 1.0]), torch.full_like(p, 0.5), torch.full_like(p, 0.25))
        new, _ = update(p, torch.full_like(p, 2.0), state, cfg)
        m, v = betas[0] * 0.5 + (1 - betas[0]) * 2.0, betas[1] * 0.25 + (1 - betas[1]) * 4.0
        want = 1 - 0.1 * (m / (1 - betas[0] ** t)) / (v / (1 - betas[1] ** t)) ** 0.5
        torch.testing.assert_close(new, torch.full_like(p, want), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_count_that_was_exchanged_is_the_one_that_counts(sparse):
    """Views of the counts are kept between updates in place."""
    cfg, g = AdamWConfig(), {"a": torch.ones(3), "b": None if sparse else torch.ones(2)}
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    state = adamw_init(params, cfg)
    adamw_update(params, g, state, cfg, in_place=True)
    state.step = torch.full((2,), 10.0)
    want, after = adamw_update(params, g, AdamWState(state.step.clone(), state.exp_avg, state.exp_avg_sq), cfg)
    adamw_update(params, g, state, cfg, in_place=True)
    assert torch.equal(state.step, after.step) and torch.equal(params["a"], want["a"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_strided_momentum_equals_dense(nesterov):
    cfg = SGDConfig(lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    torch.manual_seed(0)
    dense, g = {"w": torch.randn(4, 3, dtype=torch.float64)}, {"w": torch.randn(4, 3, dtype=torch.float64)}
    strided = {"w": dense["w"].t().contiguous().t()}
    states = [sgd_init(dense, cfg), sgd_init(strided, cfg)]
    for _ in range(3):
        (dense, states[0]), (strided, states[1]) = sgd_update(dense, g, states[0], cfg), sgd_update(strided, g, states[1], cfg)
    torch.testing.assert_close(dense["w"], strided["w"])


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_a_trace_is_the_update_that_runs(init, update, cfg):
    """A tracer gets other operators than the fused ones: the same numbers, with a decay mask and means that are not zero."""
    g = torch.Generator().manual_seed(3)
    params, first, grads = ({"a": torch.randn(4, 3, generator=g), "b": torch.randn(5, generator=g)} for _ in range(3))
    cfg, decay = dataclasses.replace(cfg, weight_decay=0.3), {"a": True, "b": False}
    params, state = update(params, first, init(params, cfg), cfg, decay=decay)
    traced = make_fx(lambda *trees: update(*trees, cfg, decay=decay))(params, grads, state)
    close(traced(params, grads, state), update(params, grads, state, cfg, decay=decay))


def test_an_update_in_place_that_was_traced_leaves_no_tensor_of_the_tracer_in_the_state():
    params, grads = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    state = adamw_init(params, ADAMW)
    with FakeTensorMode(allow_non_fake_inputs=True):
        adamw_update(params, grads, state, ADAMW, in_place=True)
    want = adamw_update(params, grads, AdamWState(state.step.clone(), state.exp_avg, state.exp_avg_sq), ADAMW)
    adamw_update(params, grads, state, ADAMW, in_place=True)
    assert equal((params, state), want)
