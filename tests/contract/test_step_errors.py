"""An error inside combinators begins with the path of its step, and is otherwise the step's own error, whatever runs the step."""

import random as pyrandom
import re

import pytest
import torch
from law_cases import FIRST

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    DonatedError,
    LinearConfig,
    ParallelConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    StaleResidualError,
    Step,
    TorchConfig,
    activation,
    add,
    chain,
    donate,
    linear,
    op_from_torch,
    parallel,
    random,
    remat,
    repeat,
    rms_norm,
    skip,
    with_policy,
)
from funcops.engine.backend import backend
from funcops.engine.trees import at, paths, put, tensors, tree_map, tree_map_tensors

D = 4
WAYS = ["plain", "fused", "minimal", "compress_int8"]


def drawn_op(draw, depth):
    """A random op and config that map [*, D] to [*, D]."""
    kind = draw.choice(["linear", "norm"] if depth == 0 else ["chain", "chain", "skip", "repeat", "remat", "parallel"])
    if kind == "linear":
        return linear, LinearConfig(D, D, bias=draw.random() < 0.5)
    if kind == "norm":
        return rms_norm, RMSNormConfig(D)
    if kind == "skip":
        return skip, SkipConfig(*drawn_op(draw, depth - 1))
    if kind == "repeat":
        return repeat, RepeatConfig(*drawn_op(draw, depth - 1), draw.randint(1, 3))
    if kind == "remat":
        op, cfg = drawn_op(draw, depth - 1)
        return remat(op), cfg
    if kind == "parallel":
        branches = tuple(Step(f"branch_{i}", *drawn_op(draw, 0)) for i in range(2))
        return chain, ChainConfig(steps=(Step("all", parallel, ParallelConfig(branches=branches)), Step("sum", add, AddConfig())))
    steps = [Step(f"step_{i}", *drawn_op(draw, depth - 1)) for i in range(draw.randint(1, 3))]
    if draw.random() < 0.5:
        steps.append(Step("act", activation, ActivationConfig(kind="relu")))
    return chain, ChainConfig(steps=tuple(steps))


def model(seed):
    draw = pyrandom.Random(seed)
    op, cfg = drawn_op(draw, 3)
    while op.name != "chain" or not any("." in path.rpartition(".")[0] for path in paths(op.init(cfg, device="meta"))):
        op, cfg = drawn_op(draw, 3)
    return op, cfg


def message_of(error, call):
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def step_of(path):
    return path.rpartition(".")[0]


