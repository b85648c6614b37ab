"""`stages_from_module`: pipelines of stages cut from unmodified modules, against autograd in float64, to the bit."""

import json
import subprocess
import sys
from pathlib import Path

import cut_models
import optree
import pytest
import torch
from cut_models import FOUR, M
from own_models import CFG, Twice, draw
from products import Products
from torch import nn

from funcops import Needs, Policy, Recompute, WithExtras, chain, differentiable, remat, report, stages_from_module, with_policy
from funcops.adapters.flatten import unflatten
from funcops.adapters.pipelining.boundaries import Boundaries
from funcops.engine.trees import tensors
from funcops.schedule import run

ROOT = Path(__file__).parents[2]
LAYERS = ["layers.1", "layers.2", "layers.3"]


NO_X = Needs(x=False, params=True)


def total(dparams):
    """The gradients of all stages by name, added where several have one."""
    found = {}
    for own in dparams.values():
        for name, dparam in own.items():
            if dparam is not None:
                found[name] = found[name] + dparam if name in found else dparam
    return found


class Early(nn.Module):
    """An x that all stages read, sums of two values that cross, an early result, and a backward of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, scale):
        first = self.a(x)
        second = self.b(first) * scale + x
        third = self.c(first + second + scale)
        return {"last": self.d(Twice.apply(third + first)) * scale, "first": first, "whole": third}


class Added(nn.Module):
    """Two values that cross are only added, so both have one gradient; and one is summed, so its gradient is expanded."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        first = self.a(x)
        second = self.b(first)
        third = self.c(second)
        return self.d(x) + (second + third) + first.sum()


class InPlace(nn.Module):
    """Writes to values that cross, and to views of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        view = h[:, :3]
        h.mul_(2.0)
        g = self.b(x).mul_(1.5)
        view.add_(g[:, 3:])
        k = self.c(g + h)
        g[:, ::2] += k[:, 1::2]
        return self.d(g).add_(h) + view.sum()


class Fixed(nn.Module):
    """Frozen parameters, and one of two results without a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.b.requires_grad_(False)
        self.a.requires_grad_(False)

    def forward(self, x):
        h = self.b(self.a(x))
        best = h.detach().argmax(-1)
        return self.d(self.c(h)), best


def plain(tree):
    """The leaves of a tree in the order in which they were given, without numbers."""
    if isinstance(tree, dict):
        return [one for part in tree.values() for one in plain(part)]
    if isinstance(tree, tuple):
        return [one for part in tree for one in plain(part)]
    return [tree]


LETTERS = ["b", "c", "d"]
MODELS = {
    "language": (
        cut_models.Language,
        LAYERS,
        lambda seed: {"ids": cut_models.ids(seed, 2, 5), "labels": cut_models.ids(seed + 1, 2, 5)},
    ),
    "early": (Early, LETTERS, lambda seed: (draw(3, 6, seed=seed), draw(3, 1, seed=seed + 1))),
    "added": (Added, LETTERS, lambda seed: draw(3, 6, seed=seed)),
    "in place": (InPlace, LETTERS, lambda seed: draw(3, 6, seed=seed)),
    "fixed": (Fixed, LETTERS, lambda seed: draw(3, 6, seed=seed)),
    "sequential": (
        lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]),
        ["1", "2", "3"],
        lambda seed: draw(3, 6, seed=seed),
    ),
}


def model_of(name):
    torch.manual_seed(0)
    build, cuts, example = MODELS[name]
    return build().double(), cuts, example


def called(module, x):
    return module(**x) if isinstance(x, dict) else module(*x) if isinstance(x, tuple) else module(x)


def autograds(module, x):
    """The results, their gradients as they are drawn, the gradients of parameters and of x, and the products of the backward."""
    x = (
        {n: t.clone() for n, t in x.items()}
        if isinstance(x, dict)
        else tuple(t.clone() for t in x)
        if isinstance(x, tuple)
        else x.clone()
    )
    leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors(x)]
    y = called(module, x)
    ys = [t for t in tensors(y) if t.requires_grad]
    dys = [draw(*t.shape, seed=i) for i, t in enumerate(ys)]
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    wanted = [*named.values(), *[t for t in leaves if t.requires_grad]]
    with Products() as products:
        found = torch.autograd.grad(ys, wanted, dys, allow_unused=True)
    dx = iter(found[len(named) :])
    return y, dys, dict(zip(named, found, strict=False)), [next(dx) if t.requires_grad else None for t in leaves], products.count


