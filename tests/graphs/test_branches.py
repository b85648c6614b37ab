"""Branches of a capture: drawn programs against a run in turn, races against an order that the test works out by itself."""

import random as rng_of

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    ChainConfig,
    GraphOrderError,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    chain,
    dist,
    linear,
    random,
    repeat,
    rms_norm,
    skip,
    trees,
)
from funcops.adapters.graphs import branches
from funcops.engine.errors import CaptureError
from funcops.graphs import branch, graph_data, graphed, wgrads_beside

BUFFERS = 6


def drawn(rng):
    """A program: operators on numbered buffers, in branches. op (to, of, in_place), fork (name), end, join (which)."""
    program, stack, waiting, made = [], [], [], 0
    for left in range(rng.randint(6, 14), -20, -1):
        if left > 0:
            kinds = ["op"] * 5 + ["fork"] * (len(stack) < 2) * 2 + ["end"] * bool(stack) * 2 + ["join"] * bool(waiting) * 2
        else:
            kinds = ["end"] * bool(stack) or ["join"] * bool(waiting)
        kind = rng.choice(kinds) if kinds else ""
        if kind == "op":
            program.append(("op", rng.randrange(BUFFERS), rng.randrange(BUFFERS), rng.random() < 0.6))
        elif kind == "fork":
            program.append(("fork", rng.choice("ab")))
            stack.append(made)
            made += 1
        elif kind == "end":
            waiting.append(stack.pop())
            program.append(("end",))
        elif kind == "join":
            program.append(("join", waiting.pop(rng.randrange(len(waiting)))))
    return program


def run(program, *given):
    """The program, with or without branches: the buffers at its end."""
    buffers, sides, stack = [t.clone() for t in given], [], []
    for what, *of in program:
        if what == "op":
            to, source, in_place = of
            if in_place:
                buffers[to].mul_(0.5).add_(buffers[source])
            else:
                buffers[to] = buffers[source] * 1.5 + to
        elif what == "fork":
            sides.append(branch(*of))
            stack.append(sides[-1])
            sides[-1].__enter__()
        elif what == "end":
            stack.pop().__exit__(None, None, None)
        else:
            sides[of[0]].join()
    return buffers


def concurrent(program):
    """Pairs of operators of which neither must run before the other, worked out on sets: whether each is a race."""
    names, tensors, uses = list(range(BUFFERS)), BUFFERS, []  # the tensor that each buffer is; what each operator touches
    streams, ends, numbers, made, stack = {}, {}, [], 0, [("", set())]
    for what, *of in program:
        path, before = stack[-1]
        if what == "op":
            to, source, in_place = of
            if in_place:
                touches = [({names[to]}, {names[to]}), ({names[to], names[source]}, {names[to]})]
            else:
                touches = [({names[source]}, {tensors}), ({tensors}, {tensors + 1})]
                tensors += 2
                names[to] = tensors - 1
            for reads, writes in touches:
                uses.append((reads, writes, set(before)))
                before.add(len(uses) - 1)
        elif what == "fork":
            name = f"{path}/{of[0]}"
            stack.append((name, before | streams.get(name, set())))
            numbers.append(made)
            made += 1
        elif what == "end":
            stack.pop()
            streams[path] = set(before)
            ends[numbers.pop()] = set(before)
        else:
            before |= ends[of[0]]
    pairs = ((a, b) for j, b in enumerate(uses) for i, a in enumerate(uses[:j]) if i not in b[2])
    return [bool(w2 & (r1 | w1) or r2 & w1) for (r1, w1, _), (r2, w2, _) in pairs]


def programs(count, racing):
    rng, found = rng_of.Random(11), []
    while len(found) < count:
        program = drawn(rng)
        races = concurrent(program)
        if races and any(races) is racing:
            found.append(program)
    return found


def given(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, generator=generator) for _ in range(BUFFERS)]


