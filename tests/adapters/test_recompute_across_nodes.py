"""`differentiable`: a node that reads the output of a norm keeps what the norm keeps, and recomputes the output."""

import gc
import pickle
from random import Random

import torch
from autograd_nodes import LINEAR, kept_bytes, leaves_of

from funcops import (
    ActivationConfig,
    ChainConfig,
    L2NormConfig,
    LayerNormConfig,
    LinearConfig,
    RMSNormConfig,
    Step,
    activation,
    chain,
    differentiable,
    l2_norm,
    layer_norm,
    linear,
    rms_norm,
)
from funcops.adapters.autograd import recompute
from funcops.trees import tensors


def norm_then_linears(monkeypatch, touch=None):
    """The bytes kept, and the gradients, of three linears after one norm; first keeping the norm's output, then recomputing it."""
    found = []
    for few in (10**9, 0):
        monkeypatch.setattr(recompute, "FEW", few)
        norm, one = RMSNormConfig(4), ChainConfig(steps=(Step("a", linear, LINEAR),))
        params = leaves_of(norm, rms_norm), leaves_of(LINEAR, linear), leaves_of(one, chain)
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def run(params=params, x=x, norm=norm, one=one):
            h = differentiable(rms_norm)(params[0], x, norm)
            h = h if touch is None else touch(h)
            y = differentiable(linear)(params[1], h, LINEAR), differentiable(chain)(params[2], h, one)
            return h, y

        (h, y), seen = kept_bytes(run)
        (y[0].square().sum() + y[1].sum()).backward(retain_graph=True)
        (y[0].square().sum() + y[1].sum()).backward()
        found.append((h.untyped_storage()._cdata in seen, [t.grad for t in (x, *tensors(params))]))
    return found


def test_a_norm_is_computed_again_across_nodes(monkeypatch):
    (kept, want), (kept_recompute, got) = norm_then_linears(monkeypatch)
    assert kept and not kept_recompute
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_changed_norm_output_is_kept(monkeypatch):
    def written(h):
        with torch.no_grad():
            return h.mul_(2)

    def turned_back(h):
        return h.flip(0).flip(0)

    def beside(h):  # as many elements of the same memory, from another place on
        both = torch.cat((h, h))
        return both.as_strided(h.shape, h.stride(), 4)

    square = [lambda h: h[:4].mT.contiguous()[:, :4], lambda h: h[:4].mT, lambda h: h[:4], lambda h: h[1:]]
    for touch in (written, lambda h: h * 2, turned_back, beside, *square):
        (kept, want), (kept_recompute, got) = norm_then_linears(monkeypatch, touch)
        assert kept and kept_recompute
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_view_of_a_whole_norm_output_is_computed_again(monkeypatch):
    """Models slice all positions, or flatten a batch of rows."""
    views = [lambda h: h[:], lambda h: h[:, slice(0, None)], lambda h: h.view(1, 5, 4), lambda h: h[None].flatten(0, 1)]
    for touch in (*views, lambda h: h.view_as(h), lambda h: h.mT.mT):
        (kept, want), (kept_recompute, got) = norm_then_linears(monkeypatch, touch)
        assert kept and not kept_recompute
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


RECOMPUTABLE = {
    "rms": (rms_norm, RMSNormConfig(4)),
    "layer": (layer_norm, LayerNormConfig(4)),
    "l2": (l2_norm, L2NormConfig(dim=4)),
    "gelu": (activation, ActivationConfig(kind="gelu")),
    "tanh": (activation, ActivationConfig(kind="tanh")),
    "linear": (linear, LinearConfig(4, 4)),
}


def drawn_nodes(seed):
    """A run of a few nodes, each reading any earlier value; a value may be written to in between. Returns the run, which gives
    gradients, and the write."""
    draw = Random(seed)
    names = [draw.choice(list(RECOMPUTABLE)) for _ in range(draw.randint(2, 5))]
    params = [leaves_of(RECOMPUTABLE[name][1], RECOMPUTABLE[name][0], i) for i, name in enumerate(names)]
    data = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    reads = [max(0, i - draw.choice((0, 0, 0, 1, 2))) for i in range(len(names))]
    write = draw.choice((None, None, (draw.randint(1, len(names)), draw.random() < 0.5)))
    asked = draw.choice(("all", "last"))
    views = [
        draw.choice((lambda t: t, lambda t: t[:], lambda t: t.flip(0), lambda t: t.view(t.shape), lambda t: t[1:])) for _ in names
    ]

    def run():
        x = data.clone().requires_grad_()
        values = [x * 1]
        for i, name in enumerate(names):
            if write is not None and write[0] == i:
                with torch.no_grad():
                    values[reads[i] if write[1] else max(0, reads[i] - 1)].mul_(2)
            op, cfg = RECOMPUTABLE[name]
            values.append(differentiable(op)(params[i], views[i](values[reads[i]]), cfg))
        wanted = [x, *tensors(params)] if asked == "all" else tensors(params[-1]) or [values[reads[-1]]]
        total = sum(y.square().sum() for y in (values[1:] if asked == "all" else values[-1:]))
        return torch.autograd.grad(total, wanted, allow_unused=True)

    return run, write


def test_drawn_nodes_recompute_the_same_values_or_raise(monkeypatch):
    """If a value was written to in between, results are unchanged, or autograd raises."""
    raised = 0
    for seed in range(200):
        run, write = drawn_nodes(seed)
        found = []
        for few in (10**9, 0):
            monkeypatch.setattr(recompute, "FEW", few)
            try:
                found.append(run())
            except RuntimeError:  # of autograd, that notices the write
                found.append(None)
        want, got = found
        raised += got is None
        if want is None or got is None:
            assert write is not None, seed
        else:
            same = [a is b is None or torch.equal(a, b) for a, b in zip(want, got, strict=True)]
            assert all(same), (seed, same)
    assert raised < 100


def test_marks_leave_with_the_output(monkeypatch):
    monkeypatch.setattr(recompute, "FEW", 0)
    before = len(recompute._recipes)
    h = differentiable(rms_norm)(leaves_of(RMSNormConfig(4), rms_norm), torch.randn(5, 4, dtype=torch.float64), RMSNormConfig(4))
    assert len(recompute._recipes) == before + 1
    assert torch.equal(pickle.loads(pickle.dumps(h.detach())), h)
    del h
    gc.collect()
    assert len(recompute._recipes) == before