def like(y, dys):
    """The gradients in the tree of y, None where it has none."""
    left = iter(dys)
    return optree.tree_map(lambda t: next(left) if t.requires_grad else None, y)


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_of_stages_has_autograds_gradients_to_the_bit(name):
    model, cuts, example = model_of(name)
    cfg, params = stages_from_module(model, example(1), cuts)
    assert [step.name for step in cfg.steps] == ["s0", "s1", "s2", "s3"]
    assert {n for own in params.values() for n in own} == {n for n, _ in model.named_parameters()}
    for seed in (1, 2):  # the example, and other values
        x = example(seed)
        want, dys, grads, dxs, products = autograds(model, x)
        before = [t.clone() for t in tensors((x, params))]
        y, residuals = chain.fwd(params, x, cfg)
        assert all(torch.equal(a, b) for a, b in zip(tensors(y), tensors(want), strict=True))
        with Products() as inner:
            dx, pending = chain.dgrad(residuals, like(want, dys), cfg)
        with Products() as outer:
            found = total(chain.wgrad(pending, cfg))
        assert inner.count + outer.count == products
        assert {n for n, g in found.items() if g.any()} == {n for n, g in grads.items() if g is not None and g.any()}
        assert all(torch.equal(found[n], g) for n, g in grads.items() if n in found)
        assert type(dx) is type(x) and all(
            (a is None) == (b is None) and (a is None or torch.equal(a, b))
            for a, b in zip(dx.values() if isinstance(dx, dict) else dx if isinstance(dx, tuple) else [dx], dxs, strict=True)
        )
        assert all(torch.equal(a, b) for a, b in zip(tensors((x, params)), before, strict=True))
        assert chain.fwd(params, x, cfg)[1]["s2"].traced is residuals["s2"].traced, "traced once"


@pytest.mark.parametrize("name", ["language", "added", "fixed", "sequential"])  # which torch can differentiate again
def test_each_stage_is_an_op_by_itself(name):
    """Whatever gradient comes for each of its outputs. In the whole, two values that are added have one gradient."""
    model, cuts, example = model_of(name)
    cfg, params = stages_from_module(model, example(1), cuts)
    x = example(2)
    for step in cfg.steps:
        y, residuals = step.op.fwd(params[step.name], x, CFG)
        own = residuals.traced
        leaves = [t.clone().requires_grad_(ask) for t, ask in zip(plain((params[step.name], x)), own.asked, strict=True)]
        ys = own.graphs.forward.forward(*leaves)[: len(own.graphs.outputs)]
        dys = [draw(*t.shape, seed=i) if t.is_floating_point() else None for i, t in enumerate(ys)]
        dparams, dx = step.op.bwd(residuals, unflatten(own.y_shape, dys), CFG)
        pairs = [(t, dy) for t, dy in zip(ys, dys, strict=True) if t.requires_grad]
        asked = [t for t in leaves if t.requires_grad]
        want = iter(torch.autograd.grad([t for t, _ in pairs], asked, [dy for _, dy in pairs], allow_unused=True))
        for t, got in zip(leaves, plain((dparams, dx)), strict=True):
            wanted = next(want) if t.requires_grad else None
            # None: a gradient that nobody reads in the whole
            assert got is None or torch.equal(got, wanted), step.name
            assert got is not None or wanted is None or t.shape[-1] == 1, step.name
        x = y


def test_what_crosses():
    model, cuts, example = model_of("language")
    cfg, params = stages_from_module(model, example(1), cuts)
    y, residuals = cfg.steps[0].op.fwd(params["s0"], example(2), CFG)
    # the mask and a value of all stages, without the positions, which each computes
    assert list(y) == ["labels", "unsqueeze", "bias.add", "layers.0.add"]
    dy = {name: torch.ones_like(t) if t.is_floating_point() else None for name, t in y.items()}
    _, dx = cfg.steps[0].op.bwd(residuals, dy, CFG)
    assert dx == {"ids": None, "labels": None}
    after, residuals = cfg.steps[1].op.fwd(params["s1"], y, CFG)
    assert after["labels"] is y["labels"] and after["bias.add"] is y["bias.add"]
    _, dx = cfg.steps[1].op.bwd(
        residuals, {name: torch.ones_like(t) if t.is_floating_point() else None for name, t in after.items()}, CFG
    )
    assert [name for name, dy in dx.items() if dy is not None] == ["bias.add", "layers.0.add"]
    assert "params.layers.1.norm.weight" in residuals.kept and "x.layers.0.add" in residuals.kept
    assert "layers.1.mlp.0.addmm" in str(report(residuals, params["s1"], y))