def test_programs_without_a_race_have_the_bits_of_a_run_in_turn():
    """A replay runs each branch as late as its join allows, so an order that the graph lacks would show."""
    for program in programs(250, racing=False):
        captured = graphed(lambda *buffers, program=program: run(program, *buffers), *given(0), warmup=1)
        assert graph_data(captured).width > 1
        for seed in (1, 2):
            got, want = captured(*given(seed)), run(program, *given(seed))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), program


class Ran(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("first", "second"), [("one", "two"), ("two", "one")])
def test_a_replay_runs_a_branch_right_before_what_follows_its_join(first, second):
    """An operator of the main branch runs before all branches that are joined after it."""

    def run(x):
        sides, made = {"one": branch("one"), "two": branch("two")}, {}
        for name, f in (("one", torch.exp), ("two", torch.cos)):
            with sides[name]:
                made[name] = f(x)
        y = torch.sin(x)
        for name in (first, second):
            sides[name].join()
            y = y * made[name]
        return y

    x, found = torch.linspace(0, 1, 3), Ran()
    captured = graphed(run, x, warmup=0)
    with found:
        y = captured(x)
    computed = {"one": "exp", "two": "cos"}
    assert [name for name in found.names if name in ("sin", "mul", *computed.values())] == [
        "sin",
        computed[first],
        "mul",
        computed[second],
        "mul",
    ]
    assert torch.equal(y, run(x))


def test_every_race_is_found():
    for program in programs(200, racing=True):
        with pytest.raises(CaptureError, match="must not touch a buffer while .* may run: join the branch before"):
            graphed(lambda *buffers, program=program: run(program, *buffers), *given(0), warmup=0)


def test_a_race_names_both_operators_their_lines_and_branches():
    def racing(x):
        with branch("square") as side:
            x.mul_(x)
        y = x + 1
        side.join()
        return y

    with pytest.raises(CaptureError) as error:
        graphed(racing, torch.ones(2), inputs="donated", warmup=0)
    text = str(error.value)
    assert (
        "aten.add.Tensor, which reads it in 'the main branch'" in text and "aten.mul_.Tensor, which writes it in 'square'" in text
    )
    assert text.count("test_branches.py:") == 2


def test_a_branch_that_is_not_joined_is_refused():
    def loose(x):
        with branch():
            y = x + 1
        return y

    with pytest.raises(CaptureError, match="branch: all must be joined before the capture ends, got 1 that are not"):
        graphed(loose, torch.ones(2), warmup=0)


def test_branches_are_entered_and_joined_once():
    side = branch("a")
    with pytest.raises(GraphOrderError, match="branch 'a': must be joined once, after its block, got one that was not entered"):
        side.join()
    with side, pytest.raises(GraphOrderError, match="got one that still runs"):
        side.join()
    with branch("b") as other:
        side.join()
        with pytest.raises(
            GraphOrderError, match="branch 'a': must be waited for between its block and its join, got one that is joined"
        ):
            side.wait()
    other.wait()
    other.join()
    with pytest.raises(GraphOrderError, match="a second join"):
        side.join()
    with pytest.raises(GraphOrderError, match="must be entered once"), side:
        pass
    with pytest.raises(TypeError, match="branch: name must be"):
        branch(3)


def lent(x, wait):
    """A branch reads memory that another branch made and frees at once, and then gets more."""
    with branch("maker") as maker:
        y = x + 1
    with branch("reader") as reader:
        maker.wait()
        z = y * 2
    del y
    with branch("maker") as again:
        if wait:
            reader.wait()
        w = x + 3
    for side in (maker, reader, again):
        side.join()
    return z, w, reader


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("careless", [False, True])
def test_memory_that_a_branch_still_reads_is_given_to_nobody(wait, careless, monkeypatch):
    """It is kept until its maker waits for the reader; without that a capture refuses it, and names both operators."""
    if careless:
        monkeypatch.setattr(branches._Held, "keep", lambda held, given: None)
    if careless and not wait:
        said = "in 'maker', must not get the memory that aten.add.Tensor .* made while aten.mul.Tensor, "
        with pytest.raises(CaptureError, match=f"{said}which reads it in 'reader', .* may run: keep the tensor until its branch"):
            graphed(lambda x: lent(x, wait)[:2], torch.ones(2), warmup=0)
        return
    captured = graphed(lambda x: lent(x, wait)[:2], torch.ones(2), warmup=0)
    assert [t.tolist() for t in captured(torch.zeros(2))] == [[2.0, 2.0], [3.0, 3.0]]