@pytest.mark.turns("way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_errors_begin_with_the_path_of_the_step(seed, way):
    op, cfg = model(seed)
    if way not in ("plain", "fused"):
        op = with_policy(op, way)
    params = op.init(cfg, key=random.key(0))
    x = torch.randn(2, D)
    with backend("triton" if way == "fused" else "torch"):
        there = [(path, leaf) for path, leaf in paths(params).items() if leaf is not None]
        for path, leaf in pyrandom.Random(seed).sample(there, min(5, len(there))):
            for wrong in (leaf[..., :-1], leaf.to(torch.complex64)):
                said = message_of((ValueError, TypeError), lambda p=path, w=wrong: op.fwd(put(params, p, w), x, cfg))
                assert re.match(rf"{re.escape(step_of(path))}: \w+_fwd: params\.{path.rpartition('.')[2]} must be ", said), said
            _backward(op, cfg, params, x, path, way)


def _backward(op, cfg, params, x, path, way):
    """Calls of a backward that raise: stale residuals and pending, wrong accumulators, donated trees."""
    mine = tree_map_tensors(torch.clone, params)
    y, residuals = op.fwd(mine, x, cfg)
    at(mine, path).add_(0)
    inside = step_of(path).partition(".")[0]
    into = tree_map(lambda t: None if t is None else torch.zeros_like(t), params)
    for call in (
        lambda: op.bwd(residuals, y, cfg),
        lambda: op.dgrad(residuals, y, cfg),
        lambda: op.bwd(residuals, y, cfg, into=into),
    ):
        if any(t is at(mine, path) for t in tensors(residuals)):
            said = message_of(StaleResidualError, call)
            assert said.startswith(inside) or f"params.{inside}" in said, said
            assert not any(t is not None and t.any() for t in paths(into).values())
    residuals = op.fwd(params, x, cfg)[1]
    said = message_of(ValueError, lambda: op.bwd(residuals, y, cfg, into=put(into, path, torch.zeros(7, 7))))
    assert f"into.{path} must be" in said, said


# with graph breaks every function on the way is compiled apart: a wrong width and a wrong dtype are enough
WHOLE_OR_NOT = [(seed, whole) for seed in range(6) for whole in (True, False) if whole or seed < 2]


@pytest.mark.parametrize(
    ("seed", "fullgraph"), [pytest.param(*case, marks=() if case == (1, True) else pytest.mark.slow) for case in WHOLE_OR_NOT]
)
def test_errors_have_the_path_where_they_are_compiled(seed, fullgraph):
    """A wrong leaf in the forward, and a wrong dy in the backward: the error is the same as without a compiler."""
    op, cfg = model(seed)
    params, x = op.init(cfg, key=random.key(0)), torch.randn(2, D)
    there = [(path, leaf) for path, leaf in paths(params).items() if leaf is not None]
    path, leaf = pyrandom.Random(seed).choice(there)
    wrong = leaf[..., :-1] if seed % 2 else leaf.to(torch.complex64)

    def step(params, x, dy):
        y, residuals = op.fwd(params, x, cfg)
        return y, op.bwd(residuals, dy, cfg)

    for given in ((put(params, path, wrong), x, x), (params, x, torch.randn(3, D))):
        torch._dynamo.reset()
        with torch.no_grad():
            said = message_of((ValueError, TypeError), lambda: step(*given))  # noqa: B023
            compiled = torch.compile(step, fullgraph=fullgraph, backend="eager")
            assert re.match(r"[\w.]+: \w+: ", said) and said in message_of(Exception, lambda: compiled(*given))  # noqa: B023


def test_a_pending_that_was_written_to_is_named_in_every_half():
    cfg = ChainConfig(steps=(Step("a", linear, LinearConfig(D, D)), Step("b", skip, SkipConfig(linear, LinearConfig(D, D)))))
    cfg = RepeatConfig(chain, cfg, 3)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(2, D)
    y, residuals = repeat.fwd(params, x, cfg)
    _, pending = repeat.dgrad(residuals, torch.ones_like(y), cfg)
    for layer in range(3):
        for name in ("a", "b"):
            kept = pending[layer][name]
            kept.x.add_(0)
            stale = {p for p in ((i, n) for i in range(3) for n in "ab") if not pending[p[0]][p[1]].fresh()}
            said = message_of(StaleResidualError, lambda: repeat.wgrad(pending, cfg))
            assert said.partition(":")[0] in {f"{i}.{n}" for i, n in stale}, said
    y, residuals = repeat.fwd(params, x, cfg)
    donate(residuals[1]["b"])
    assert message_of(DonatedError, lambda: repeat.bwd(residuals, y, cfg)).startswith("1.b: linear_bwd: residuals must be unused")


def test_an_init_names_the_step():
    def init(cfg, *, key=None, device=None, dtype=None):
        if device != "meta":
            raise OverflowError("no room")
        return linear.init(cfg, key=key, device=device, dtype=dtype)

    deep = Step("deep", linear._replace(init=init), LinearConfig(D, D))
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(D, D)), deep))
    cfg = ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(skip, SkipConfig(chain, cfg), 2)),))
    cfg = ParallelConfig(branches=(Step("left", linear, LinearConfig(D, D)), Step("right", chain, cfg)))
    assert message_of(OverflowError, lambda: parallel.init(cfg, key=random.key(0))) == "right.blocks.0.deep: no room"


class _Odd(Exception):
    pass


@pytest.mark.parametrize("error", [KeyError("k"), _Odd(1, 2), OSError(2, "no file"), RuntimeError("text"), _Odd()], ids=repr)
def test_an_error_of_a_users_op_keeps_its_type_and_what_it_says(error):
    def fwd(params, x, cfg, *, needs=None):
        raise error

    cfg = ChainConfig(steps=(Step("mine", linear._replace(fwd=fwd), LinearConfig(D, D)),))
    before = error.args
    with pytest.raises(type(error)) as raised:
        chain.fwd(chain.init(cfg, key=random.key(0)), torch.ones(1, D), cfg)
    assert raised.value is error
    if isinstance(error, RuntimeError):
        assert str(error) == "mine: text"
    else:
        assert error.args == before
        assert getattr(error, "__notes__", ["in step mine"]) == ["in step mine"]


