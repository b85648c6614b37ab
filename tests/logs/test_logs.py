"""Values out of a backward by name: against torch's autograd in float64, and however the backward is called."""

import dataclasses
import random as python_random

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    Compress,
    CrossEntropyConfig,
    EmbeddingConfig,
    InterleaveConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    Policy,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    add,
    batch_wgrads,
    chain,
    checking,
    cross_entropy,
    differentiable,
    donate,
    embedding,
    explain,
    interleave,
    linear,
    parallel,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    value_and_grad,
    with_policy,
)
from funcops.engine.trees import leaves, paths, put, same_structure, tensors, tree_map_tensors
from funcops.graphs import graphed
from funcops.logs import LoggedConfig, logged, logs_init, logs_needs, split_logs, with_logs
from funcops.schedule import gpipe, one_f_one_b, run, zb_h1

D, WIDTH = torch.float64, 4
NORMS = ("x_norm", "y_norm", "dy_norm", "dx_norm", "dw_norm")


def body(draw, depth):
    """A drawn chain that maps [*, WIDTH] to itself."""
    steps = []
    for i in range(draw.randint(1, 3)):
        kind = draw.choice(["linear", "norm", "act", *(["skip", "branches", "layers"] if depth else [])])
        op, cfg = {
            "linear": lambda: (linear, LinearConfig(WIDTH, WIDTH, bias=draw.random() < 0.5)),
            "norm": lambda: (rms_norm, RMSNormConfig(WIDTH)),
            "act": lambda: (activation, ActivationConfig("silu")),
            "skip": lambda: (skip, SkipConfig(chain, body(draw, depth - 1))),
            "branches": lambda: (chain, branches(draw, depth - 1)),
            "layers": lambda: (repeat, RepeatConfig(chain, body(draw, depth - 1), times=2, stacked=draw.random() < 0.5)),
        }[kind]()
        steps.append(Step(f"{kind}{i}", op, cfg))
    return ChainConfig(steps=tuple(steps))


def branches(draw, depth):
    """Two branches of one x, and their sum."""
    two = tuple(Step(name, chain, body(draw, depth)) for name in ("left", "right"))
    return ChainConfig(steps=(Step("both", parallel, ParallelConfig(branches=two)), Step("sum", add, add.config())))


def model_of(seed, depth=2):
    draw = python_random.Random(seed)
    return ChainConfig(steps=(*body(draw, depth).steps, Step("last", linear, LinearConfig(WIDTH, WIDTH))))


def drawn(cfg, seed=0):
    made = torch.Generator().manual_seed(seed)
    params = chain.init(cfg, key=random.key(0), dtype=D)
    return tree_map_tensors(lambda t: torch.randn(t.shape, generator=made, dtype=D), params)


class Plain:
    """A model in torch, which notes x and y of each step, by path, as values of their own."""

    def __init__(self):
        self.seen = {}

    def __call__(self, op, cfg, params, x, path):
        # a leaf of the graph for this step alone: the gradient of x is not summed with other readers'
        x = [t * 1 for t in x] if isinstance(x, list) else x * 1
        y = self.step(op, cfg, params, x, path)
        for t in (*(x if isinstance(x, list) else [x]), *(y if isinstance(y, list) else [y])):
            t.retain_grad()
        # the outermost of a skip and its body
        self.seen[path] = x, y, params
        return [t * 1 for t in y] if isinstance(y, list) else y * 1

    def step(self, op, cfg, params, x, path):
        if op is linear:
            return torch.nn.functional.linear(x, params.weight, params.bias)
        if op is rms_norm:
            return torch.nn.functional.rms_norm(x, (WIDTH,), params.weight, cfg.eps)
        if op is activation:
            return torch.nn.functional.silu(x)
        if op is add:
            return x[0] + x[1]
        if op is skip:
            return x + self(cfg.op, cfg.cfg, params, x, path)
        if op is parallel:
            return [self(one.op, one.cfg, params[one.name], x, f"{path}.{one.name}") for one in cfg.branches]
        if op is repeat:
            for i in range(cfg.times):
                own = tree_map_tensors(lambda t, i=i: t[i], params) if cfg.stacked else params[i]
                x = self(cfg.op, cfg.cfg, own, x, f"{path}.{i}")
            return x
        for one in cfg.steps:
            x = self(one.op, one.cfg, params[one.name], x, f"{path}.{one.name}".lstrip("."))
        return x


