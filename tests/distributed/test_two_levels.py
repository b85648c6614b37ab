"""Context parallelism in two levels: heads are exchanged within a node, and keys travel between nodes. It is one process's
attention, and each level sends what it sends alone."""

import math
import random as python_random

import pytest
import torch
from dist_cases import axis_of
from hypothesis import given
from hypothesis import strategies as st

from funcops import (
    AttentionConfig,
    ChainConfig,
    DropoutConfig,
    LinearConfig,
    Needs,
    QKVSplitConfig,
    RepeatConfig,
    ReshapeConfig,
    SinkAttentionConfig,
    SinkAttentionParams,
    SkipConfig,
    Step,
    WithExtras,
    attention,
    chain,
    dist,
    dropout,
    linear,
    qkv_split,
    random,
    repeat,
    report,
    reshape,
    sink_attention,
    skip,
)
from funcops.distributed import comm
from funcops.engine.trees import paths
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

D = torch.float64


def own(t, between, within, dim=1):
    """A rank's part of a whole tensor: of its node's part."""
    return dist.zigzag(dist.zigzag(t, between, dim), within, dim).contiguous()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_the_order_is_that_of_one_axis_of_all_ranks(nodes, ranks, length):
    t = torch.arange(2 * nodes * ranks * length)
    for rank in range(nodes * ranks):
        mesh = dist.Mesh.abstract({"cp": nodes, "sp": ranks}, rank)
        assert torch.equal(own(t, mesh["cp"], mesh["sp"], 0), dist.zigzag(t, axis_of(nodes * ranks, rank), 0))


class Drawn:
    """Sizes of two axes, heads that the inner one divides, options of attention, and tensors."""

    def __init__(self, seed):
        draw = python_random.Random(seed)
        self.sizes = {"cp": draw.choice((1, 2, 2, 3)), "sp": draw.choice((2, 2, 1, 3))}
        n, m = self.sizes.values()
        kv, self.way = m * draw.choice((1, 2)), draw.choice(("gather", "ring"))
        heads, length, batch = kv * draw.choice((1, 2)), 2 * n * m * draw.choice((1, 2)), draw.choice((1, 2))
        kinds = [{}, {"causal": True}, {"causal": True, "softcap": 0.8}]
        if self.way == "gather":
            kinds += [{"causal": True, "window": draw.randint(1, 9)}, {"causal": True, "chunk": draw.randint(1, 9)}]
            kinds += [{"causal": True, "packed": True}, {"causal": True, "packed": True, "window": 3}]
        self.options = draw.choice(kinds)
        self.sinks = heads if draw.random() < 0.4 else 0
        packed, causal = "packed" in self.options, "causal" in self.options
        batch, keys, value = 1 if packed else batch, length * (2 - causal), draw.choice((4, 4, 2, 6))
        shapes = (batch, length, heads, 4), (batch, keys, kv, 4), (batch, keys, kv, value)
        self.x = [torch.randn(shape, dtype=D) for shape in shapes]
        ends = sorted(draw.choices(range(length + 1), k=draw.randint(0, 3)))
        self.more = [torch.tensor([0, *ends, length], dtype=torch.int32)] * packed
        self.dy, sinks = torch.randn(batch, length, heads, value, dtype=D), torch.randn(heads, dtype=D)
        self.params = SinkAttentionParams(sinks) if self.sinks else None

    def __repr__(self):
        return f"{self.sizes}, {self.way}, {[list(t.shape) for t in self.x]}, {self.options}, sinks {self.sinks}"


