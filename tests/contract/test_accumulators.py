"""`into`: chains of every shape and `batch_wgrads` refuse a wrong accumulator before anything is added."""

import itertools
import re
from random import Random

import pytest
import torch
from tiers import drawn

from funcops import (
    ActivationConfig,
    BiasConfig,
    ChainConfig,
    DonatedError,
    EmbeddingConfig,
    ForkConfig,
    LinearConfig,
    LinearParams,
    ParallelConfig,
    RepeatConfig,
    ReshapeConfig,
    RMSNormConfig,
    SkipConfig,
    StaleResidualError,
    Step,
    WithExtras,
    activation,
    batch_wgrads,
    bias,
    chain,
    donate,
    embedding,
    fork,
    linear,
    linear_bwd,
    linear_fwd,
    parallel,
    random,
    repeat,
    reshape,
    rms_norm,
    skip,
    with_policy,
)
from funcops.engine.backend import backend
from funcops.engine.contract.accumulators import check_apart
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import GradModeError
from funcops.engine.residuals import Compress, Offload, Policy, Recompute
from funcops.engine.trees import cast, flatten, paths, put, tensors, tree_map, tree_map_tensors
from funcops.testing.laws import LAYOUTS
from funcops.testing.tolerances import assert_close

BODY = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(dim=4)),
        Step("up", linear, LinearConfig(4, 6)),
        Step("act", activation, ActivationConfig(kind="silu")),
        Step("down", linear, LinearConfig(6, 4, bias=False)),
        Step("shift", bias, BiasConfig(4)),
    )
)
OPS = {
    "chain": (chain, BODY),
    "repeat": (repeat, RepeatConfig(op=chain, cfg=BODY, times=2)),
    "stacked": (repeat, RepeatConfig(op=chain, cfg=BODY, times=2, stacked=True)),
    "skips": (repeat, RepeatConfig(op=skip, cfg=SkipConfig(chain, BODY), times=2)),
}
FAULTS = {
    "narrow": lambda t: t.bfloat16(),
    "expanded": lambda t: t.new_zeros(()).expand(t.shape),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "missing": lambda t: None,
    "integers": lambda t: t.long(),
}


def run(name, dtype=torch.float32, seed=0):
    op, cfg = OPS[name]
    params = op.init(cfg, key=random.key(0), dtype=dtype)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return op, cfg, params, op.fwd(params, x, cfg)[1], torch.ones(3, 4, dtype=dtype)


def untouched(into):
    return not any(a.any() for a in tensors(into))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPS)
def test_nothing_is_added_before_the_last_accumulator_is_checked(name, fault):
    """A fault at every path, in bwd, wgrad and batch_wgrads."""
    op, cfg, params, residuals, dy = run(name)
    _, pending = op.dgrad(residuals, dy, cfg)
    for path in paths(params):
        zeros = tree_map_tensors(torch.zeros_like, params)
        into = put(zeros, path, FAULTS[fault](paths(zeros)[path])) if paths(params)[path] is not None else None
        for call in (
            lambda into=into: op.bwd(residuals, dy, cfg, into=into),
            lambda into=into: op.wgrad(pending, cfg, into=into),
            lambda into=into: batch_wgrads(op, [pending, pending], cfg, into=into),
        ):
            if into is not None:
                with pytest.raises((ValueError, TypeError, RuntimeError), match="into.* must be .*, got"):
                    call()
                assert untouched(into), path


@pytest.mark.parametrize("name", OPS)
def test_an_accumulator_serves_one_path(name):
    """One tensor at two paths, or shared memory, would mix the gradients of both."""
    op, cfg, params, residuals, dy = run(name)
    room = torch.zeros(1000)
    into = tree_map_tensors(lambda t: room[: t.numel()].view(t.shape), params)
    with pytest.raises(ValueError, match="into.*: into.* must be a tensor of its own, got memory of into|bwd: into"):
        op.bwd(residuals, dy, cfg, into=into)
    assert untouched(into)


def test_parts_of_one_buffer_serve_many_paths():
    """Parts one after the other, or column by column: their address ranges overlap, their elements do not."""
    params, x, cfg = LinearParams(torch.randn(3, 4), torch.randn(3)), torch.randn(5, 4), LinearConfig(4, 3)
    _, residuals = linear_fwd(params, x, cfg)
    want, _ = linear_bwd(residuals, torch.ones(5, 3), cfg)
    room, columns = torch.zeros(15), torch.zeros(3, 5)
    for into in (LinearParams(room[:12].view(3, 4), room[12:]), LinearParams(columns[:, :4], columns[:, 4])):
        got, _ = linear_bwd(residuals, torch.ones(5, 3), cfg, into=into)
        assert_close(got, want, dtype=torch.float32)
    with pytest.raises(ValueError, match="into.bias must be a tensor of its own, got memory of into.weight"):
        linear_bwd(residuals, torch.ones(5, 3), cfg, into=LinearParams(columns[:, :4], columns[:, 3]))


