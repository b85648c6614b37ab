"""Drawn ties of drawn chains, under drawn masks: the gradients of one shared tensor, equal to autograd's, or a `ValueError`."""

import random as draws
import re

import pytest
import torch

import funcops as fo
from funcops import ChainConfig, Needs, RMSNormParams, Step, batch_wgrads, chain, differentiable, donate, random, with_policy
from funcops.engine.trees import at, paths, put, tensors, tree_map, tree_map_tensors, tree_map_with_path

D, SEEDS = 3, range(80)
PLAIN = {
    "linear": (fo.linear, fo.LinearConfig(D, D)),
    "bare": (fo.linear, fo.LinearConfig(D, D, bias=False)),
    "norm": (fo.rms_norm, fo.RMSNormConfig(D)),
    "layer_norm": (fo.layer_norm, fo.LayerNormConfig(D)),
    "gelu": (fo.activation, fo.ActivationConfig("gelu")),
}


def drawn_step(rng, name, depth):
    kind = rng.choice([*PLAIN, *PLAIN, "chain", "skip", "repeat"] if depth else list(PLAIN))
    if kind in PLAIN:
        return Step(name, *PLAIN[kind])
    body = ChainConfig(steps=tuple(drawn_step(rng, f"i{i}", depth - 1) for i in range(rng.randint(1, 2))))
    if kind == "chain":
        return Step(name, chain, body)
    if kind == "skip":
        return Step(name, fo.skip, fo.SkipConfig(chain, body))
    return Step(name, fo.repeat, fo.RepeatConfig(chain, body, 2))


def tied_inside():
    steps = (Step("i0", *PLAIN["bare"]), Step("i1", *PLAIN["linear"]))
    return Step("inside", chain, ChainConfig(steps=steps, ties={"i1.weight": "i0.weight"}))


def drawn_chain(rng):
    steps = [drawn_step(rng, f"s{i}", 1) for i in range(rng.randint(2, 4))]
    if rng.random() < 0.3:
        steps.append(tied_inside())
    return ChainConfig(steps=tuple(steps), recompute=rng.random() < 0.5)


def drawn_ties(rng, known):
    every = [*known, *({path.partition(".")[0] for path in known}), "nowhere.weight"]
    likely = [path for path, t in known.items() if t is not None]
    ties = []
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(likely if likely and rng.random() < 0.97 else every)
        alike = [one for one in likely if known.get(path) is not None and one != path and known[one].shape == known[path].shape]
        ties.append((path, rng.choice(alike if alike and rng.random() < 0.97 else every)))
    return tuple(ties)


def sources_of(ties, known):
    """The untied source of every tied path; None for meaningless ties."""
    given = dict(ties)
    if len(given) != len(ties) or any(known.get(path) is None for tie in ties for path in tie):
        return None
    found = {}
    for path in given:
        root, steps = given[path], 0
        while root in given and steps <= len(given):
            root, steps = given[root], steps + 1
        if root in given or known[root].shape != known[path].shape:
            return None
        found[path] = root
    return found


def drawn_mask(rng, known):
    every = [*known, *{path.partition(".")[0] for path in known}]
    return True if rng.random() < 0.3 else tuple({rng.choice(every) for _ in range(rng.randint(1, 3))})


def covers(mask, path):
    return mask is True or any(path == one or path.startswith(one + ".") for one in mask)


def only_tied(mask, sources, known):
    """Whether all leaves below a path of the mask are tied."""
    tied = {
        path: path in sources or path == "inside.i1.weight" for path, t in known.items() if t is not None or "inside.i1.w" in path
    }
    below = [[tied[path] for path in tied if covers((one,), path)] for one in (() if mask is True else mask)]
    return any(one and all(one) for one in below)


