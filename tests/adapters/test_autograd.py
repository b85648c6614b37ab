"""`differentiable`: what autograd expects of a node, and what a node must not do."""

import functools
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from autograd_nodes import LINEAR, kept_bytes, leaves_of
from law_cases import CASES, FIRST
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    CrossEntropyConfig,
    IdentityConfig,
    LinearConfig,
    LinearParams,
    Needs,
    ParallelConfig,
    QLinearConfig,
    RMSNormConfig,
    SoftmaxConfig,
    Step,
    TorchConfig,
    WithExtras,
    activation,
    add,
    chain,
    cross_entropy,
    delayed_wgrad,
    differentiable,
    identity,
    linear,
    op_from_torch,
    parallel,
    qlinear,
    random,
    remat,
    rms_norm,
    softmax,
    with_policy,
)
from funcops.adapters.autograd import delayed, traced
from funcops.adapters.autograd.saved_tensors import slots_of
from funcops.adapters.autograd.traced import run_traced
from funcops.engine.contract.schema import DGRAD, Residuals, Saved, saved
from funcops.engine.errors import StaleResidualError
from funcops.engine.trees import leaves, replace, same_structure, tensors, tree_map, tree_map_tensors
from funcops.library.formats import QTensor, QWeight, dense
from funcops.library.formats.recipes import Fp8Block, Fp8Delayed
from funcops.library.formats.scaled import Scaled
from funcops.low_precision import quantize_params
from funcops.models.blocks import block_config, gpt2_block_config
from funcops.testing.laws import float_like
from funcops.testing.tolerances import assert_close


def made():
    return leaves_of(LINEAR, linear), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


def is_low(node):
    """A quantised tensor is not a leaf of autograd: the gradient belongs to the weight that it was made from."""
    return type(node) in (QTensor, QWeight)


def asking(t):
    if isinstance(t, Scaled):  # amaxes are not gradients: autograd must not add them up
        return replace(t, value=tree_map(asking, t.value, is_leaf=is_low))
    return t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t


@pytest.mark.parametrize("keep", ["col", "input"])
def test_codes_that_a_backward_computes_with_again_are_of_the_weight_as_it_is(keep):
    """A weight that was written to in between is noticed, with autograd and without."""
    cfg = QLinearConfig(8, 8, Fp8Block(keep=keep))
    params, x = qlinear.init(cfg, key=random.key(0)), torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    work, again = quantize_params(params, cfg), remat(qlinear)
    y, residuals = again.fwd(work, x.detach(), cfg)
    given = differentiable(again)(work, x, cfg)
    with torch.no_grad():
        params.weight.add_(1)
    for backward in (lambda: again.bwd(residuals, y, cfg), given.sum().backward):
        with pytest.raises(StaleResidualError, match="params.weight must have the codes of the current weight"):
            backward()


@pytest.mark.turns("case", every=2, each="op")
@pytest.mark.parametrize(("case", "dtype"), [(c, d) for c, d in CASES if d is torch.float64], ids=str)
def test_gradients_equal_the_ops(case, dtype):
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg)
    dy = float_like(y, 3)
    want = case.op.bwd(residuals, dy, case.cfg)
    own, given = tree_map(asking, (params, x), is_leaf=lambda node: is_low(node) or isinstance(node, Scaled))
    got = differentiable(case.op)(own, given, case.cfg)
    assert same_structure(got, y)
    found = zip(leaves(got, is_leaf=is_low), leaves(dy), strict=True)
    pairs = [(a, d) for a, d in found if isinstance(a, torch.Tensor) and a.requires_grad]
    if not pairs:
        return
    torch.autograd.backward([a for a, _ in pairs], [d for _, d in pairs])
    assert_close(dense(got), dense(y), dtype=dtype, length=64)

    def compare(t, w):
        g = getattr(t, "grad", None)
        if w is not None and w.dtype is torch.uint32:
            return None
        if w is not None and g is not None:
            assert_close(g, w, dtype=dtype, length=64)
        assert (g is None or not g.any()) if w is None else g is not None or is_low(t)
        return None

    tree_map(compare, (own, given), want, is_leaf=is_low)