def hold_to_one_process(given):
    if given.sinks:
        op, plain, config = sink_attention, SinkAttentionConfig(given.sinks, **given.options), dist.ContextSinkAttentionConfig
        of_ranks, options = dist.context_sink_attention, given.options | {"heads": given.sinks}
    else:
        op, plain, config = attention, AttentionConfig(**given.options), dist.ContextAttentionConfig
        of_ranks, options = dist.context_attention, given.options
    y, kept = op.fwd(given.params, (*given.x, *given.more), plain)
    dparams, dx = op.bwd(kept, given.dy, plain)

    def run(mesh):
        axes = mesh["cp"], mesh["sp"]
        cfg = config(axes[0], comm=given.way, heads_axis=axes[1], **options)
        mine = (*(own(t, *axes) for t in given.x), *given.more)
        y_here, kept = of_ranks.fwd(given.params, mine, cfg)
        assert kept.q is mine[0] and kept.k is mine[1] and kept.v is mine[2] and kept.y is y_here
        own_dy = own(given.dy, *axes)
        found, own_dx = of_ranks.bwd(kept, own_dy, cfg)
        again, pending = of_ranks.dgrad(kept, own_dy, cfg)
        same_bits((of_ranks.wgrad(pending, cfg), again), (found, own_dx), "the halves")
        for what, got, want in zip(("y", "dq", "dk", "dv"), (y_here, *own_dx), (y, *dx), strict=False):
            torch.testing.assert_close(got, own(want, *axes), rtol=0, atol=1e-12, msg=lambda said, what=what: f"{what}: {said}")
        if found is not None:
            summed = comm.sum_over(comm.sum_over(found.sinks, axes[0]), axes[1])
            torch.testing.assert_close(summed, dparams.sinks, rtol=0, atol=1e-12)

    run_ranks(given.sizes, run)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_it_is_attention_on_one_process(seed):
    given = Drawn(seed)
    try:
        hold_to_one_process(given)
    except Exception as error:
        error.add_note(repr(given))
        raise


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_no_rows_and_no_keys(way):
    """Without causal, and with empty tensors, nothing hangs."""

    def run(mesh):
        cfg = dist.ContextAttentionConfig(mesh["cp"], comm=way, heads_axis=mesh["sp"])
        for t, s in ((0, 2), (2, 0), (0, 0)):
            q, kv = torch.zeros(1, t, 2, 4), torch.zeros(1, s, 2, 4)
            y, kept = dist.context_attention.fwd(None, (q, kv, kv), cfg)
            dx = dist.context_attention.bwd(kept, y, cfg)[1]
            assert y.shape == q.shape and [d.shape for d in dx] == [q.shape, kv.shape, kv.shape]

    run_ranks({"cp": 2, "sp": 2}, run)


WAYS = [pytest.param(way, inner, marks=pytest.mark.slow) for way, inner in (("heads", None), ("gather", "sp"))]


@pytest.mark.parametrize(("way", "inner"), [("ring", "sp"), *WAYS])
def test_it_is_one_graph_of_torch_compile(way, inner):
    """Forward and backward are captured without a break; ranks of an abstract mesh cannot run it."""
    mesh, captured = dist.Mesh.abstract({"cp": 2, "sp": 2}, 1), []
    cfg = dist.ContextAttentionConfig(mesh["cp"], causal=True, comm=way, heads_axis=inner and mesh[inner])

    def both(q, k, v):
        y, kept = dist.context_attention.fwd(None, (q, k, v), cfg)
        return y, *dist.context_attention.bwd(kept, y, cfg)[1]

    def backend(graph, inputs):
        captured.append(sum("all_to_all" in str(node.target) for node in graph.graph.nodes))
        raise NotImplementedError

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(both, fullgraph=True, backend=backend)(*[torch.zeros(1, 8, heads, 8) for heads in (4, 2, 2)])
    assert captured == [{"heads": 6, "ring": 6 + 4, "gather": 6}[way]]


ROWS, HEADS, KV, SIZE = 8, 4, 2, 8  # of a rank


