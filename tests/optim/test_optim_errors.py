"""Wrong calls of optimisers raise by name, and trees of another structure are told apart."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict

import pytest
import torch
from optim_model import ADAMW, OPTIMISERS, Layer, equal, gradients, model

from funcops.engine.trees import same_structure, tree_map_tensors
from funcops.optim import (
    AdamWConfig,
    AdamWState,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    clip_factor,
    decay_mask,
    global_norm,
    sgd_init,
    warmup_cosine,
)


def test_a_known_structure_is_not_taken_for_another():
    params = model()
    adamw_update(params, gradients(params, 0), adamw_init(params, ADAMW), ADAMW)  # known from here on
    others = [
        {**params, "more": torch.ones(1)},
        {**params, "head": {"weight": torch.ones(1), "bias": None}},
        {**params, "empty": (torch.ones(1),)},
        {**params, "blocks": list(params["blocks"])},
        {**params, "blocks": params["blocks"][:1]},
        _without(params, "head"),
        torch.ones(2),
        None,
    ]
    for other in others:
        with pytest.raises(ValueError, match="adamw_update: grads must be a tree like params, got one (with|other containers)"):
            adamw_update(params, other, adamw_init(params, ADAMW), ADAMW)
        if other is not None:  # and the other way round: an update of the other tree is right
            state = adamw_init(other, ADAMW)
            new, _ = adamw_update(other, tree_map_tensors(torch.zeros_like, other), state, AdamWConfig(weight_decay=0.0))
            assert equal(new, other)


def _bad(**changes):
    params = model()
    arguments = {"params": params, "grads": gradients(params, 0), "state": adamw_init(params, ADAMW), "cfg": ADAMW}
    arguments |= {k: v(arguments) for k, v in changes.items()}
    return lambda: adamw_update(**arguments)


def _without(tree, key):
    return {k: v for k, v in tree.items() if k != key}


ERRORS = [
    (
        _bad(grads=lambda a: _without(a["grads"], "head")),
        ValueError,
        "adamw_update: grads must be a tree like params, got one without head.weight, head.bias",
    ),
    (_bad(grads=lambda a: {**a["grads"], "tail": torch.ones(2)}), ValueError, "got one with extra tail"),
    (_bad(grads=lambda a: {**a["grads"], "blocks": list(a["grads"]["blocks"])}), ValueError, "other containers"),
    (_bad(grads=lambda a: {**a["grads"], "empty": torch.ones(3)}), ValueError, "adamw_update: grads.empty must be [0, 3], got [3]"),
    (
        _bad(grads=lambda a: {**a["grads"], "empty": torch.ones(0, 3, dtype=torch.int64)}),
        TypeError,
        "grads.empty must be float32 or bfloat16 or float16, got int64",
    ),
    (
        _bad(grads=lambda a: {**a["grads"], "empty": torch.ones(0, 3, dtype=torch.float64)}),
        TypeError,
        "grads.empty must be float32 or bfloat16 or float16, got float64",
    ),
    (_bad(grads=lambda a: {**a["grads"], "empty": 3.0}), TypeError, "grads.empty must be a tensor [0, 3], got 3.0"),
    (
        _bad(grads=lambda a: {**a["grads"], "empty": torch.ones(0, 3, device="meta")}),
        ValueError,
        "grads.empty must be on device cpu, got meta",
    ),
    (
        _bad(grads=lambda a: {**a["grads"], "norm": Layer(torch.ones(3), torch.ones(3))}),
        TypeError,
        "grads.norm.bias must be None, because params.norm.bias is not a tensor, got float32[3]",
    ),
    (
        _bad(state=lambda a: adamw_init(_without(a["params"], "head"), ADAMW)),
        ValueError,
        "state.exp_avg must be a tree like params, got one without head.weight",
    ),
    (
        _bad(state=lambda a: adamw_init({**a["params"], "empty": torch.ones(1)}, ADAMW)),
        ValueError,
        "state.exp_avg.empty must be [0, 3], got [1]",
    ),
    (
        _bad(state=lambda a: adamw_init({**a["params"], "empty": torch.ones(0, 3).double()}, ADAMW)),
        TypeError,
        "state.exp_avg.empty must be float32, got float64",
    ),
    (
        _bad(state=lambda a: AdamWState(torch.zeros(()), a["state"].exp_avg, a["state"].exp_avg_sq)),
        ValueError,
        "state.step must be [8], got []",
    ),
    (_bad(state=lambda a: None), TypeError, "state must be AdamWState, got None"),
    (_bad(cfg=lambda a: SGDConfig()), TypeError, "cfg must be AdamWConfig, got SGDConfig"),
    (_bad(lr=lambda a: "1"), TypeError, "lr must be float or int, got '1'"),
    (_bad(lr=lambda a: torch.ones(2)), ValueError, "lr must be a number or a float tensor of one element, got float32[2]"),
    (
        _bad(decay=lambda a: _without(decay_mask(a["params"]), "head")),
        ValueError,
        "decay must be a tree like params, got one without head.weight",
    ),
    (_bad(decay=lambda a: a["params"]), TypeError, "decay.blocks.0.up.weight must be a bool, got float32[5, 3]"),
    (
        lambda: adamw_init({"n": torch.ones(2, dtype=torch.int64)}, ADAMW),
        TypeError,
        "adamw_init: params.n must be a float tensor or None, got int64[2]",
    ),
    (
        lambda: sgd_init((w := torch.ones(2), w), SGDConfig()),
        ValueError,
        "sgd_init: params.1 must be a tensor of its own, got memory of params.0",
    ),
    (
        lambda: adamw_init({"embed": (w := torch.ones(4, 2)), "head": w.detach()}, ADAMW),  # as in a state_dict
        ValueError,
        "adamw_init: params.head must be a tensor of its own, got memory of params.embed",
    ),
    (
        lambda: adamw_init({"whole": (w := torch.ones(4, 2)), "rows": w[2:]}, ADAMW),
        ValueError,
        "adamw_init: params.rows must be a tensor of its own, got memory of params.whole",
    ),
    (lambda: AdamWConfig(lr=-1.0), ValueError, "AdamWConfig: lr must be finite and not negative, got -1.0"),
    (lambda: AdamWConfig(betas=(0.9, 1.0)), ValueError, "AdamWConfig: betas must be a pair of numbers in [0, 1)"),
    (lambda: AdamWConfig(eps="x"), TypeError, "AdamWConfig: eps must be float or int, got 'x'"),
    (lambda: SGDConfig(nesterov=True), ValueError, "SGDConfig: momentum must be positive for nesterov, got 0.0"),
    (lambda: decay_mask(model(), ("*.gamma",)), ValueError, "exclude must be globs that match paths among"),
    (lambda: decay_mask(model(), "*norm*"), TypeError, "exclude must be a sequence of globs, got '*norm*'"),
    (lambda: clip_by_global_norm(model(), -1.0), ValueError, "max_norm must be finite and not negative, got -1.0"),
    (lambda: clip_factor(torch.ones(()), -1.0), ValueError, "clip_factor: max_norm must be finite and not negative, got -1.0"),
    (lambda: clip_factor(torch.ones(()), torch.ones(2)), ValueError, "clip_factor: max_norm must be [], got [2]"),
    (lambda: global_norm({"a": torch.ones(2, dtype=torch.int32)}), TypeError, "global_norm: a must be a float tensor"),
    (lambda: warmup_cosine(0, peak=1.0, warmup=5, total=4), ValueError, "warmup must be from 0 to total (4), got 5"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:50] for e in ERRORS])
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS)
def test_models_updated_in_turn_are_told_apart_without_their_values(init, update, cfg, monkeypatch):
    """Structures are compared without a tensor's repr, which takes a millisecond and waits for its device."""
    t = torch.ones(2)
    trees = [
        t,
        {"a": t},
        {"a": t, "b": t},
        {"c": t},
        {"a": {"b": t}},
        {"a": {"c": t}},
        {"a": [t, t]},
        [t],
        (t,),
        (t, t),
        ([t], [t, t]),
    ]
    trees = [tree_map_tensors(torch.clone, params) for params in trees]  # each leaf a tensor of its own
    states = [init(params, cfg) for params in trees]
    for params, state in zip(trees, states, strict=True):
        update(params, params, state, cfg)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__repr__", lambda *_, **__: pytest.fail("a tensor was spelled out"))
        for params, state in list(zip(trees, states, strict=True)) * 2:
            new, _ = update(params, params, state, cfg)
            assert same_structure(new, params)


