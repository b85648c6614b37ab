"""ZeRO-1, 2 and 3 and HSDP over four ranks take the same steps as one process with the same microbatches, bit for bit."""

import re
import threading
import weakref

import pytest
import torch
from tally import TallyConfig, routed, tally
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    GLUConfig,
    Ledger,
    LinearConfig,
    LinearParams,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    dist,
    donate,
    dropout,
    glu,
    linear,
    random,
    repeat,
    rms_norm,
    route,
    skip,
    with_policy,
)
from funcops.distributed import Mesh, buckets, finish, gather_shards_start, own_shards, reduce_start
from funcops.distributed import shards as shards_of_trees
from funcops.engine.trees import cast, nbytes, paths, tensors, tree_map_tensors
from funcops.library.ops.route import RouteParams
from funcops.low_precision import NVFP4, Fp8Block, Fp8Delayed, with_recipe
from funcops.optim import AdamWConfig, adamw_init, adamw_update, decay_mask
from funcops.schedule import Schedule, run
from funcops.testing import run_ranks
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

EVEN, ODD = 32, 6  # widths. Torch's fused updates round what fills no vector of 8 in other instructions: bits need even shards
LAYERS, MICROBATCHES = 2, 4


def model(width, mesh=None, axis="dp", also=(), **options):
    """A residual stack and a loss; on a mesh its params are sharded."""
    classes, inner = (32, 32) if width == EVEN else (5, 5)
    block = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(width)),
            Step("up", linear, LinearConfig(width, 2 * inner)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(inner, width, bias=False)),
        )
    )
    steps = (
        Step("blocks", repeat, RepeatConfig(skip, SkipConfig(chain, block), times=LAYERS)),
        Step("head", linear, LinearConfig(width, classes)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    )
    whole = ChainConfig(steps=steps, extras=("labels",))
    return whole if mesh is None else dist.zero3(whole, mesh[axis], also=tuple(mesh[name] for name in also), **options)


def test_a_model_with_ties_and_stacks_inside_of_chains():
    """Each step of a tied pair gathers the shard, and the source gets the sum of the gradients."""
    stack = Step("stack", repeat, RepeatConfig(linear, LinearConfig(8, 8), times=3))
    inner = ChainConfig(steps=(stack, Step("norm", rms_norm, RMSNormConfig(8))))
    tied = ChainConfig(
        steps=(
            Step("in", linear, LinearConfig(8, 8, bias=False)),
            Step("inner", chain, inner),
            Step("act", glu, GLUConfig(kind="geglu", gate="first")),
            Step("up", linear, LinearConfig(4, 8, bias=False)),
            Step("out", linear, LinearConfig(8, 8, bias=False)),
        ),
        ties={"out.weight": "in.weight"},
    )
    params = chain.init(tied, key=random.key(3))
    xs = torch.randn(2, 5, 8)

    def gradients_of(cfg, params, x, into=None):
        y, residuals = chain.fwd(params, x, cfg)
        return chain.bwd(residuals, y, cfg, into=into)[0]

    def step(mesh):
        cfg = dist.zero3(tied, mesh["dp"])
        assert cfg.steps[1].op is chain and cfg.steps[2] is tied.steps[2] and cfg.steps[0].op is dist.sharded
        found = gradients_of(cfg, chain.init(cfg, key=random.key(3)), xs[mesh.rank])
        return finish(gather_shards_start(found, params, mesh["dp"]))

    want = gradients_of(tied, params, xs[1], into=gradients_of(tied, params, xs[0]))
    for found in run_ranks({"dp": 2}, step):
        for (path, a), b in zip(paths(found).items(), paths(want).values(), strict=True):
            assert a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6), path