def norm(found):
    return torch.stack([t.norm() for t in found]).norm() if found else torch.zeros((), dtype=D)


def plain_logs(cfg, params, x):
    """The five norms of each step, by path, from autograd; of a step of a stacked repeat for its own layer."""
    leaf = tree_map_tensors(lambda t: t.clone().requires_grad_(), params)
    views = Plain()
    y = views.step(chain, cfg, leaf, x.clone().requires_grad_(), "")
    for _, _, own in views.seen.values():
        for t in tensors(own):
            t.retain_grad()
    y.backward(torch.ones_like(y))
    listed = {path: tuple(t if isinstance(t, list) else [t] for t in seen[:2]) for path, seen in views.seen.items()}
    return {
        path: {
            "x_norm": norm(xs),
            "y_norm": norm(ys),
            "dy_norm": norm([t.grad for t in ys]),
            "dx_norm": norm([t.grad for t in xs]),
            "dw_norm": norm([t.grad for t in tensors(views.seen[path][2])]),
        }
        for path, (xs, ys) in listed.items()
    }


def by_layer(found):
    """The logs with a path for each layer, a place of "*" in the order of the dimensions."""
    made = {}
    for key, named in found.items():
        for name, t in named.items():
            if name != "runs":
                for index in [()] if t.dim() == 0 else list(torch.cartesian_prod(*map(torch.arange, t.shape)).reshape(-1, t.dim())):
                    numbers = iter(index)
                    path = ".".join(str(int(next(numbers))) if part == "*" else part for part in key.split("."))
                    made.setdefault(path, {})[name] = t[tuple(int(i) for i in index)]
    return made


def close(got, want):
    assert got.keys() <= want.keys() and got
    for path, named in got.items():
        for name, t in named.items():
            torch.testing.assert_close(
                t.to(D), want[path][name], rtol=1e-9, atol=1e-12, msg=lambda m, p=path, n=name: f"{p} {n}: {m}"
            )


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 5 else ()) for seed in range(60)])
def test_norms_of_every_step_are_autograds(seed):
    model = model_of(seed)
    params, x = drawn(model), torch.randn(3, WIDTH, dtype=D)
    cfg = with_logs(model, {"*": NORMS})
    work, dy = logs_init(params, cfg), torch.ones(3, WIDTH, dtype=D)
    y, residuals = chain.fwd(work, x, cfg)
    dparams, dx = chain.bwd(residuals, dy, cfg)
    grads, found = split_logs(dparams, cfg)
    close(by_layer(found), plain_logs(model, params, x))
    want, kept = chain.fwd(params, x, model)
    assert torch.equal(y, want)
    plain, want_dx = chain.bwd(kept, dy, model)
    assert same_structure(grads, params) and torch.equal(dx, want_dx)
    assert all(torch.equal(a, b) for a, b in zip(tensors(grads), tensors(plain), strict=True))


MODEL = ChainConfig(
    steps=(
        Step("embed", embedding, EmbeddingConfig(16, WIDTH)),
        Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, ChainConfig(steps=model_of(3, 0).steps)), times=3)),
        Step("head", linear, LinearConfig(WIDTH, 16)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    ),
    extras=("labels",),
)
LOGS = {"layers.*": ("dx_norm", "dw_norm"), "head": ("x_norm", "dy_norm"), "layers.*.last": ("dw_norm",)}
RUNS = 3


def x_of(seed):
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, (5,), generator=made)
    return WithExtras(ids, {"labels": ids.roll(-1)})