def sent(way, sizes, needs=Needs.ALL, outer="cp", inner="sp"):
    """The elements of each message of a forward and a backward, by axis, in order; and what the forward keeps of its own."""
    kept_bytes = []

    def step(mesh):
        axes = [None if name is None else mesh[name] for name in (outer, inner)]
        cfg = dist.ContextAttentionConfig(axes[0], causal=True, comm=way, heads_axis=axes[1])
        x = torch.zeros(1, ROWS, HEADS, SIZE), *[torch.zeros(1, ROWS, KV, SIZE)] * 2
        y, kept = dist.context_attention.fwd(None, x, cfg, needs=needs)
        kept_bytes.append(report(kept, None, (x, y)).kept_bytes)
        dist.context_attention.bwd(kept, y, cfg)

    programs = dist.check_program(step, sizes)
    sizes_of = {name: mesh_size for name, mesh_size in sizes.items()}
    found = []
    for program in programs.values():
        messages = {name: [] for name in sizes_of}
        for one in program.sent:
            name = one.group.split("[")[0]
            messages[name].append((str(one).split(" of ")[0], math.prod(one.shape) if not one.sends else rows_sent(one)))
        found.append(messages)
    assert all(one == found[0] for one in found)
    return found[0], kept_bytes[0]


def rows_sent(one):
    return sum(one.sends) * math.prod(one.shape[1:])


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (3, 1), (1, 2)])
def test_each_level_sends_what_it_sends_alone(way, nodes, ranks):
    """Within a node the messages of an exchange of heads; between nodes m times the rows of 1/m of the heads: as many elements as
    of one rank a node. Kept is logsumexp alone."""
    found, kept = sent(way, {"cp": nodes, "sp": ranks})
    heads_alone, kept_heads = sent("heads", {"cp": ranks}, inner=None)
    alone, kept_alone = sent(way, {"cp": nodes}, inner=None)
    assert found["sp"] == heads_alone["cp"]
    assert found["cp"] == alone["cp"]
    assert kept == kept_heads == kept_alone == 4 * ROWS * HEADS
    flat, _ = sent(way, {"cp": nodes * ranks}, inner=None)
    if way == "ring":  # one ring of all ranks: a node's link out passes k and v of n m ranks, not of n
        assert len(flat["cp"]) == 3 * nodes * ranks - 2 and len(found["cp"]) == (3 * nodes - 2) * (nodes > 1)


def test_gradients_that_nobody_needs_are_not_sent():
    whole, _ = sent("ring", {"cp": 3, "sp": 2})
    found, _ = sent("ring", {"cp": 3, "sp": 2}, needs=Needs(x=("0",)))
    assert len(whole["cp"]) - len(found["cp"]) == 3
    assert whole["sp"][-1][1] - found["sp"][-1][1] == 2 * KV * ROWS * SIZE


def block():
    """Attention over 4 heads, with dropout of positions that ranks share."""
    return ChainConfig(
        steps=(
            Step("proj", linear, LinearConfig(8, 24)),
            Step("split", qkv_split, QKVSplitConfig(4, 2, kv_heads=4)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((4, 2), (8,))),
            Step("drop", dropout, DropoutConfig(0.3), takes=("key",)),
            Step("out", linear, LinearConfig(8, 8)),
        ),
        extras=("key",),
    )


MODEL = ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(skip, SkipConfig(chain, block()), 2)),), extras=("key",))
RULES = {"*.proj": "column", "*.out": "row"}


@pytest.mark.parametrize(("role", "sizes"), [
    ("context ring", {"cp": 2, "sp": 2}),
    ("context", {"tp": 2, "cp": 2, "sp": 2}),
    ("context", {"cp": 1, "sp": 2}),
    ("context ring", {"cp": 2, "sp": 1}),
])  # fmt: skip
def test_a_model_over_two_axes_of_tokens_equals_one_process(role, sizes):
    sizes = {"tp": 1} | sizes
    params, x = chain.init(MODEL, key=random.key(0), dtype=D), torch.randn(2, 16, 8, dtype=D)
    key = {"key": random.key(3)}

    def step(params, cfg, x):
        y, kept = chain.fwd(params, WithExtras(x, key), cfg)
        dparams, dx = chain.bwd(kept, torch.ones_like(y), cfg)
        return y, dparams, dx.main

    y, dparams, dx = step(params, MODEL, x)

    def part(t, mesh):
        return own(t.chunk(mesh["tp"].size)[mesh["tp"].rank], mesh["cp"], mesh["sp"])

    def run(mesh):
        cfg = dist.parallel(MODEL, RULES | {"*.mix": role}, mesh, context=("cp", "sp"))
        specs = dist.specs_of(chain, cfg)
        mine = chain.init(cfg, key=random.key(0), dtype=D)
        y_here, found, dx_here = step(mine, cfg, part(x, mesh))
        assert_close(y_here, part(y, mesh), dtype=D, what="y")
        assert_close(dx_here, part(dx, mesh), dtype=D, what="dx")
        return dist.unshard(dist.sum_gradients(found, specs, mesh), specs, mesh)

    for found in run_ranks(sizes, run):
        for path, want in paths(dparams).items():
            assert_close(paths(found)[path], want, dtype=D, what=path)