def test_outputs_of_sharded_layers_and_of_a_step():
    """Each rank has the outputs of its own rows; gradients, from dys of all outputs, are summed: whole, in halves, into sums."""
    layers = Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, routed(8)), times=3))
    end = Step("end", tally, TallyConfig(8), gives=("count", "size"))
    whole = ChainConfig(steps=(layers, end), outputs=("load", "loss", "logits", "count", "size"))
    params, xs = chain.init(whole, key=random.key(3)), torch.randn(2, 5, 8)

    def gradients_of(cfg, params, x, into=None):
        y, residuals = chain.fwd(params, x, cfg)
        dy = float_like(y, 5)
        dparams, dx = chain.bwd(residuals, dy, cfg)
        other, pending = chain.dgrad(residuals, dy, cfg)
        same_bits((chain.wgrad(pending, cfg), other), (dparams, dx), "halves")
        sums = tree_map_tensors(torch.zeros_like, params) if into is None else into
        return y, chain.bwd(residuals, dy, cfg, into=sums)[0], dx

    def step(mesh):
        cfg = dist.zero3(whole, mesh["dp"])
        assert cfg.steps[1].op is dist.sharded and cfg.outputs == whole.outputs
        y, found, dx = gradients_of(cfg, chain.init(cfg, key=random.key(3)), xs[mesh.rank])
        return y, finish(gather_shards_start(found, params, mesh["dp"])), dx

    alone = gradients_of(whole, params, xs[0])
    others = gradients_of(whole, params, xs[1], alone[1])
    for own, (y, found, dx) in zip((alone, others), run_ranks({"dp": 2}, step), strict=True):
        same_bits((y, dx), (own[0], own[2]), "y and dx")
        assert_close(found, others[1], dtype=torch.float32)


def batch(m, width):
    g = torch.Generator().manual_seed(m)
    return WithExtras(torch.randn(3, width, generator=g), {"labels": torch.randint(5, (3,), generator=g)})


def gradients(params, m, width, cfg, into=None):
    loss, residuals = chain.fwd(params, batch(m, width), cfg)
    return chain.bwd(donate(residuals), torch.full_like(loss, 1 / MICROBATCHES), cfg, into=into)[0]


ADAMW = AdamWConfig()


def alone(width, steps, rounds=1):
    """Params and state of one process, which accumulates all microbatches of a step, then updates."""
    cfg = model(width)
    params = chain.init(cfg, key=random.key(0))
    state, decay = adamw_init(params, ADAMW), decay_mask(params)
    for i in range(steps):
        sums = None
        for m in range(rounds * MICROBATCHES):
            sums = gradients(params, rounds * MICROBATCHES * i + m, width, cfg, sums)
        params, state = adamw_update(params, sums, state, ADAMW, decay=decay)
    return params, state


def assert_same(got, want, width=EVEN):
    for (path, a), b in zip(paths(got).items(), paths(want).values(), strict=True):
        near = width == ODD and b is not None and torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        assert a is b is None or near or (a.shape == b.shape and torch.equal(a, b)), path


@pytest.mark.parametrize("width", [EVEN, pytest.param(ODD, marks=pytest.mark.slow)])
def test_zero_1_takes_the_steps_of_one_process_with_a_quarter_of_the_state(width):
    want, whole = alone(width, 2)

    def steps(mesh):
        dp, cfg = mesh["dp"], model(width)
        params = chain.init(cfg, key=random.key(0))
        shards, decay = own_shards(params, dp), decay_mask(params)
        state = adamw_init(shards, ADAMW)
        for i in range(2):
            grads = finish(reduce_start(gradients(params, 4 * i + mesh.rank, width, cfg), dp, shard=dp, bucket_bytes=200))
            shards, state = adamw_update(shards, grads, state, ADAMW, decay=decay)
            params = finish(gather_shards_start(shards, params, dp, bucket_bytes=300))
        return params, nbytes(state)

    leaves = len(tensors(want))
    for params, size in run_ranks({"dp": 4}, steps):
        assert_same(params, want, width)
        padding = 2 * 4 * leaves * (width == ODD)  # an element a leaf of each mean
        assert size <= (nbytes(whole) - 4 * leaves) / 4 + padding + 4 * leaves, "each leaf has a count of its steps"


@pytest.fixture(scope="module")
def two_rounds():
    params, state = alone(EVEN, 1, rounds=2)
    return params, state.exp_avg