def by_autograd(cfg, sources, params, x, dy):
    """Gradients of the untied chain's params, in which tied paths hold their source's own tensor."""
    leaves = tree_map_tensors(lambda t: t.detach().clone().requires_grad_(), params)
    own = x.clone().requires_grad_()
    full = leaves
    for path, source in sources.items():
        full = put(full, path, at(leaves, source))
    differentiable(chain)(full, own, cfg).backward(dy)
    return tree_map(lambda t: None if t is None else t.grad if t.grad is not None else torch.zeros_like(t), leaves), own.grad


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_ties(seed):
    rng = draws.Random(seed)
    free = drawn_chain(rng)
    known = paths(chain.init(free, device="meta"))
    ties, mask = drawn_ties(rng, known), drawn_mask(rng, known)
    sources = sources_of(ties, known)
    if sources is None:
        with pytest.raises(ValueError, match="ChainConfig: ties must be "):
            ChainConfig(steps=free.steps, ties=ties)
        return
    cfg = ChainConfig(steps=free.steps, ties=dict(ties) if rng.random() < 0.5 else ties, recompute=free.recompute)
    op = rng.choice([chain, chain, with_policy(chain, "minimal")])
    generator = torch.Generator().manual_seed(seed)
    params = op.init(cfg, key=random.key(seed), dtype=torch.float64)
    assert all(at(params, path) is None for path in sources)
    x, dy = torch.randn(2, 4, D, dtype=torch.float64, generator=generator)
    needs = Needs(params=mask)
    if only_tied(mask, sources, known):
        with pytest.raises(ValueError, match="chain_fwd: needs.params must be paths that are not tied"):
            op.bwd(op.fwd(params, x, cfg, needs=needs)[1], dy, cfg)  # what runs again is asked in the backward
        return
    want, dwant = by_autograd(free, sources, params, x, dy)
    want = tree_map_with_path(lambda path, t: t if covers(mask, path) else None, want)
    sums = tree_map(lambda t: None if t is None else torch.zeros_like(t), params)
    ways = [
        lambda r: op.bwd(r, dy, cfg),
        lambda r: (lambda half: (op.wgrad(half[1], cfg), half[0]))(op.dgrad(r, dy, cfg)),
        lambda r: op.bwd(donate(r), dy, cfg),
        lambda r: op.bwd(r, dy, cfg, into=sums),
    ]
    ends = {(source, one.partition(".")[0]) for path, source in sources.items() for one in (path, source)}
    within = len(ends) < len(sources) + len(set(sources.values()))
    for way in ways:
        try:
            dparams, dx = way(op.fwd(params, x, cfg, needs=needs)[1])
        except ValueError as error:  # one accumulator for two leaves of one step
            assert within and way is ways[-1] and re.search("_bwd: into must be None: .* of one step are one tensor", str(error))
            assert all(t is None or not t.any() for t in paths(sums).values()), "nothing was added"
            continue
        if dparams is sums:
            dparams = tree_map(lambda t, like: None if like is None else t, dparams, want)
        torch.testing.assert_close((paths(dparams), dx), (paths(want), dwant))


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_drawn_ties_under_autograd(seed):
    rng = draws.Random(seed)
    free = drawn_chain(rng)
    known = paths(chain.init(free, device="meta"))
    ties = drawn_ties(rng, known)
    sources = sources_of(ties, known)
    if sources is None:
        return
    cfg = ChainConfig(steps=free.steps, ties=ties)
    params = chain.init(cfg, key=random.key(seed), dtype=torch.float64)
    x, dy = torch.randn(2, 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    want, dwant = by_autograd(free, sources, params, x, dy)
    own = tree_map_tensors(lambda t: t.clone().requires_grad_(rng.random() < 0.7), params)
    given = x.clone().requires_grad_()
    differentiable(chain)(own, given, cfg).backward(dy)
    torch.testing.assert_close(given.grad, dwant)
    for path, t in paths(own).items():
        if t is not None:
            assert (t.grad is not None) == t.requires_grad, path
            if t.requires_grad:
                torch.testing.assert_close(t.grad, at(want, path))


def test_accumulators_of_ties_within_a_step_are_refused_by_what_they_are():
    """Whichever function would add to one of them twice, also to sums that it made itself; and one that is given at a tied path."""
    steps = (Step("a", fo.layer_norm, fo.LayerNormConfig(D)), Step("b", fo.rms_norm, fo.RMSNormConfig(D)))
    for where, ties in (("within", {"a.bias": "a.weight"}), ("through another", {"a.bias": "b.weight", "a.weight": "b.weight"})):
        cfg = ChainConfig(steps=steps, ties=ties)
        params = chain.init(cfg, key=random.key(0))
        sums = tree_map_tensors(torch.zeros_like, params)
        ways = {
            "bwd": lambda r, cfg=cfg, sums=sums: chain.bwd(r, torch.ones(2, D), cfg, into=sums),
            "wgrad": lambda r, cfg=cfg, sums=sums: chain.wgrad(chain.dgrad(r, torch.ones(2, D), cfg)[1], cfg, into=sums),
            "sums": lambda r, cfg=cfg, sums=sums: batch_wgrads(chain, [chain.dgrad(r, torch.ones(2, D), cfg)[1]], cfg, into=sums),
            "own sums": lambda r, cfg=cfg: batch_wgrads(chain, [chain.dgrad(r, torch.ones(2, D), cfg)[1]], cfg),
        }
        for name, way in ways.items():
            said = "into must be None: a.* and a.* of one step are one tensor, whose gradients only a wgrad or bwd without into"
            with pytest.raises(ValueError, match=said):
                way(chain.fwd(params, torch.ones(2, D), cfg)[1])
            assert not any(t.any() for t in tensors(sums)), (where, name)
    cfg = ChainConfig(steps=steps, ties={"b.weight": "a.weight"})
    params = chain.init(cfg, key=random.key(0))
    for nested in (False, True):
        outer = ChainConfig(steps=(Step("c", chain, cfg),)) if nested else cfg
        own = {"c": params} if nested else params
        sums = tree_map_tensors(torch.zeros_like, own)
        (sums["c"] if nested else sums)["b"] = RMSNormParams(torch.zeros(D))
        with pytest.raises(ValueError, match="into.(c.)?b"):
            chain.bwd(chain.fwd(own, torch.ones(2, D), outer)[1], torch.ones(2, D), outer, into=sums)
        assert not any(t.any() for t in tensors(sums))


def test_bad_ties_raise():
    linear = [Step(name, *PLAIN["linear"]) for name in "abcd"]
    wide = Step("w", fo.linear, fo.LinearConfig(D, 5))
    for ties, match in (
        ({"a.weight": "a.weight"}, r"to other paths, got 'a.weight' tied to itself \(a.weight -> a.weight\)"),
        (
            {"a.weight": "b.weight", "b.weight": "a.weight"},
            r"to other paths, got 'a.weight' tied to itself \(a.weight -> b.weight -> a.weight\)",
        ),
        ((("a.weight", "b.weight"), ("a.weight", "c.weight")), "one source for each path, got two for 'a.weight'"),
        (
            {"w.weight": "a.weight"},
            r"between leaves of one shape and dtype, got w.weight float32\[5, 3\] and a.weight float32\[3, 3\]",
        ),
        ({"a": "b"}, "paths among a.weight, .*, got 'a'"),
        ((("a.weight", "b.weight", "c.weight"),), "pairs of a path and its source, got"),
    ):
        with pytest.raises(ValueError, match=f"ChainConfig: ties must be {match}"):
            ChainConfig(steps=(*linear, wide), ties=ties)
    for other in (3, "a.weight", None, {"a.weight"}):
        with pytest.raises(TypeError, match="ChainConfig: ties must be Mapping or tuple or list, got"):
            ChainConfig(steps=(*linear, wide), ties=other)
    cfg = ChainConfig(steps=tuple(linear), ties={"c.weight": "b.weight", "b.weight": "a.weight", "d.weight": "c.weight"})
    assert cfg.ties == (("b.weight", "a.weight"), ("c.weight", "a.weight"), ("d.weight", "a.weight"))
    assert ChainConfig(steps=tuple(linear), ties=cfg.ties) == cfg