@pytest.mark.parametrize("schedule", FOUR, ids=lambda schedule: schedule.name)
def test_schedules(schedule):
    model, xs, loss, (cfg, params) = cut_models.cut("Language")
    losses, want, products = cut_models.by_autograd(model, xs, loss)
    with Products() as found:
        ran = run(schedule, params, xs, cfg)
    assert cut_models.off(ran, losses, want) == 0 and found.count == products


def test_the_boundaries_of_a_pipeline():
    model, xs, _, (cfg, params) = cut_models.cut("Language")
    found = Boundaries(cfg, xs[0], torch.float64)
    y, _ = cfg.steps[0].op.fwd(params["s0"], xs[0], CFG)
    assert {n: (t.shape, t.dtype) for n, t in found.trees[1].items()} == {n: (t.shape, t.dtype) for n, t in y.items()}
    wide = {name: torch.ones(2, 9, dtype=torch.long) for name in xs[0]}
    with pytest.raises(ValueError, match="microbatch 0 of xs, ids must be int64\\[2, 5\\], as in the example x"):
        found.check_inputs("Pipeline.step", [wide], [{}], True)
    model.eval()
    with pytest.raises(
        ValueError, match="s0_fwd: Language must be in the mode and state of a trace of its stages, .*, got another mode"
    ):
        Boundaries(cfg, xs[0], torch.float64)


class Settles(nn.Module):
    """Its first call makes what later ones read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), None

    def forward(self, x):
        if self.scale is None:
            self.scale = 2.0
        return self.b(self.a(x)) * self.scale


def test_what_the_first_call_makes_may_stay():
    module, x = Settles().double(), draw(3, 6)
    cfg, params = stages_from_module(module, x, ["b"])
    own = chain.fwd(params, x, cfg)[1]["s1"].traced
    assert chain.fwd(params, x, cfg)[1]["s1"].traced is own
    module.scale = None
    y, residuals = chain.fwd(params, x, cfg)
    assert residuals["s1"].traced is not own and torch.equal(y, module(x))


class Reduces(nn.Module):
    """Its second stage gets more than its backward reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Identity(), nn.Linear(1, 6)

    def forward(self, x):
        return self.c(self.b(self.a(x)).sum(-1, keepdim=True))


def test_a_later_stage_keeps_no_x_that_is_larger_than_what_it_needs():
    module, x = Reduces().double(), draw(3, 6)
    cfg, params = stages_from_module(module, x, ["b"])
    y, residuals = chain.fwd(params, x, cfg)
    assert report(residuals["s1"], params["s1"], x).kept_bytes == 3 * 8


def test_needs():
    model, cuts, example = model_of("language")
    cfg, params = stages_from_module(model, example(1), cuts)
    x = example(2)
    y, residuals = chain.fwd(params, x, cfg)
    dparams, _ = chain.bwd(residuals, torch.ones_like(y), cfg)
    y, fewer = chain.fwd(params, x, cfg, needs=Needs(x=False, params=["s2", "s3.head"][:1]))
    found, none = chain.bwd(fewer, torch.ones_like(y), cfg)
    assert none is None and all(torch.equal(found["s2"][n], g) for n, g in dparams["s2"].items())
    assert not tensors((found["s0"], found["s3"])) and fewer["s1"] is None
    assert report(fewer, params, x).kept_bytes < report(residuals, params, x).kept_bytes


def rerun(cfg, params, x, dy):
    y, residuals = remat(chain).fwd(params, x, cfg)
    return y, *remat(chain).bwd(residuals, dy, cfg)


def by_policy(cfg, params, x, dy):
    lean = with_policy(chain, Policy([("s1", Recompute()), ("s2", Recompute())]))
    y, residuals = lean.fwd(params, x, cfg)
    return y, *lean.bwd(residuals, dy, cfg)


def by_path(cfg, params, x, dy):
    lean = with_policy(chain, Policy([("s1.kept.layers.1.mlp.0.addmm", Recompute())]))
    y, residuals = lean.fwd(params, x, cfg)
    assert "layers.1.mlp.0.addmm" not in residuals["s1"].kept
    return y, *lean.bwd(residuals, dy, cfg)