FOUR = [{"dp": 4}, pytest.param({"node": 2, "dp": 2}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("sizes", FOUR, ids=["zero-2", "hsdp"])
def test_zero_2_adds_each_microbatch_to_its_shards(sizes, two_rounds):
    def steps(mesh):
        dp, cfg = mesh["dp"], model(EVEN)
        params = chain.init(cfg, key=random.key(0))
        shards = own_shards(params, dp)
        state, decay = adamw_init(shards, ADAMW), decay_mask(params)
        sums = tree_map_tensors(torch.zeros_like, shards)
        for m in range(2):
            grads = gradients(params, 4 * m + mesh.rank, EVEN, cfg)
            finish(reduce_start(grads, mesh.axes, shard=dp, bucket_bytes=2000), into=sums)
        shards, state = adamw_update(shards, sums, state, ADAMW, decay=decay)
        return [finish(gather_shards_start(tree, params, dp)) for tree in (shards, state.exp_avg)]

    for found in run_ranks(sizes, steps):
        assert_same(tuple(found), two_rounds)


@pytest.mark.parametrize("sizes", FOUR, ids=["zero-3", "hsdp"])
def test_zero_3_takes_the_steps_of_one_process(sizes, two_rounds):
    def steps(mesh):
        cfg = model(EVEN, mesh, also=("node",) if "node" in sizes else (), bucket_bytes=2000)
        shards = chain.init(cfg, key=random.key(0))
        like = chain.init(model(EVEN), key=None, device="meta")
        state, decay = adamw_init(shards, ADAMW), decay_mask(like)
        sums = tree_map_tensors(torch.zeros_like, shards)
        for m in range(2):
            gradients(shards, 4 * m + mesh.rank, EVEN, cfg, sums)
        shards, state = adamw_update(shards, sums, state, ADAMW, decay=decay)
        return nbytes(shards), [finish(gather_shards_start(tree, like, mesh["dp"])) for tree in (shards, state.exp_avg)]

    for size, found in run_ranks(sizes, steps):
        assert_same(tuple(found), two_rounds)
        assert size == nbytes(two_rounds[0]) / sizes["dp"]


def test_halves_a_policy_and_another_dtype_give_the_same_gradients():
    shards_of = {"plain": {}, "bfloat16": {"dtype": torch.bfloat16}}

    def both(mesh, options):
        cfg = model(ODD, mesh, **options)
        shards, x = chain.init(cfg, key=random.key(0)), batch(mesh.rank, ODD)
        x = WithExtras(cast(x.main, options.get("dtype", torch.float32)), x.extras)
        loss, residuals = chain.fwd(shards, x, cfg)
        dy = torch.ones_like(loss)
        want, dx = chain.bwd(residuals, dy, cfg)
        assert {t.dtype for t in tensors(want)} == {torch.float32}
        waiting, pending = Ledger(shards), chain.dgrad(residuals, dy, cfg)[1]
        read = [path for path, t in paths(pending).items() if ".params." in path and t is not None]
        assert all(path.endswith("norm.weight") for path in read), "a wgrad reads no weight but what its x is computed again of"
        waiting.keep("blocks, head", pending)
        assert_same(chain.wgrad(waiting.take("blocks, head"), cfg), want)
        for policy in ("minimal", Policy({"blocks": Recompute()}), Policy({"blocks.1": Recompute()})) if not options else ():
            frugal = with_policy(chain, policy)
            _, kept = frugal.fwd(shards, x, cfg)
            found, other = frugal.bwd(donate(kept), dy, cfg)
            assert_same((found, other.main), (want, dx.main))

    for options in shards_of.values():
        run_ranks({"dp": 2}, lambda mesh, options=options: both(mesh, options))


def test_params_without_a_gradient_keep_their_bits_in_another_dtype():
    """With equal scores a router's bias chooses; in bfloat16 every bias here would round to 1."""
    router = Step("route", route, RouteConfig(8, 2, score="sigmoid", bias=True), gives=("indices", "load", "loss"))
    plain = ChainConfig(steps=(router,), outputs=router.gives)
    bias, logits = 1 + 1e-4 * torch.arange(8.0), torch.zeros(3, 8, dtype=torch.bfloat16)

    def chosen(mesh):
        cfg = dist.ShardedConfig(chain, plain, axis=mesh["dp"], dtype=torch.bfloat16)
        y, kept = dist.sharded.fwd(own_shards({"route": RouteParams(bias)}, mesh["dp"]), logits, cfg)
        dparams, _ = dist.sharded.bwd(kept, WithExtras(y.main, dict.fromkeys(router.gives)), cfg)
        assert dparams["route"].bias is None
        return y.extras["indices"].tolist()

    assert run_ranks({"dp": 2}, chosen) == [[[7, 6]] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["rows", "elements"])
def test_specs_name_what_zero_3_shards(sizes):
    whole = chain.init(model(sizes), key=random.key(0))

    def step(mesh):
        cfg = model(sizes, mesh)
        specs = dist.specs_of(chain, cfg)
        assert {spec.names for spec in specs.values()} == {("dp",)} and len(specs) == len(tensors(whole))
        own = dist.init(chain, cfg, specs, mesh, key=random.key(0))
        assert_same(own, own_shards(whole, mesh["dp"]))
        assert_same(own, dist.shard(whole, specs, mesh))
        assert_same(own, dist.init(chain, model(sizes), specs, mesh, key=random.key(0)))
        over = dist.sum_axes(own, specs, mesh)
        assert {over[path] for path in specs} == {(mesh["cp"],)}, "sums over dp are taken already"
        return dist.unshard(own, specs, mesh)

    for found in run_ranks({"dp": 2 if sizes is EVEN else 4, "cp": 1}, step):
        assert_same(found, whole)


@pytest.mark.parametrize("recipe", [Fp8Delayed(), NVFP4(stochastic=True)], ids=["scales", "keys"])
def test_a_recipe_with_values_beside_weights_is_refused(recipe):
    """In either order of the rewrites, before anything runs."""
    cfg, dp = ChainConfig(steps=(Step("up", linear, LinearConfig(16, 16)),)), Mesh.abstract({"dp": 2}, 0)["dp"]
    said = (
        "ShardedConfig: recipe must be one without scales or keys beside weights, which are not sharded "
        f"(Fp8Current, Fp8Block and NVFP4(stochastic=False) have none), got {type(recipe).__name__}"
    )
    with pytest.raises(ValueError, match=re.escape(f"up: {said}")):
        dist.zero3(with_recipe(cfg, recipe), dp)
    with pytest.raises(ValueError, match=re.escape(said)):
        with_recipe(dist.zero3(cfg, dp), recipe)
    assert with_recipe(dist.zero3(cfg, dp), Fp8Block()) == dist.zero3(with_recipe(cfg, Fp8Block()), dp)


def test_shards_of_stacked_layers_are_refused_with_a_remedy():
    """`own_shards` would take some of the layers, and a spec has no second dimension; `init` makes each layer's shards."""
    layers = RepeatConfig(linear, LinearConfig(8, 8), times=4, stacked=True)
    cfg = ChainConfig(steps=(Step("layers", repeat, layers),))
    params, x = chain.init(cfg, key=random.key(0)), torch.ones(2, 8)

    def step(mesh):
        own = dist.zero3(cfg, mesh["dp"])
        said = "must be stacked leaves [4, ...] of shards over axis 'dp' of 2, as init makes them "
        with pytest.raises(ValueError, match=re.escape(f"{said}(own_shards cuts the layers: stacked=False), got float32[2, 8, 8]")):
            chain.fwd(own_shards(params, mesh["dp"]), x, own)
        with pytest.raises(ValueError, match=r"shards layers that are stacked: make them with stacked=False\), got \[8, 8\]"):
            dist.specs_of(chain, own)
        same_bits(chain.fwd(chain.init(own, key=random.key(0)), x, own)[0], chain.fwd(params, x, cfg)[0], "init")

    run_ranks({"dp": 2}, step)


class Alive:
    """The bytes of params on one rank that are whole or in flight."""

    def __init__(self):
        self.now = self.peak = 0
        self.known = set()

    def see(self, t):
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key, size):
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_a_stack_keeps_no_view_of_what_was_gathered(times, bias):
    """Between forward and backward a rank has its shards and each layer's x, and the gradients are as of whole params."""
    stack = RepeatConfig(linear, LinearConfig(8, 8, bias=bias), times=times, stacked=True)
    params, x = repeat.init(stack, key=random.key(0)), torch.randn(2, 8)

    def step(mesh):
        cfg, shards = dist.ShardedConfig(repeat, stack, axis=mesh["dp"]), own_shards(params, mesh["dp"])
        y, kept = dist.sharded.fwd(shards, x, cfg)
        assert nbytes(kept) == times * x.nbytes + shards.weight.nbytes
        return y, finish(gather_shards_start(dist.sharded.bwd(kept, y, cfg)[0], params, mesh["dp"]))

    y, kept = repeat.fwd(params, x, stack)
    twice = tree_map_tensors(lambda t: 2 * t, repeat.bwd(kept, y, stack)[0])
    for found in run_ranks({"dp": 2}, step):
        assert_close(found, (y, twice), dtype=torch.float32)


def test_no_more_than_two_layers_are_whole_at_a_time(monkeypatch):
    alive, wholes, start = threading.local(), buckets.Bucket.wholes, shards_of_trees.gather_start
    layers, wide = 6, LinearConfig(64, 64, bias=False)
    body = ChainConfig(steps=(Step("a", linear, wide), Step("b", linear, wide)))
    layer = 2 * 64 * 64 * 4

    def started(x, axis):
        h = start(x, axis)
        alive.own.see(h.value)
        return h

    def made(bucket, flat):
        found = wholes(bucket, flat)
        for _, t in found:
            alive.own.see(t)
        return found

    monkeypatch.setattr(shards_of_trees, "gather_start", started)
    monkeypatch.setattr(buckets.Bucket, "wholes", made)

    def step(mesh):
        own = alive.own = Alive()
        cfg = RepeatConfig(dist.sharded, dist.ShardedConfig(chain, body, axis=mesh["dp"]), times=layers)
        shards = repeat.init(cfg, key=random.key(0))
        y, residuals = repeat.fwd(shards, torch.ones(2, 64), cfg)
        after, ledger = own.now, Ledger(shards)
        ledger.keep("residuals", residuals)
        del residuals
        assert ledger.nbytes <= 2 * layers * y.nbytes, "activations alone"
        repeat.bwd(donate(ledger.take("residuals")), torch.ones_like(y), cfg)
        return nbytes(shards), after, own.now, own.peak

    for shards, after, end, peak in run_ranks({"dp": 4}, step):
        assert shards == layers * layer / 4
        assert after == end == 0 and layer < peak <= 2 * layer


def test_sums_begin_before_the_backward_ends():
    """A schedule's `done` begins them at each stage's last weight gradient; a stack of ZeRO-3 begins them layer by layer."""
    mesh = Mesh.abstract({"dp": 4, "tp": 2}, 0)
    tp = mesh["tp"]
    stage = ChainConfig(
        steps=(
            Step("up", dist.column_linear, dist.ColumnLinearConfig(4, 8, axis=tp)),
            Step("down", dist.row_linear, dist.RowLinearConfig(8, 4, axis=tp)),
        )
    )
    cfg = ChainConfig(steps=(Step("a", chain, stage), Step("b", chain, stage)))

    def staged(params, xs):
        flying = []
        ran = run(
            Schedule.from_csv("0F0,1F0,0F1,1F1,1I0,0I0,1I1,0I1,1W0,1W1,0W0,0W1"),
            params,
            list(xs),
            cfg,
            dys=list(xs),
            done=lambda stage, dparams: flying.append(reduce_start(dparams, mesh["dp"], shard=mesh["dp"])),
        )
        return ran.dxs, [finish(h) for h in flying]

    params, xs = chain.init(cfg, key=random.key(0)), (torch.ones(2, 4), torch.ones(2, 4))
    program = dist.record(staged, params, xs)
    groups = [one.group for one in program.sent]
    first, last = groups.index(mesh["dp"].group), len(groups) - 1 - groups[::-1].index(tp.group)
    assert first < last and not program.unfinished, "the gathers of the first stage's weight gradients come after it"

    def whole_step(mesh):
        cfg = model(ODD, mesh, also=("node",))
        shards = chain.init(cfg, key=None, device="meta")
        return gradients(shards, 0, ODD, cfg)

    programs = dist.check_program(whole_step, {"node": 2, "dp": 4}, ranks=(0, 7))
    assert [len(program.sent) for program in programs.values()] == [len(programs[0].sent)] * 2

    sharded = RepeatConfig(dist.sharded, dist.ShardedConfig(linear, LinearConfig(4, 4), axis=mesh["dp"]), times=3)
    shards = repeat.init(sharded, key=random.key(0))

    def stack(shards):
        y, residuals = repeat.fwd(shards, torch.ones(2, 4), sharded)
        return repeat.bwd(residuals, y, sharded)

    graph = make_fx(stack, tracing_mode="fake")(shards).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    short = {"all_gather": "G", "all_to_all": "S", "wait": "w", "mm": "p"}
    said = "".join([letter for name in names for part, letter in short.items() if part in name])
    assert said == "GwGpwGpwp" + "GwGppS" + "wGppSw" + "wppSw" + "w", "gathers a layer ahead, sums waited for a layer later"


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_shards_and_what_is_gathered_have_memory_of_their_own(n, bucket_bytes):
    """On any number of ranks, whether a leaf fills its bucket or not: a write to one tree is not one to another."""
    for leaves in (1, 2, 3):
        whole = {f"w{i}": torch.randn(2 + i, 3) for i in range(leaves)} | {"none": None, "empty": torch.empty(0, 3)}

        def run(mesh, whole=whole):
            params = tree_map_tensors(torch.clone, whole)
            shards = own_shards(params, mesh["dp"])
            gathered = finish(gather_shards_start(shards, params, mesh["dp"], bucket_bytes=bucket_bytes))
            trees = params, shards, gathered
            for tree in trees:
                before = [tree_map_tensors(torch.clone, other) for other in trees]
                tree_map_tensors(lambda t: t.add_(1), tree)
                for other, was in zip(trees, before, strict=True):
                    assert all(map(torch.equal, tensors(other), tensors(was))) == (other is not tree)

        run_ranks({"dp": n}, run)


LAYER = LinearConfig(4, 6)
ONE, TWO = (Mesh.abstract({"dp": n}, 0)["dp"] for n in (1, 2))
OTHER = LinearParams(torch.ones(7, 4), torch.ones(6))


SINKS = dist.ContextSinkAttentionConfig(heads=3, axis=Mesh.abstract({"cp": 2}, 0)["cp"], over="tp", causal=True)


def halves():
    """A sharded layer on one rank: its config, params, output, residuals and pending."""
    cfg = dist.ShardedConfig(linear, LAYER, axis=ONE)
    params = linear.init(LAYER, key=random.key(0))
    y, kept = dist.sharded.fwd(params, torch.ones(2, 4), cfg)
    return cfg, params, y, kept, dist.sharded.dgrad(kept, y, cfg)[1]


def of_two(cfg, axis=TWO, **options):
    return dist.ShardedConfig(cfg.op, cfg.cfg, axis=axis, **options)


NO_ACCUMULATORS = "into must be None with stage=2 (add the shards up after the backward), got accumulators"
REFUSED = {
    "ShardedConfig: reshard_after_forward must be bool, got 1": lambda cfg, *_: of_two(cfg, reshard_after_forward=1),
    "ShardedConfig: op must be one without a random key (put it in a chain), got dropout": lambda *_: dist.ShardedConfig(
        dropout, DropoutConfig(0.5), axis=TWO
    ),
    "sharded_fwd: params must be of one dtype, if cfg.dtype is given, got float32, bfloat16": lambda cfg, params, *_: (
        dist.sharded.fwd(
            LinearParams(params.weight, params.bias.bfloat16()), torch.ones(2, 4), of_two(cfg, ONE, dtype=torch.float32)
        )
    ),
    "sharded_wgrad: cfg must be ShardedConfig, got LinearConfig: call linear_wgrad": lambda cfg, params, y, kept, pending: (
        dist.sharded.wgrad(pending, LAYER)
    ),
    "sharded_wgrad: cfg must be ShardedConfig, got None": lambda *_: dist.sharded.wgrad(None, None),
    "sharded_bwd: cfg must be ShardedConfig, got LinearConfig: call linear_bwd": lambda cfg, params, y, kept, pending: (
        dist.sharded.bwd(kept, y, LAYER)
    ),
    "sharded_wgrad: into.weight must be [6, 4], got [7, 4]": lambda cfg, params, y, kept, pending: dist.sharded.wgrad(
        pending, cfg, into=OTHER
    ),
    "sharded_bwd: into.weight must be [6, 4], got [7, 4]": lambda cfg, params, y, kept, pending: dist.sharded.bwd(
        kept, y, cfg, into=OTHER
    ),
    "specs_of: sinks must be of a size that 'dp' divides, got [3]": lambda *_: dist.specs_of(
        dist.sharded, dist.ShardedConfig(dist.context_sink_attention, SINKS, axis=TWO)
    ),
    f"sharded_wgrad: {NO_ACCUMULATORS}": lambda cfg, params, y, kept, pending: dist.sharded.wgrad(
        pending, of_two(cfg, stage=2), into=params
    ),
    f"sharded_bwd: {NO_ACCUMULATORS}": lambda cfg, params, y, kept, pending: dist.sharded.bwd(
        kept, y, of_two(cfg, stage=2), into=params
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_wrong_call_of_a_sharded_layer_is_refused_by_name(said):
    with pytest.raises((ValueError, TypeError)) as raised:
        REFUSED[said](*halves())
    assert str(raised.value) == said


def test_accumulators_are_checked_where_no_gradient_is_asked_for():
    with pytest.raises(ValueError, match=r"^sharded_wgrad: into\.weight must be \[6, 4\], got \[7, 4\]$"):
        dist.sharded.wgrad(None, halves()[0], into=OTHER)