def test_a_gradient_of_another_16_bit_dtype_is_refused():
    for dtype, other in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        params = {"w": torch.ones(2, dtype=dtype)}
        for init, update, cfg in OPTIMISERS:
            with pytest.raises(TypeError, match="update: grads.w must be"):
                update(params, {"w": torch.ones(2, dtype=other)}, init(params, cfg), cfg)


KINDS = [(dict, "ab"), (OrderedDict, "ba"), (OrderedDict, "ab"), (dict, "ba"), (OrderedDict, "ba")]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("init", "update", "cfg"), OPTIMISERS, ids=lambda one: getattr(one, "__name__", ""))
def test_dicts_of_any_kind_pair_by_key(init, update, cfg, nested):
    """Params, gradients and state may have their keys in other orders: a plain dict is walked by sorted keys, an ordered one by its
    own, as a `state_dict()` is. What an update met before changes nothing."""

    def made(kind, factor, skip=""):
        make, keys = kind
        tree = make((k, None if k in skip else factor * torch.eye(2) * ord(k)) for k in keys)
        return {"layer": tree} if nested else tree

    def by_key(tree):
        return {k: t.tolist() for k, t in sorted((tree["layer"] if nested else tree).items())}

    def after(kind, of_grads, of_state, skip):
        params, fields = made(kind, 1.0), {}
        state = init(params, cfg)
        for field in dataclasses.fields(state):
            if isinstance(getattr(state, field.name), dict):
                fields[field.name] = made(of_state, 0.25)
        new, state = update(params, made(of_grads, 2.0, skip), dataclasses.replace(state, **fields), cfg)
        assert type(new["layer"] if nested else new) is kind[0]
        return [by_key(new), *[by_key(getattr(state, name)) for name in fields]]

    for skip in ("", "a"):
        want = after(KINDS[0], KINDS[0], KINDS[0], skip)
        for kinds in itertools.product(KINDS, repeat=3):
            assert after(*kinds, skip) == want, kinds