class Unread(torch.autograd.Function):
    """Reads x and has no gradient for it: the node before it runs all the same, without one."""

    @staticmethod
    def forward(ctx, *x):
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx, dy):
        return (None,) * len(ctx.needs_input_grad)


BY_AUTOGRAD = [case for case in FIRST if case.op.name != "quantize"]  # whose y is codes, which have no gradient


@pytest.fixture
def traced_with(monkeypatch):
    """Stands for the tracer: its setting for floats, which need not be imported, and the tensors given to the last node."""
    found = SimpleNamespace(specialize_float=False, given=())
    apply = traced._TracedNode.apply

    def noted(call, *given):
        found.given, found.while_applied = given, found.specialize_float
        return apply(call, *given)

    monkeypatch.setattr(traced._TracedNode, "apply", noted)
    monkeypatch.setattr(delayed, "_compiled", False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", found)
    return found


@pytest.mark.parametrize("case", BY_AUTOGRAD, ids=str)
def test_the_node_that_a_compiler_traces_gives_the_values_and_gradients_of_the_usual_one(case, traced_with):
    """No tensor is given to it twice, and floats are constants until it is made."""

    def by_autograd(run):
        params, x = tree_map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), case.make(torch.float64))
        y = run(params, x, case.cfg)
        able = [t for t in tensors(y) if t.requires_grad]
        torch.autograd.backward(able, [float_like(t, 3) for t in able])
        return y, [t.grad for t in tensors((params, x))]

    y, got = by_autograd(functools.partial(run_traced, case.op))
    want, grads = by_autograd(differentiable(case.op))
    assert same_structure(y, want)
    for a, b in zip([*tensors(y), *got], [*tensors(want), *grads], strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            assert a.requires_grad is b.requires_grad
            torch.testing.assert_close(a.detach(), b.detach())
    assert len({id(t) for t in traced_with.given}) == len(traced_with.given)
    assert traced_with.while_applied is True and traced_with.specialize_float is False


def test_a_traced_node_is_made_only_for_gradients(traced_with):
    params, x = made()
    with torch.no_grad():
        assert not run_traced(linear, params, x, LINEAR).requires_grad
    y = run_traced(linear, tree_map_tensors(torch.Tensor.detach, params), x.detach(), LINEAR)
    assert y.grad_fn is None and not traced_with.given and not delayed._compiled
    y = run_traced(linear, params, x.detach(), LINEAR)
    assert y.requires_grad and traced_with.given and delayed._compiled


def test_a_traced_node_is_given_each_tensor_once(traced_with):
    """An output that is the input, and a leaf that is given twice, go in as copies, which get gradients of their own."""
    x = torch.randn(3, requires_grad=True)
    y = run_traced(identity, None, x, IdentityConfig())
    (y * 2).sum().backward()
    assert torch.equal(y, x) and y is not x and torch.equal(x.grad, torch.full((3,), 2.0)) and len(traced_with.given) == 2
    x.grad = None
    run_traced(add, None, (x, x), AddConfig()).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert len({id(t) for t in traced_with.given}) == len(traced_with.given) == 3


def test_a_traced_node_whose_outputs_get_no_gradient_gives_none(traced_with):
    """An output that nobody reads has no gradient either, and a config's params whose branch has none get none."""
    params, x = made()
    y = run_traced(linear, params, x, LINEAR)
    Unread.apply(y).backward()
    assert x.grad is None and params.weight.grad is None
    cfg = ParallelConfig(branches=tuple(Step(n, linear, LINEAR) for n in "ab"))
    both = leaves_of(cfg, parallel)
    run_traced(parallel, both, x, cfg)[0].sum().backward()
    assert both["a"].weight.grad is not None and both["b"].weight.grad is None
    torch.testing.assert_close(x.grad, both["a"].weight.detach().sum(0).expand(5, 4))


def test_an_output_of_a_traced_node_may_be_written_to(traced_with):
    """It is a copy, which a compiler removes, of the y that a softmax keeps."""
    x = torch.randn(3, 4, requires_grad=True)
    y = run_traced(softmax, None, x, SoftmaxConfig())
    (y.mul_(2) ** 2).sum().backward()
    want = x.detach().clone().requires_grad_()
    ((2 * want.softmax(-1)) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, want.grad)


def test_a_traced_node_is_not_differentiated_twice(traced_with):
    params, x = made()
    (dx,) = torch.autograd.grad(run_traced(linear, params, x, LINEAR).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function that was marked with @once_differentiable"):
        dx.sum().backward()


def test_the_setting_for_floats_is_that_before_the_node_also_after_an_error(traced_with):
    """After an error in a node they stay constants until the next node."""
    params, x = made()
    for before in (True, False):
        traced_with.specialize_float = before
        run_traced(linear, params, x, LINEAR)
        assert traced_with.specialize_float is before
    with pytest.raises(ValueError, match=r"^linear_fwd: x must be"):
        run_traced(linear, params, x[:, 1:], LINEAR)
    assert traced_with.specialize_float is True
    run_traced(linear, params, x, LINEAR)
    assert traced_with.specialize_float is False


def test_a_traced_op_refuses_delayed_weight_gradients(traced_with):
    params, x = made()
    with delayed_wgrad(), pytest.raises(RuntimeError, match=r"must run outside of torch\.compile, got a compiled one$"):
        run_traced(linear, params, x, LINEAR)
    assert not delayed._compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_a_write_to_a_leaf_that_a_traced_node_keeps_is_seen_by_its_guard(dtype):
    """A leaf of any dtype and dimension has an empty guard; one that the node does not keep has none."""
    other = torch.ones(2, requires_grad=True)
    for kept in (torch.zeros((), dtype=dtype), torch.zeros(2, 3, dtype=dtype)):
        (guard,) = traced._guards([other, kept], [kept])
        assert guard.shape == (0,) and guard.requires_grad
        guard.sum().backward(retain_graph=True)
        kept.fill_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            guard.sum().backward()


def test_a_node_whose_outputs_get_no_gradient_gives_none():
    """The first case of each operator, its x a leaf and the output of another node; torch's own nodes give None or zeros."""
    first = {case.op.name: case for case, dtype in reversed(CASES) if dtype is torch.float64}
    silu = ActivationConfig(kind="silu")
    for name, case in first.items():
        own, x = tree_map(asking, case.make(torch.float64), is_leaf=lambda node: is_low(node) or isinstance(node, Scaled))
        for given in (x, differentiable(activation)(None, x, silu)) if torch.is_tensor(x) and x.requires_grad else (x,):
            y = differentiable(case.op)(own, given, case.cfg)
            asked = [t for t in tensors(y) if t.requires_grad]
            if asked:
                Unread.apply(*asked).backward()
            assert not any(t.grad.any() for t in tensors((own, x)) if t.grad is not None), name
    assert len(first) > 40


@pytest.mark.parametrize("asks", [False, True])
def test_amaxes_are_not_added_up(asks):
    cfg = QLinearConfig(in_features=16, out_features=8, recipe=Fp8Delayed())
    weight = Scaled(torch.randn(8, 16, requires_grad=True), torch.ones(3, requires_grad=asks), None)
    params, x = LinearParams(weight, torch.zeros(8)), torch.randn(4, 16)
    if asks:
        with pytest.raises(ValueError, match="qlinear_fwd: params.weight.scale must be without requires_grad"):
            differentiable(qlinear)(params, x, cfg)
    else:
        differentiable(qlinear)(params, x, cfg).sum().backward()
        assert weight.value.grad is not None and weight.scale.grad is None


def test_frozen_weights_keep_no_input_and_a_constant_x_computes_no_dgrad():
    params, x = made()
    params.weight.requires_grad_(False)
    y, seen = kept_bytes(lambda: differentiable(linear)(params, x, LINEAR))
    assert x.untyped_storage()._cdata not in seen and params.weight.untyped_storage()._cdata in seen
    y.sum().backward()
    assert params.weight.grad is None and params.bias.grad is not None and x.grad is not None
    params, x = made()
    y, seen = kept_bytes(lambda: differentiable(linear)(params, x.detach(), LINEAR))
    assert params.weight.untyped_storage()._cdata not in seen
    y.sum().backward()
    assert params.weight.grad is not None


def test_partial_masks_inside_a_chain():
    """LoRA's case: one small factor is trained, inside a chain of frozen layers."""
    steps = tuple(Step(n, linear, LinearConfig(4, 4, bias=False)) for n in "abc")
    cfg = ChainConfig(steps=steps)
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    params["b"].weight.requires_grad_()
    x = torch.randn(2, 4, dtype=torch.float64)
    y, seen = kept_bytes(lambda: differentiable(chain)(params, x, cfg))
    assert x.untyped_storage()._cdata not in seen, "nothing before the trained layer is kept"
    y.sum().backward()
    w = params["b"].weight.detach().clone().requires_grad_()
    (x @ params["a"].weight.T @ w.T @ params["c"].weight.T).sum().backward()
    torch.testing.assert_close(params["b"].weight.grad, w.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(mode):
    params, x = made()
    with mode():
        hidden = F.relu(x)
        y, seen = kept_bytes(lambda: differentiable(linear)(params, hidden, LINEAR))
        assert y.grad_fn is None and not y.requires_grad and not hidden.requires_grad and not seen
    frozen = tree_map_tensors(torch.Tensor.detach, params)
    y = differentiable(linear)(frozen, x.detach(), LINEAR)
    assert y.grad_fn is None and not y.requires_grad


def test_an_output_that_is_the_input():
    x = torch.randn(3, requires_grad=True)
    y = differentiable(identity)(None, x, IdentityConfig())
    (y * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(y, x) and y is not x


def test_integer_inputs_and_losses():
    logits, labels = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (6,))
    differentiable(cross_entropy)(None, (logits, labels), CrossEntropyConfig()).backward()
    want = logits.detach().clone().requires_grad_()
    F.cross_entropy(want, labels).backward()
    torch.testing.assert_close(logits.grad, want.grad)


def test_unused_outputs_are_zero():
    cfg = ParallelConfig(branches=tuple(Step(n, linear, LINEAR) for n in "ab"))
    params, x = leaves_of(cfg, parallel), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    a, _ = differentiable(parallel)(params, x, cfg)
    a.sum().backward()
    assert params["a"].weight.grad is not None and params["b"].weight.grad is None
    torch.testing.assert_close(x.grad, params["a"].weight.detach().sum(0).expand(2, 4))


def test_a_graph_that_is_kept_runs_again_and_one_that_is_not_does_not():
    params, x = made()
    y = differentiable(linear)(params, x, LINEAR).square().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_grad_of_a_subset():
    params, x = made()
    y = differentiable(linear)(params, x, LINEAR).sum()
    (only,) = torch.autograd.grad(y, [params.bias])
    assert torch.equal(only, torch.full((3,), 5.0, dtype=torch.float64)) and params.weight.grad is None and x.grad is None


def test_hooks_fire():
    params, x = made()
    seen = []
    x.register_hook(lambda g: seen.append("tensor") or 2 * g)
    params.weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    y = differentiable(linear)(params, x, LINEAR)
    y.register_hook(lambda g: seen.append("y"))
    y.sum().backward()
    assert sorted(map(str, seen)) == ["(3, 4)", "tensor", "y"]
    torch.testing.assert_close(x.grad, 2 * params.weight.detach().sum(0).expand(5, 4))


@pytest.mark.parametrize("policy", ["save_all", "recompute_elementwise", "minimal", "compress_int8"])
@pytest.mark.parametrize("name", ["llama", "gpt-2"])
def test_saved_tensor_hooks_see_every_residual(name, policy):
    """save_on_cpu unpacks other tensors than it packed: nothing may depend on their identity."""
    cfg, extra = {
        "llama": (block_config(16, 2, 24), {"positions": torch.arange(5)}),
        "gpt-2": (gpt2_block_config(16, 2, 24, 0.1), {"key": random.key(3)}),
    }[name]
    op = with_policy(chain, policy)
    found = []
    for hooked in (False, True):
        params, data = leaves_of(cfg, chain), torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        data.requires_grad_()
        with save_on_cpu() if hooked else saved_tensors_hooks(lambda t: t, lambda t: t.clone()):
            y = differentiable(op)(params, WithExtras(data, extra), cfg)
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()
        found.append([t.grad for t in (*tensors(params), data)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_non_reentrant_checkpoint():
    cfg = block_config(16, 2, 24)
    params, data = leaves_of(cfg, chain), torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    run = differentiable(chain)

    def body(t):
        return run(params, WithExtras(t, {"positions": torch.arange(5)}), cfg)

    want = torch.autograd.grad(body(data).square().sum(), [data, *tensors(params)])
    y, seen = kept_bytes(lambda: checkpoint(body, data, use_reentrant=False))
    got = torch.autograd.grad(y.square().sum(), [data, *tensors(params)])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_write_to_a_kept_tensor_raises():
    params, x = made()
    y = differentiable(linear)(params, x, LINEAR)
    with torch.no_grad():
        params.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_residuals_leave_with_the_graph():
    params, x = made()
    y = differentiable(chain)({"a": params}, x, ChainConfig(steps=(Step("a", linear, LINEAR),)))
    node = y.grad_fn
    y.sum().backward()
    kept = node.call[2]["a"]
    assert kept.x is None and kept.weight is None


def test_autocast_is_refused():
    params, x = made()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="linear: must run outside of torch.autocast"):
        differentiable(linear)(params, x, LINEAR)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        differentiable(linear)(params, x, LINEAR)


def test_a_backward_inside_autocast_is_as_outside():
    found = []
    for enabled in (False, True):
        params = leaves_of(LINEAR, linear, dtype=torch.float32)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = differentiable(linear)(params, x, LINEAR)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.square().sum().backward()
        found.append((x.grad, params.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_twice_differentiated_raises():
    params, x = made()
    (dx,) = torch.autograd.grad(differentiable(linear)(params, x, LINEAR).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_bwd: a gradient must not be differentiated again"):
        dx.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_functorch_is_refused(transform):
    params, x = made()
    frozen = tree_map_tensors(torch.Tensor.detach, params)
    with pytest.raises(RuntimeError, match="linear: must run outside of torch.func transforms"):
        transform(lambda t: differentiable(linear)(frozen, t, LINEAR).sum())(x.detach())
    compiled = torch.compile(
        torch.func.grad(lambda t: differentiable(linear)(frozen, t, LINEAR).sum()), backend="eager", fullgraph=True
    )
    if transform is torch.func.grad:
        with pytest.raises(Exception, match="maybe_current_level"):
            compiled(x.detach())


def test_threads():
    cfg = ChainConfig(steps=(Step("n", rms_norm, RMSNormConfig(4)), Step("a", linear, LINEAR)))
    results, errors = {}, []

    def work(seed):
        try:
            params = leaves_of(cfg, chain, seed)
            x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for _ in range(20):
                x.grad = None
                differentiable(chain)(params, x, cfg).square().sum().backward()
            results[seed] = params, x
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and len(results) == 4
    for params, x in results.values():
        t = x.detach().clone().requires_grad_()
        n = F.rms_norm(t, (4,), params["n"].weight.detach(), 1e-6)
        F.linear(n, params["a"].weight.detach(), params["a"].bias.detach()).square().sum().backward()
        torch.testing.assert_close(x.grad, t.grad)


def test_wrong_input_raises_as_the_op_does():
    params, x = made()
    with pytest.raises(ValueError, match=r"linear_fwd: x must be \[..., 4\], got \[5, 3\]"):
        differentiable(linear)(params, x[:, :3], LINEAR)
    with pytest.raises(TypeError, match="differentiable: op must be Op"):
        differentiable(linear.fwd)


def test_needs_follow_requires_grad():
    asked = []
    spy = linear._replace(fwd=lambda p, x, cfg, *, needs: asked.append(needs) or linear.fwd(p, x, cfg, needs=needs))
    params, x = made()
    run = differentiable(spy)
    run(params, x, LINEAR), run(params, x.detach(), LINEAR)
    params.bias.requires_grad_(False)
    run(params, x, LINEAR)
    assert asked == [Needs.ALL, Needs(x=False), Needs(params=["weight"])]
    assert isinstance(params, LinearParams)


def test_outputs_of_any_structure():
    op = op_from_torch(lambda params, x, cfg: {"a": (x * 2, x.sum()), "b": x.argmax()}, name="nested")
    x = torch.randn(3, requires_grad=True)
    y = differentiable(op)(None, x, TorchConfig())
    assert set(y) == {"a", "b"} and not y["b"].requires_grad
    (y["a"][0].sum() + y["a"][1]).backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    weight = torch.nn.Parameter(torch.ones(3))
    assert isinstance(differentiable(identity)(None, weight, IdentityConfig()), torch.Tensor)


def test_a_policy_that_packs_large_inputs_alone():
    cfg = ChainConfig(steps=(Step("a", linear, LinearConfig(64, 64)), Step("b", linear, LinearConfig(64, 64))))
    op = with_policy(chain, "compress_int8")
    params = leaves_of(cfg, chain, dtype=torch.float32)
    for rows in (1, 64, 1, 64):
        x = torch.randn(rows, 64, requires_grad=True)
        differentiable(op)(params, x, cfg).square().sum().backward()
        assert x.grad is not None


def test_residuals_of_plain_tensors_have_slots():
    """The function that fills them is generated from the first residuals; None among their fields needs no filling."""
    empty = 0
    for name, case in {case.op.name: case for case, dtype in reversed(CASES) if dtype is torch.float64}.items():
        params, x = case.make(torch.float64)
        _, residuals = case.op.fwd(params, x, case.cfg)
        kept = [getattr(residuals, field) for field in residuals.fields] if isinstance(residuals, Saved) else [residuals]
        if all(value is None or isinstance(value, torch.Tensor) for value in kept):
            assert slots_of(residuals), name
            empty += None in [value if value is None else 0 for value in kept]
    assert empty > 3


class TreeResiduals(Residuals):
    first: object = saved("{params}", alias="params", needed_by=DGRAD, tree=True)
    second: object = saved("{params}", alias="params", needed_by=DGRAD, tree=True)


@pytest.mark.parametrize("there", [(True, True), (True, False), (False, True)], ids=str)
def test_a_tree_of_tensors_among_residuals_is_put_back_whole(there):
    """An op of one's own may keep its params so, with a bias or without."""
    trees = [LinearParams(*[torch.randn(2) if one else None for one in given]) for given in (there, there[::-1])]
    residuals = TreeResiduals.keep(LinearConfig(2, 2), Needs.ALL, first=trees[0], second=trees[1])
    slots = slots_of(residuals)
    taken = slots.take(residuals)
    assert residuals.first is residuals.second is None and len(taken) == 2 * sum(there)
    slots.fill(residuals, taken)
    for found, want in zip((residuals.first, residuals.second), trees, strict=True):
        assert type(found) is LinearParams and found.weight is want.weight and found.bias is want.bias