def by_autograd(cfg, params, x, dy):
    leaves = optree.tree_map(lambda t: t.clone().requires_grad_(), params)
    y = differentiable(chain)(leaves, x, cfg)
    y.backward()
    return y, optree.tree_map(lambda t: t.grad, leaves), None


@pytest.mark.parametrize("way", [rerun, by_policy, by_path, by_autograd], ids=lambda way: way.__name__)
def test_the_rest_of_the_library_takes_them(way):
    model, cuts, example = model_of("language")
    cfg, params = stages_from_module(model, example(1), cuts)
    x = example(2)
    y, residuals = chain.fwd(params, x, cfg)
    dparams, _ = chain.bwd(residuals, torch.ones_like(y), cfg)
    got, found, _ = way(cfg, params, x, torch.ones_like(y))
    assert torch.equal(got, y) and all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(dparams), strict=True))


def test_other_shapes_and_modes_are_traced_anew():
    model, cuts, example = model_of("language")
    model.layers[1].mlp.append(nn.Dropout(0.5))
    cfg, params = stages_from_module(model.eval(), example(1), cuts)
    for rows, length in ((3, 5), (2, 9), (2, 5)):
        x = {name: cut_models.ids(rows + length, rows, length) for name in ("ids", "labels")}
        y, residuals = chain.fwd(params, x, cfg)
        assert torch.equal(y, model(**x))
        _, (dy,), grads, *_ = autograds(model, x)
        found = total(chain.bwd(residuals, dy, cfg)[0])
        assert all(torch.equal(found[n], g) for n, g in grads.items())
    assert not cfg.steps[1].op.draws(CFG)
    model.train()
    torch.manual_seed(1)
    y, _ = chain.fwd(params, x, cfg)
    torch.manual_seed(1)
    assert torch.equal(y, model(**x)) and "bernoulli" in cfg.steps[1].op.draws(CFG)


def test_a_process_without_the_first_stage():
    """It has the traces of the example, in each mode, and lays out what it is sent."""
    model, cuts, example = model_of("language")
    cfg, params = stages_from_module(model, example(1), cuts)
    y, _ = cfg.steps[0].op.fwd(params["s0"], example(2), CFG)
    first, _ = cfg.steps[1].op.fwd(params["s1"], y, CFG)
    sent = {
        name: y[name].t().contiguous().t() if y[name].dim() == 2 else y[name].transpose(0, 1).contiguous().transpose(0, 1)
        for name in sorted(y)
    }
    assert sent["layers.0.add"].stride() != y["layers.0.add"].stride()
    again, residuals = cfg.steps[1].op.fwd(params["s1"], sent, CFG)
    assert all(torch.equal(again[name], first[name]) for name in first) and residuals.kept["x.layers.0.add"].is_contiguous()
    model.eval()
    assert torch.equal(cfg.steps[1].op.fwd(params["s1"], y, CFG)[0]["layers.1.add"], first["layers.1.add"])
    for name, p in model.named_parameters():
        if name not in params["s1"]:
            p.data = p.data.new_empty(0)
    assert torch.equal(cfg.steps[1].op.fwd(params["s1"], y, CFG)[0]["layers.1.add"], first["layers.1.add"])