MESH = dist.Mesh.abstract({"tp": 1, "cp": 2, "sp": 2}, 0)
CP, SP = MESH["cp"], MESH["sp"]


def attend(heads=2, length=4, **options):
    x = tuple(torch.ones(1, length, heads, 8, device="meta") for _ in range(3))
    return dist.context_attention.fwd(None, x, dist.ContextAttentionConfig(CP, heads_axis=SP, **options))


def parallel(context, role="context", mesh=MESH):
    return dist.parallel(MODEL, RULES | {"*.mix": role}, mesh, context=context)


OTHER = "ContextAttentionConfig: heads_axis must be another axis than 'cp', with comm 'gather' or 'ring' between its groups, got"
WHOLE = "ContextAttentionConfig: heads_axis must be None with ALiBi or a bias, of which a rank has all heads, got axis 'sp' of 2"
LEVELS = "parallel: context must be two other axes than `axis`, between nodes and within a node, got"
BAD = {
    f"{OTHER} 'sp' with 'heads'": lambda: attend(comm="heads"),
    f"{OTHER} 'cp' with 'ring'": lambda: dist.ContextAttentionConfig(CP, comm="ring", heads_axis=CP),
    "ContextAttentionConfig: heads_axis must be Axis, got 'sp'": lambda: dist.ContextAttentionConfig(CP, heads_axis="sp"),
    WHOLE: lambda: attend(bias=True),
    WHOLE + "": lambda: attend(causal=True, alibi=True),
    "ContextAttentionConfig: comm must be 'gather' or 'heads' with a window": lambda: attend(causal=True, window=2, comm="ring"),
    "context_attention_fwd: x.0 (q) must be of a number of heads that 2 divides (cfg.heads_axis; without it any will do), got 3": (
        lambda: attend(heads=3)
    ),
    "context_attention_fwd: x.0 (q) must be of an even length (two chunks in zigzag order), got 3": (
        lambda: attend(length=3, causal=True)
    ),
    f"{LEVELS} ('cp', 'cp')": lambda: parallel(("cp", "cp")),
    f"{LEVELS} ('cp', 'tp')": lambda: parallel(("cp", "tp")),
    f"{LEVELS} ()": lambda: parallel(()),
    f"{LEVELS} ('cp', 2)": lambda: parallel(("cp", 2)),
    "parallel: context must be axes of the mesh (tp, cp, sp), got ('other', 'sp')": lambda: parallel(("other", "sp")),
    "parallel: context must be axes of the mesh (tp, cp, sp), got ('cp', 'other')": lambda: parallel(("cp", "other")),
    "parallel: rules must be with 'context' for blocks.*.mix, an attention over the tokens of all ranks of 'sp'": (
        lambda: dist.parallel(MODEL, RULES, dist.Mesh.abstract({"tp": 1, "cp": 1, "sp": 2}, 0), context=("cp", "sp"))
    ),
    f"blocks.*.mix: {OTHER} 'sp' with 'heads'": lambda: parallel(("cp", "sp"), "context heads"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_not_served_is_refused(said):
    with pytest.raises((ValueError, TypeError)) as raised:
        BAD[said]()
    assert said.split(": ", 1)[1] in str(raised.value) and str(raised.value).startswith(said.split(":")[0])