def test_a_wait_lets_go_of_what_the_waiting_branch_made():
    found = []

    def step(x):
        with branch("maker") as maker:
            y = x + 1
        with branch("reader") as reader:
            maker.wait()
            z = y * x
        held = [t is y for t in reader._held.tensors.values()]
        with branch("maker") as again:
            reader.wait()
        found.append((sum(held), len(held), [t is y for t in reader._held.tensors.values()]))
        for side in (maker, reader, again):
            side.join()
        return z

    graphed(step, torch.ones(2), warmup=0)
    assert found == [(1, 2, [False])], "x is of the main branch"


def test_an_error_inside_leaves_no_branch():
    with pytest.raises(ZeroDivisionError), branch("a"):
        1 / 0  # noqa: B018
    captured = graphed(lambda x: x + 1, torch.ones(2), warmup=0)
    assert graph_data(captured).width == 1


BODY = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("up", linear, LinearConfig(8, 8))))
LAYERS = RepeatConfig(skip, SkipConfig(chain, BODY), times=4)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_weight_gradients_beside_the_next_layer(stacked, accumulates):
    """The same bits as in turn, with layers' weight gradients in a branch of the graph, also into accumulators."""
    plain = RepeatConfig(skip, SkipConfig(chain, BODY), times=4, stacked=stacked)
    beside = wgrads_beside(plain)
    params = repeat.init(plain, key=random.key(0))
    x, dy = torch.randn(2, 8), torch.randn(2, 8)

    def step(cfg):
        def both(params, x, dy, into):
            y, kept = repeat.fwd(params, x, cfg)
            return y, *repeat.bwd(kept, dy, cfg, into=into)

        return both

    def sums():
        return trees.tree_map(torch.ones_like, params) if accumulates else None

    policies = {"3": "donated"} if accumulates else "copy"
    want, into = step(plain)(params, x, dy, sums()), sums()
    captured = graphed(step(beside), params, x, dy, into, inputs=policies, warmup=1)
    got = captured(params, x, dy, into)
    assert all(torch.equal(a, b) for a, b in zip(trees.tensors(got), trees.tensors(want), strict=True))
    assert graph_data(captured).width > 1 and graph_data(graphed(step(plain), params, x, dy, sums(), inputs=policies)).width == 1


@pytest.mark.parametrize("twice", [True, False])
def test_layers_that_overlap_by_themselves_are_refused(twice):
    plain = ChainConfig(steps=(Step("layers", repeat, LAYERS),))
    given = wgrads_beside(plain) if twice else dist.zero3(plain, dist.Mesh.abstract({"dp": 2}, rank=0)["dp"])
    with pytest.raises(ValueError, match="wgrads_beside: cfg must be one whose layers do not .* got a repeat of it at 'layers'"):
        wgrads_beside(given)


def test_a_chain_with_repeats_and_params_stay_as_they_are():
    cfg = ChainConfig(steps=(Step("in", linear, LinearConfig(8, 8)), Step("layers", repeat, LAYERS)))
    beside = wgrads_beside(cfg)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(3, 8)
    assert trees.structure(chain.init(beside, key=random.key(0))) == trees.structure(params)
    results = []
    for own in (cfg, beside):
        y, kept = chain.fwd(params, x, own)
        results.append(trees.tensors((y, chain.bwd(kept, y, own))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    y, kept = chain.fwd(params, x, beside)
    dx, pending = chain.dgrad(kept, y, beside)
    halves = trees.tensors((y, (chain.wgrad(pending, beside), dx)))
    assert all(torch.equal(a, b) for a, b in zip(halves, results[0], strict=True))