def fits(widths):
    """A chain of linears with a step that keeps the width between them."""
    steps = []
    for i, (a, b) in enumerate(widths):
        steps += [Step(f"lin_{i}", linear, LinearConfig(a, b)), Step(f"act_{i}", activation, ActivationConfig(kind="relu"))]
    return steps


@pytest.mark.parametrize("seed", range(10))
def test_widths_that_cannot_fit_are_refused_with_both_steps(seed):
    """Drawn: widths that fit, in nested combinators; one of them made wrong."""
    draw = pyrandom.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(3, 6))]
    widths = list(zip(sizes, sizes[1:], strict=False))
    place = draw.randrange(1, len(widths))
    wrong = [*widths[:place], (widths[place][0] + 1, widths[place][1]), *widths[place + 1 :]]
    forms = {
        "": lambda steps: ChainConfig(steps=tuple(steps)),
        "inner": lambda steps: ChainConfig(steps=(*steps[:2], Step("inner", chain, ChainConfig(steps=tuple(steps[2:]))))),
        "all": lambda steps: ChainConfig(
            steps=(*steps[: 2 * place], Step("all", parallel, ParallelConfig(branches=(steps[2 * place],))))
        ),
    }
    for path, form in forms.items():
        form(fits(widths))
        taker = f"lin_{place}" if path != "inner" else f"inner.lin_{place}"
        taker = f"all.lin_{place}" if path == "all" else taker
        giver = f"lin_{place - 1}" if path != "inner" or place == 1 else f"inner.lin_{place - 1}"
        said = message_of(ValueError, lambda form=form: form(fits(wrong)))
        end = f" must be [..., {wrong[place][0]}], got [..., {widths[place][0]}] of step "
        if path == "inner" and place > 1:
            assert said.startswith("ChainConfig: x of step 'lin_") and end in said  # the inner chain alone knows
        else:
            assert said == f"ChainConfig: x of step {taker!r}{end}{giver!r}"


def test_bodies_that_must_give_what_they_take():
    body = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 6))))
    assert message_of(ValueError, lambda: SkipConfig(chain, body)) == (
        "SkipConfig: the body must be one whose y is [..., 4], as its x, got [..., 6] of step 'up'"
    )
    assert message_of(ValueError, lambda: RepeatConfig(chain, body, 2)) == (
        "RepeatConfig: the body '*' must be one whose y is [..., 4], as the next layer's x, got [..., 6] of step '*.up'"
    )
    assert message_of(ValueError, lambda: RepeatConfig(linear, LinearConfig(16, 8), 2)) == (
        "RepeatConfig: the body '*' must be one whose y is [..., 16], as the next layer's x, got [..., 8] of step '*'"
    )
    RepeatConfig(chain, body, 1)
    fine = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 4))))
    stack = Step("blocks", repeat, RepeatConfig(skip, SkipConfig(chain, fine), 3))
    said = message_of(ValueError, lambda: ChainConfig(steps=(Step("first", linear, LinearConfig(2, 5)), stack)))
    assert said == "ChainConfig: x of step 'blocks.*.norm' must be [..., 4], got [..., 5] of step 'first'"


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_config_says_the_widths_that_its_op_has(case):
    if not hasattr(case.cfg, "widths"):
        return
    params, x = case.make(torch.float32)
    y = case.op.fwd(params, x, case.cfg)[0]
    before, after = ((t[0] if isinstance(t, tuple) else t) for t in (x, y))
    wanted, given = case.cfg.widths(before.shape[-1])
    assert wanted in (None, before.shape[-1]) and given in (None, *after.shape[-1:])


@pytest.mark.parametrize("inner", [False, True])
def test_a_sum_that_does_not_fit_is_an_error_of_the_skip(inner):
    """Not of the step that ran before it, in the body or before the skip."""
    cut, of = op_from_torch(lambda params, x, cfg: x[..., :2], name="cut"), TorchConfig()
    body = (chain, ChainConfig(steps=(Step("cut", cut, of),))) if inner else (cut, of)
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(D, D)), Step("around", skip, SkipConfig(*body))))
    with pytest.raises(ValueError, match=r"^around: skip_fwd: body\(x\) must be like x, float32\[3, 4\], got float32\[3, 2\]$"):
        chain.fwd(chain.init(cfg, key=random.key(0)), torch.ones(3, D), cfg)