def alone(params, cfg, x):
    """The logs of one microbatch."""
    y, residuals = chain.fwd(logs_init(params, cfg), x, cfg)
    return split_logs(chain.bwd(residuals, torch.ones_like(y), cfg)[0], cfg)[1]


def equal_by_run(found, params):
    one = with_logs(MODEL, LOGS)
    for m in range(RUNS):
        want = alone(params, one, x_of(m))
        assert found.keys() == want.keys()
        for path, named in want.items():
            for name, t in named.items():
                torch.testing.assert_close(found[path][name][..., m], t, rtol=1e-12, atol=0, msg=f"{path}.{name}, run {m}")


def whole(params, xs, cfg, sums):
    for x in xs:
        y, residuals = chain.fwd(params, x, cfg)
        chain.bwd(donate(residuals), torch.ones_like(y), cfg, into=sums)


def halves(params, xs, cfg, sums):
    pendings = []
    for x in xs:
        y, residuals = chain.fwd(params, x, cfg)
        pendings.append(chain.dgrad(residuals, torch.ones_like(y), cfg)[1])
    for pending in pendings:
        chain.wgrad(donate(pending), cfg, into=sums)


def joined(params, xs, cfg, sums):
    pendings = []
    for x in xs:
        y, residuals = chain.fwd(params, x, cfg)
        pendings.append(chain.dgrad(residuals, torch.ones_like(y), cfg)[1])
    batch_wgrads(chain, pendings, cfg, into=sums)


def recomputed(params, xs, cfg, sums):
    op = with_policy(chain, "minimal")
    for x in xs:
        y, residuals = op.fwd(params, x, cfg)
        op.bwd(residuals, torch.ones_like(y), cfg, into=sums)


def captured(params, xs, cfg, sums):
    def step(params, xs):
        own = tree_map_tensors(torch.zeros_like, params)
        whole(params, xs, cfg, own)
        return own

    for total, t in zip(tensors(sums), tensors(graphed(step, params, xs, warmup=0)(params, xs)), strict=True):
        total.copy_(t)


def traced(params, xs, cfg, sums):
    one = torch.compile(lambda params, x, sums: whole(params, [x], cfg, sums), fullgraph=True, backend="aot_eager", dynamic=False)
    for x in xs:
        one(params, x, sums)


WAYS = [whole, halves, joined, recomputed, captured, pytest.param(traced, marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAYS)
def test_runs_into_one_tree_have_rows_of_their_own(way):
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS, runs=RUNS)
    work = logs_init(params, cfg)
    sums = tree_map_tensors(torch.zeros_like, work)
    way(work, [x_of(m) for m in range(RUNS)], cfg, sums)
    grads, found = split_logs(sums, cfg)
    equal_by_run(found, params)
    want = tree_map_tensors(torch.zeros_like, params)
    whole(params, [x_of(m) for m in range(RUNS)], MODEL, want)
    for got, t in zip(tensors(grads), tensors(want), strict=True):
        torch.testing.assert_close(got, t, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, zb_h1])
def test_a_schedule_returns_them_by_microbatch(schedule):
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS, runs=RUNS)
    one = torch.ones((), dtype=D)
    ran = run(schedule(len(cfg.steps), RUNS), logs_init(params, cfg), [x_of(m) for m in range(RUNS)], cfg, [one] * RUNS)
    equal_by_run(split_logs(ran.dparams, cfg)[1], params)


@pytest.mark.parametrize("runs", [1, 2])
def test_more_runs_than_rows_are_means_that_say_so(runs):
    """The last row has the mean of the runs that came to it, and their number."""
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS, runs=runs)
    work = logs_init(params, cfg)
    sums = tree_map_tensors(torch.zeros_like, work)
    whole(work, [x_of(m) for m in range(RUNS)], cfg, sums)
    want = [alone(params, with_logs(MODEL, LOGS), x_of(m))["head"]["dy_norm"] for m in range(RUNS)]
    found = split_logs(sums, cfg)[1]["head"]
    last = torch.stack(want[runs - 1 :]).mean()
    torch.testing.assert_close(found["dy_norm"].reshape(-1)[-1], last)
    assert found["runs"].reshape(-1).tolist() == [1.0] * (runs - 1) + [float(RUNS - runs + 1)]