def elements(t):
    """The addresses of the elements of a tensor."""
    offsets = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(t.stride(), t.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return {t.data_ptr() + t.element_size() * n for n in offsets.flatten().tolist()}


@pytest.mark.parametrize("by_numpy", [False, True], ids=["one storage", "a storage each"])
@pytest.mark.parametrize("seed", range(12))
def test_accumulators_in_one_buffer_are_taken_if_they_have_no_element_in_common(seed, by_numpy):
    """Three of any strides; NumPy's memory is in a storage of its own each time that torch takes it."""
    draw, room, taken = Random(seed), torch.zeros(240), 0
    for _ in range(40):
        into = {}
        for name in "abc":
            shape = draw.choice([(3, 4), (2, 2, 3), (12,)])
            strides = draw.choice([(16, 1), (1, 16), (4, 1), (8, 2)]) if len(shape) == 2 else (24, 6, draw.choice((1, 2)))
            strides = (draw.choice((1, 2, 8)),) if len(shape) == 1 else strides
            view = room.as_strided(shape, strides, draw.randrange(100))
            into[name] = torch.from_numpy(view.numpy()) if by_numpy else view
        met = sum(len(elements(t)) for t in into.values()) - len(set().union(*map(elements, into.values())))
        taken += not met
        if met:
            with pytest.raises(ValueError, match=r"^here: into\.[bac] must be a tensor of its own, got memory of into\.[abc]$"):
                check_apart("here", into)
        else:
            check_apart("here", into)
    assert 0 < taken < 40


@pytest.mark.parametrize("policy", [None, Policy({"*.x": Compress("fp8")}), Policy({"*.x": Offload()})], ids=["", "packed", "away"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_accumulators_as_wide_as_their_gradients_are_taken(dtype, policy):
    """Narrower than statistics that are kept, too."""
    _, _, params, _, dy = run("chain", dtype)
    op, cfg = chain if policy is None else with_policy(chain, policy), BODY
    _, residuals = op.fwd(params, torch.ones(3, 4, dtype=dtype), cfg)
    want, _ = op.bwd(residuals, dy, cfg)
    got, _ = op.bwd(residuals, dy, cfg, into=tree_map_tensors(torch.zeros_like, params))
    assert_close(got, want, dtype=dtype)


CALLS = {
    "bwd": lambda op, residuals, dy, cfg, into: op.bwd(residuals, dy, cfg, into=into),
    "wgrad": lambda op, residuals, dy, cfg, into: op.wgrad(op.dgrad(residuals, dy, cfg)[1], cfg, into=into),
    "batch_wgrads": lambda op, residuals, dy, cfg, into: batch_wgrads(op, [op.dgrad(residuals, dy, cfg)[1]], cfg, into=into),
}
TWO = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 4))))
COMPILED = {  # a compiler is slow: small ones
    "chain": (chain, TWO, "bwd"),
    "skip": (skip, SkipConfig(chain, TWO), "bwd"),
    "repeat": (repeat, RepeatConfig(linear, LinearConfig(4, 4), 2), "wgrad"),
    "stacked": (repeat, RepeatConfig(skip, SkipConfig(linear, LinearConfig(4, 4)), 2, stacked=True), "bwd"),
    "parallel": (chain, ChainConfig(steps=(Step("b", parallel, ParallelConfig(branches=TWO.steps[1:])),)), "wgrad"),
    "linear": (linear, LinearConfig(4, 4), "batch_wgrads"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "chain" else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED])
def test_a_compiled_step_adds_and_refuses_as_an_eager_one(name):
    """The compiler warns of nothing, which here is an error: it traces no cache on the way to the shapes of params."""
    (op, cfg, call), x = COMPILED[name], torch.randn(3, 4)
    params = op.init(cfg, key=random.key(0))
    last = list(paths(params))[-1]

    def step(params, x, into):
        y, residuals = op.fwd(params, x, cfg)
        return CALLS[call](op, residuals, y, cfg, into)

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    got, want, wrong = (tree_map_tensors(torch.ones_like, params) for _ in range(3))
    compiled(params, x, got)
    step(params, x, want)
    assert_close(got, want, dtype=torch.float32)
    if name != "chain":  # a compilation more
        wrong = put(wrong, last, torch.ones(7))
        with pytest.raises(ValueError, match=f"into.{last} must be") as said:
            step(params, x, wrong)
        with pytest.raises(Exception, match=re.escape(str(said.value))):
            compiled(params, x, wrong)