class Halved(nn.Module):
    """From x of several lengths a later stage gets the same shape, and does what depends on the length."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(self.a(x.mean(0, keepdim=True))) / len(x)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda dy: 2 * dy)
        return self.b(h)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.a(self.b(self.a(x)))


SMALL = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("module", "cuts", "text"),
    [
        (SMALL, ["1", "3"], "stages_from_module: cuts must be paths of modules in Sequential, got '3'"),
        (SMALL, [""], "stages_from_module: cuts must be paths of modules in Sequential, got ''"),
        (SMALL, [["1"]], r"stages_from_module: cuts must be paths of modules in Sequential, got \['1'\]"),
        (SMALL, [], "stages_from_module: cuts must be at least one path of a module, got none"),
        (SMALL, ["1", "1"], r"stages_from_module: cuts must be paths of different modules, got \['1', '1'\]"),
        (
            SMALL,
            ["2", "1"],
            "cuts must be paths of modules that run once, in the order in which they run, got '2', which runs after '1'",
        ),
        (
            Unused(),
            ["c"],
            "cuts must be paths of modules that run once, in the order in which they run, got 'c', which does not run",
        ),
        (Unused(), ["b", "a"], "cuts must be paths of modules that run once, .*, got 'a', which runs more than once"),
        (Hooked(), ["b"], "Hooked_fwd: cuts must be places where no hook changes the gradient of what crosses, got one on a.addmm"),
        (
            Statistics(),
            ["b"],
            "Statistics_fwd: Statistics must be a module that writes to no buffer .*, got one that writes to norm.running_mean",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(module, cuts, text):
    module.train()
    before = [t.clone() for t in module.state_dict().values()]
    with pytest.raises(ValueError, match=text):
        stages_from_module(module, torch.ones(2, 6), cuts)
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks


def test_a_batch_norm_in_eval_mode():
    module = Statistics().double().eval()
    x = draw(4, 6)
    cfg, params = stages_from_module(module, x, ["norm", "b"])
    y, residuals = chain.fwd(params, x, cfg)
    grads = autograds(module, x)
    found = total(chain.bwd(residuals, grads[1][0], cfg)[0])
    assert torch.equal(y, module(x)) and all(torch.equal(found[n], g) for n, g in grads[2].items())
    module.train()
    with pytest.raises(ValueError, match="s1_fwd|Statistics_fwd: Statistics must be a module that writes to no buffer"):
        chain.fwd(params, x, cfg)


def test_what_no_trace_fits_is_refused():
    module = Halved().double()
    cfg, params = stages_from_module(module, draw(3, 6), ["b"])
    (first, second), own = cfg.steps, params["s1"]
    given, _ = first.op.fwd(params["s0"], draw(3, 6), CFG)
    with pytest.raises(
        ValueError, match=r"s1_fwd: x.a.addmm must be float64\[1, 6\], as with the example, .*, got float64\[5, 6\]"
    ):
        second.op.fwd(own, {"a.addmm": draw(5, 6)}, CFG)
    with pytest.raises(
        ValueError, match=r"s1_fwd: x.a.addmm must be float64\[1, 6\], as with the example, .*, got float32\[1, 6\]"
    ):
        second.op.fwd(own, {"a.addmm": draw(1, 6).float()}, CFG)
    with pytest.raises(
        ValueError, match="s1_fwd: x must be a dict of what the stage before gives, got missing .'x.a.addmm'., extra .'x'."
    ):
        second.op.fwd(own, draw(1, 6), CFG)
    with pytest.raises(
        ValueError, match="s1_fwd: params must be the stage's parameters by name, got missing .'b.weight', 'b.bias'., extra"
    ):
        second.op.fwd(params["s0"], given, CFG)
    with pytest.raises(TypeError, match="s1_fwd: params must be a dict of the stage's parameters by name, got None"):
        second.op.fwd(None, given, CFG)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="Halved_fwd: x must be one after which a stage computes .*, got one after which s1 computes"
        ):
            first.op.fwd(params["s0"], draw(4, 6), CFG)
    assert torch.equal(chain.fwd(params, draw(3, 6), cfg)[0], module(draw(3, 6)))
    with pytest.raises(
        TypeError, match="stages_from_module: example must be without extras, as a chain has its own, got WithExtras"
    ):
        stages_from_module(module, WithExtras(draw(3, 6), {}), ["b"])


SCRIPT = Path(__file__).with_name("four_stages.py")
TURNS = [*cut_models.HUGGING_FACE]


@pytest.mark.slow
@pytest.mark.parametrize("name", TURNS)
def test_schedules_of_hugging_faces_models(name):
    model, xs, loss, (cfg, params) = cut_models.cut(name)
    losses, want, products = cut_models.by_autograd(model, xs, loss)
    for schedule in FOUR:
        with Products() as found:
            ran = run(schedule, params, xs, cfg, needs=NO_X)
        assert cut_models.off(ran, losses, want) == 0 and found.count == products, schedule.name
        assert len(ran.ys) == M and not tensors(ran.dxs)


@pytest.mark.slow
def test_pipelines_over_processes(tmp_path):
    """One a rank or two a rank, on four processes of Gloo: each has its own copy of the model."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "Language", *TURNS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    texts = [[(tmp_path / f"{rank}{suffix}").read_text() for suffix in (".out", ".err")] for rank in range(4)]
    assert json.loads(done.stdout) == {str(rank): 0 for rank in range(4)}, texts
    for out, _ in texts:
        lines = [line.rsplit(" ", 2) for line in out.splitlines()]
        assert len(lines) == 5 * (1 + len(TURNS))
        assert all(float(error) == 0 and int(missing) == 0 for _, error, missing in lines), out