def test_autograd_puts_them_in_grad():
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS)
    leaf = tree_map_tensors(lambda t: t.clone().requires_grad_(), logs_init(params, cfg))
    for m in range(2):
        differentiable(chain)(leaf, x_of(m), cfg).backward()
    found = split_logs(tree_map_tensors(lambda t: t.grad, leaf), cfg)[1]
    want = [alone(params, cfg, x_of(m)) for m in range(2)]
    for path, named in found.items():
        for name, t in named.items():
            mean = 2.0 * torch.ones_like(t) if name == "runs" else (want[0][path][name] + want[1][path][name]) / 2
            torch.testing.assert_close(t, mean)


def test_only_what_is_asked_is_computed():
    """Frozen params have logs if their needs ask for them; without, the model runs as if it had none."""
    params, cfg, x = drawn(MODEL), with_logs(MODEL, LOGS), x_of(0)
    work = logs_init(params, cfg)
    frozen = Needs(x=False, params=("head.weight",))
    _, without = split_logs(value_and_grad(chain, needs=frozen)(work, x, cfg)[1], cfg)
    assert all(t.isnan().all() for named in without.values() for name, t in named.items() if name != "runs")
    grads, found = split_logs(value_and_grad(chain, needs=logs_needs(cfg, frozen))(work, x, cfg)[1], cfg)
    assert {path for path, t in paths(grads).items() if t is not None} == {"head.weight"}
    want = alone(params, cfg, x)
    assert torch.equal(found["layers.*"]["dx_norm"], want["layers.*"]["dx_norm"])
    assert found["layers.*"]["dw_norm"].eq(0).all() and found["head"]["runs"] == 1  # no gradient of a frozen weight
    assert logs_needs(cfg) is Needs.ALL


def test_a_dx_that_only_a_log_needs_is_not_returned():
    cfg = LoggedConfig(linear, LinearConfig(WIDTH, WIDTH), ("dx_norm",))
    params, x = logged.init(cfg, key=random.key(0), dtype=D), torch.randn(3, WIDTH, dtype=D)
    _, residuals = logged.fwd(params, x, cfg, needs=Needs(x=False))
    dparams, dx = logged.bwd(residuals, x, cfg)
    assert dx is None
    torch.testing.assert_close(dparams.logs, torch.tensor([[1.0, (x @ params.weight).norm()]], dtype=D))
    assert params.logs.dtype is D and logged.init(cfg, key=random.key(0), dtype=torch.bfloat16).logs.dtype is torch.float32


def test_values_that_are_not_finite_stay_in_their_row():
    cfg = LoggedConfig(linear, LinearConfig(1, 1, bias=False), ("dy_norm",), runs=3)
    params = logged.init(cfg, key=random.key(0), dtype=D)
    sums = tree_map_tensors(torch.zeros_like, params)
    for value in (1.0, torch.nan, 2.0):
        _, residuals = logged.fwd(params, torch.ones(1, 1, dtype=D), cfg)
        logged.bwd(residuals, torch.full((1, 1), value, dtype=D), cfg, into=sums)
    assert sums.logs[:, 0].eq(1).all() and sums.logs[[0, 2], 1].tolist() == [1.0, 2.0] and sums.logs[1, 1].isnan()


def test_a_model_without_logs_is_untouched():
    """A config with logs of one step runs the others in the same rows."""
    text = str(explain(MODEL, rows=True))
    cfg = with_logs(MODEL, {"head": ("dy_norm",)})
    assert str(explain(MODEL, rows=True)) == text
    for ours, theirs in zip(cfg.steps, MODEL.steps, strict=True):
        assert (ours.cfg.cfg if ours.name == "head" else ours) == (theirs.cfg if ours.name == "head" else theirs)