@pytest.mark.slow
def test_a_compiled_step_takes_outputs_whose_gradients_are_none():
    """A mixture's router has such outputs: a dict of nothing but None."""
    steps = (Step("fork", fork, ForkConfig(), gives=("copy",)), Step("up", linear, LinearConfig(4, 4)))
    cfg, x = ChainConfig(steps=steps, outputs=("copy",)), torch.randn(3, 4)
    params = chain.init(cfg, key=random.key(0))

    def step(params, x, into):
        y, residuals = chain.fwd(params, x, cfg)
        return chain.bwd(residuals, WithExtras(y.main, {"copy": None}), cfg, into=into)[0]

    got, want = (tree_map_tensors(torch.ones_like, params) for _ in range(2))
    torch.compile(step, fullgraph=True, backend="eager", dynamic=False)(params, x, got)
    step(params, x, want)
    assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_a_stale_part_is_found_before_anything_is_added(name):
    """Whichever weight was written to since the forward."""
    for path in paths(run(name)[2]):
        op, cfg, params, residuals, dy = run(name)
        into = tree_map_tensors(torch.zeros_like, params)
        if paths(params)[path] is None:
            continue
        paths(params)[path].add_(1)
        try:
            op.bwd(residuals, dy, cfg, into=into)
        except StaleResidualError:
            assert untouched(into), path


def test_batch_wgrads_checks_all_pendings_first():
    op, cfg, params, residuals, dy = run("chain")
    good, given = op.dgrad(residuals, dy, cfg)[1], donate(op.dgrad(residuals, dy, cfg)[1])
    spent = donate(op.dgrad(residuals, dy, cfg)[1])
    op.wgrad(spent, cfg)
    other = ChainConfig(steps=BODY.steps, fuse=False)
    stale = op.dgrad(run("chain")[3], dy, cfg)[1]
    stale["up"].dy.add_(1)
    of_other = op.dgrad(op.fwd(params, torch.ones(3, 4), other)[1], dy, other)[1]
    for last in (given, spent, residuals, stale, of_other, cast(good, torch.float64), 3.0):
        into = tree_map(lambda t: None if t is None else torch.zeros_like(t), params)
        before = [given] if last is given else [good]
        with pytest.raises((DonatedError, StaleResidualError, ValueError, TypeError), match="must be"):
            batch_wgrads(op, [good, *before, last], cfg, into=into)
        assert untouched(into)


def branches(*bodies):
    return ParallelConfig(branches=tuple(Step(f"b{i}", op, cfg) for i, (op, cfg) in enumerate(bodies)))


LINEAR = (linear, LinearConfig(4, 6))
HEADS = (chain, ChainConfig(steps=(Step("proj", *LINEAR), Step("heads", reshape, ReshapeConfig((6,), (2, 3))))))
GATED = (chain, ChainConfig(steps=(Step("up", *LINEAR), Step("act", activation, ActivationConfig("silu")))))
MIXED = branches(LINEAR, (chain, BODY), (skip, SkipConfig(chain, BODY)), (bias, BiasConfig(4)), (repeat, OPS["repeat"][1]))
DEEP = branches(LINEAR, (parallel, branches(GATED, (parallel, branches(LINEAR, HEADS)))), (rms_norm, RMSNormConfig(4)))
AFTER = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("all", parallel, DEEP)))
MANY = {
    "parallel": (parallel, MIXED),
    "nested": (parallel, DEEP),
    "after a norm": (chain, AFTER),
    "siblings": (parallel, branches(HEADS, HEADS, HEADS)),
    "gated siblings": (parallel, branches(GATED, LINEAR)),
    "remat": (with_policy(chain, Policy({"all": Recompute()})), AFTER),
    "packed": (with_policy(chain, Policy({"*.x": Compress("bf16")})), AFTER),
    "repeat": OPS["repeat"],
    "stacked": OPS["stacked"],
    "skips": OPS["skips"],
}
BAD = {
    "wider": lambda t: t.new_ones((*t.shape[:-1], t.shape[-1] + 1)),
    "longer": lambda t: torch.cat([t, t]),
    "flat": lambda t: t.flatten(),
    "of another dtype": lambda t: t.double(),
    "of integers": lambda t: t.long(),
    "elsewhere": lambda t: t.to("meta"),
    "no tensor": lambda t: 3.0,
    "that requires grad": lambda t: t.clone().requires_grad_(),
    "deeper": lambda t: (t, t),
}


@pytest.mark.turns("third")
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(("name", "implementation"), drawn(MANY, ["torch", "triton"]))
def test_nothing_is_added_before_the_last_dy_is_checked(name, implementation, third):
    """A fault at every part of dy in turn, residuals given away or not: what is refused changed no accumulator's bits."""
    if implementation == "triton":
        pytest.importorskip("triton")
    op, cfg = MANY[name]
    params = op.init(cfg, key=random.key(0))
    with backend(implementation):
        y, residuals = op.fwd(params, torch.ones(3, 4), cfg)
        dy = tree_map(torch.ones_like, y)
        flat, structure = flatten(dy)
        for i, (what, fault) in list(itertools.product(range(len(flat)), BAD.items()))[third::3]:
            wrong = structure.unflatten([fault(t) if i == at else t for at, t in enumerate(flat)])
            into = tree_map_tensors(torch.ones_like, params)
            kept = residuals if i % 2 else donate(op.fwd(params, torch.ones(3, 4), cfg)[1])
            with pytest.raises((ValueError, TypeError, GradModeError), match="must be .*, got"):
                op.bwd(kept, wrong, cfg, into=into)
            assert all((t == 1).all() for t in tensors(into)), f"{what} at part {i} of dy"
        op.bwd(residuals, dy, cfg, into=into)  # and a good one is taken
        assert not all((t == 1).all() for t in tensors(into))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_adds_to_accumulators_of_any_strides(layout):
    """Its kernel writes only to contiguous ones."""
    pytest.importorskip("triton")
    params, x, cfg = LinearParams(torch.randn(6, 4), torch.randn(6)), torch.randn(5, 4), LinearConfig(4, 6)
    _, residuals = linear_fwd(params, x, cfg)
    dy = torch.randn(5, 6)
    want = tree_map_tensors(lambda g: g + 1, linear_bwd(residuals, dy, cfg)[0])
    into = tree_map_tensors(lambda p: LAYOUTS[layout](torch.ones_like(p)), params)
    with backend("triton"):
        got, _ = linear_bwd(residuals, dy, cfg, into=into)
    assert got is into
    assert_close(got, want, dtype=torch.float32)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulators_as_narrow_as_their_gradients_get_them_rounded_once(dtype, implementation):
    """The sums of many rows are wide whatever they go to: into zeros of 16 bits they are the gradient itself."""
    generator = torch.Generator().manual_seed(0)
    ids, x, dy = (
        torch.randint(3, (600,), generator=generator),
        torch.randn(600, 8, generator=generator),
        torch.randn(600, 8, generator=generator),
    )
    for op, cfg, given in ((embedding, EmbeddingConfig(5, 8), ids), (linear, LinearConfig(8, 8), x.to(dtype))):
        params = op.init(cfg, key=random.key(0), dtype=dtype)
        with backend(implementation):
            kept = op.fwd(params, given, cfg, needs=Needs(x=False))[1]
            want, _ = op.bwd(kept, dy.to(dtype), cfg)
            got, _ = op.bwd(kept, dy.to(dtype), cfg, into=tree_map(torch.zeros_like, want))
            wide, _ = op.bwd(
                kept, dy.to(dtype), cfg, into=tree_map_tensors(lambda t: torch.zeros_like(t, dtype=torch.float32), want)
            )
        assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True)), op
        assert all(torch.equal(a.to(dtype), b) for a, b in zip(tensors(wide), tensors(want), strict=True)), op


def test_sums_of_dy_are_not_read_before_both_accumulators_are_checked():
    """A pending that comes with sums of dy, of which db is made, adds to the weight first."""
    cfg = LinearConfig(4, 3)
    y, residuals = linear.fwd(linear.init(cfg, key=random.key(0)), torch.ones(2, 4), cfg)
    pending = linear.dgrad(residuals, y, cfg)[1].copy(sums=torch.ones(1, 3))
    into = LinearParams(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match=r"^linear_wgrad: into.bias must be \[3\], got \[4\]"):
        linear.wgrad(pending, cfg, into=into)
    assert untouched(into)