BARE = dataclasses.replace(MODEL.steps[2], cfg=LinearConfig(WIDTH, 16, bias=False))
UNJOINED = dataclasses.replace(MODEL, steps=(*MODEL.steps[:2], BARE, MODEL.steps[3]))
JOINED = dataclasses.replace(UNJOINED, joined=("loss",))


def test_a_head_that_runs_as_one_with_its_loss():
    """The values of its x, dx and dw are what a head alone has; a glob leaves out the others."""
    params, asked = drawn(UNJOINED), {"head": ("x_norm", "dx_norm", "dw_norm")}
    apart, joined = [alone(params, with_logs(model, asked), x_of(0))["head"] for model in (UNJOINED, JOINED)]
    assert list(apart) == list(joined) == ["x_norm", "dx_norm", "dw_norm", "runs"]
    for name, t in apart.items():
        torch.testing.assert_close(joined[name], t)
    cfg = with_logs(JOINED, {"*": ("dy_norm",)})
    assert "head" not in alone(params, cfg, x_of(0)) and cfg.joined == ("loss",)


def mean_gate(params, x, y, cfg):
    return y.mean()


def kept_square(residuals, dy, cfg):
    return (residuals.x * dy).sum()


def test_an_author_declares_values():
    own = linear._replace(logs=(mean_gate, kept_square))
    model = ChainConfig(steps=(Step("up", own, LinearConfig(WIDTH, WIDTH)), Step("act", activation, ActivationConfig("silu"))))
    cfg = with_logs(model, {"up": ("kept_square", "mean_gate")})
    params, x = chain.init(cfg, key=random.key(0), dtype=D), torch.randn(3, WIDTH, dtype=D)
    y, residuals = chain.fwd(params, x, cfg)
    found = split_logs(chain.bwd(donate(residuals), torch.ones_like(y), cfg)[0], cfg)[1]["up"]
    inner = torch.nn.functional.linear(x, params["up"].weight, params["up"].bias).requires_grad_()
    torch.nn.functional.silu(inner).sum().backward()
    assert list(found) == ["kept_square", "mean_gate", "runs"]
    torch.testing.assert_close(found["mean_gate"], inner.mean().detach())
    torch.testing.assert_close(found["kept_square"], (x * inner.grad).sum())
    # an op made of it keeps what it keeps: its logs of the backward go
    assert remat(own).logs == (mean_gate,)


def wrong(call, said, error=ValueError):
    with pytest.raises(error, match=said):
        call()


def two_numbers(params, x, y, cfg):
    return y.reshape(-1)[:2]


def test_what_is_not_served_is_refused_by_name():
    wrong(lambda: with_logs(MODEL, {"hed": ("dx_norm",)}), r"with_logs: logs must be globs over .*head.*, got 'hed'")
    wrong(
        lambda: with_logs(MODEL, {"head": ("dz_norm",)}),
        r"head: LoggedConfig: logs must be names among x_norm, .*, got \('dz_norm',\)",
    )
    wrong(
        lambda: with_logs(MODEL, {"layers": ("dx_norm",)}),
        r"with_logs: logs must be .* body of this repeat, 'layers.\*', got 'layers'",
    )
    wrong(lambda: with_logs(MODEL, {"head": "dx_norm"}), r"with_logs: logs must be globs over paths, each with a tuple of names")
    twice = with_logs(MODEL, LOGS)
    wrong(lambda: with_logs(twice, LOGS), r"with_logs: cfg must be one without logs, got one with logs of layers.\*")
    for name in ("head", "loss"):
        said = (
            rf"with_logs: logs must be of the first step that runs as one with a loss \(joined\), .*, got '{name}': \('dy_norm',\)"
        )
        wrong(lambda name=name: with_logs(JOINED, {name: ("dy_norm",)}), said)
    turns = ChainConfig(steps=(Step("turns", interleave, InterleaveConfig(chain, model_of(3, 0))),))
    said = r"with_logs: logs must be globs over turns, of .*, got 'turns.last', inside InterleaveConfig at 'turns', which divides"
    wrong(lambda: with_logs(turns, {"turns.last": ("dx_norm",)}), said)
    cfg = with_logs(MODEL, {"embed": ("dx_norm",)})
    params = drawn(MODEL)
    wrong(
        lambda: chain.fwd(logs_init(params, cfg), x_of(0), cfg),
        r"embed: logged_fwd: logs must be without 'dx_norm', as x has no float",
    )
    wrong(
        lambda: chain.fwd(params, x_of(0), twice),
        r"logged_fwd: params must be .* with the leaf 'logs', as logs_init makes it",
        TypeError,
    )
    wrong(lambda: split_logs(params["head"], twice), r"split_logs: dparams must be a tree with 'layers.0'", TypeError)
    wrong(lambda: split_logs({"embed": None}, twice), r"split_logs: dparams must be a tree with layers.\*, .*head", TypeError)
    wrong(lambda: split_logs(params, MODEL), r"split_logs: cfg must be one from with_logs, got one without logs")
    named = ChainConfig(steps=(Step("logs", linear, LinearConfig(WIDTH, WIDTH)),))
    outer = ChainConfig(steps=(Step("inner", chain, named),))
    wrong(lambda: with_logs(outer, {"inner": ("dx_norm",)}), r"inner: LoggedConfig: op must be one whose params are .*, got chain")
    bad = linear._replace(logs=(lambda a, b: a,))
    wrong(
        lambda: LoggedConfig(bad, LinearConfig(2, 2), ("x_norm",)),
        r"op 'linear', logs: .* must be a function of \(params, x, y, cfg\)",
    )
    cfg = LoggedConfig(linear._replace(logs=(two_numbers,)), LinearConfig(WIDTH, WIDTH), ("two_numbers",))
    params = logged.init(cfg, key=random.key(0))
    wrong(lambda: logged.fwd(params, torch.ones(3, WIDTH), cfg), r"linear, log 'two_numbers': its value must be \[\], got .*\[2\]")


def test_nothing_is_added_before_an_accumulator_is_refused():
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS, runs=2)
    work = logs_init(params, cfg)
    sums = tree_map_tensors(torch.zeros_like, work)
    sums = put(sums, "head.logs", torch.zeros(1, 3, dtype=D))
    y, residuals = chain.fwd(work, x_of(0), cfg)
    wrong(
        lambda: chain.bwd(residuals, torch.ones_like(y), cfg, into=sums),
        r"chain_bwd: into.head.logs must be \[2, 3\], got \[1, 3\]",
    )
    assert all(not t.any() for t in leaves(sums) if t is not None)


def test_residuals_of_a_logged_step_are_reported_and_guarded():
    params, cfg = drawn(MODEL), with_logs(MODEL, LOGS)
    with checking():
        y, residuals = chain.fwd(logs_init(params, cfg), x_of(0), cfg)
        assert "head.logs.values" in str(report(residuals, params)) and "head.body.x" in str(report(residuals, params))
        params["head"].weight.mul_(1)
        with pytest.raises(RuntimeError, match=r"head.*weight"):
            chain.bwd(residuals, torch.ones_like(y), cfg)


def test_a_policys_rules_are_as_without_logs():
    """Their paths stay, while a report names the residuals of a logged step by its body."""
    steps = (Step("up", linear, LinearConfig(8, 8)), Step("act", activation, ActivationConfig("gelu")))
    plain = ChainConfig(steps=(*steps, Step("down", linear, LinearConfig(8, 8))))
    params, x = drawn(plain), torch.ones(64, 8, dtype=D)
    for cfg, path in ((plain, "act.x"), (with_logs(plain, {"act": ("dx_norm",)}), "act.body.x")):
        own = params if cfg is plain else logs_init(params, cfg)
        kept = report(with_policy(chain, Policy({"act.x": Compress("fp8")})).fwd(own, x, cfg)[1], own, x)
        assert [row.path for row in kept.rows if "fp8" in str(row.dtype)] == [path]
