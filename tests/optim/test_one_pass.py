"""AdamW that clips, and writes the weights of the next step, in one pass: the bits of the separate calls."""

import copy
import itertools

import pytest
import torch
from optim_model import ADAMW, equal, gradients, missing, model
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.adapters.graphs import graphed
from funcops.engine.backend import backend
from funcops.engine.trees import cast, paths, tensors, tree_map, tree_map_tensors
from funcops.optim import adamw_init, adamw_update, clip_by_global_norm, clip_factor, global_norm
from funcops.testing.tolerances import assert_close

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [
    (p, g, w) for p, g, w in itertools.product((F64, F32, BF16), repeat=3) if g.itemsize <= p.itemsize and w.itemsize <= p.itemsize
] + [(F32, F16, F16), (F16, F16, F16)]


def like(params, dtype):
    return tree_map_tensors(lambda p: torch.full_like(p, torch.nan, dtype=dtype), params)


def apart(params, grads, state, max_norm, dtype):
    """The same step by calls that each read everything once more."""
    wide, _ = clip_by_global_norm(tree_map_tensors(lambda g, p: g.to(p.dtype), grads, params), max_norm, norm=global_norm(grads))
    params, state = adamw_update(params, wide, state, ADAMW)
    return params, state, tree_map_tensors(lambda p: p.to(dtype), params)


@pytest.mark.parametrize(("dtype", "of_grads", "of_work"), DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_bits_of_separate_calls(dtype, of_grads, of_work, in_place):
    params, work = model(dtype), like(model(dtype), of_work)
    state, others = adamw_init(params, ADAMW), adamw_init(params, ADAMW)
    want = copy.deepcopy(params)
    for step in range(5):
        grads = tree_map_tensors(lambda g: g.to(of_grads), gradients(params, step))
        max_norm = 0.5 * float(global_norm(grads)) * (1 + step % 2 * 9)  # in turn it clips, and does not
        want, others, cast_of = apart(want, grads, others, max_norm, of_work)
        factor = clip_factor(global_norm(grads), max_norm)
        params, state = adamw_update(params, grads, state, ADAMW, factor=factor, into=work, in_place=in_place)
        assert equal((params, state, work), (want, others, cast_of))


@pytest.mark.parametrize(("dtype", "of_grads", "of_work"), [row for row in DTYPES if row[0] is not F64], ids=str)
def test_by_triton(dtype, of_grads, of_work):
    """A product of a 16-bit gradient with the factor is not rounded there."""
    params, grads = model(dtype), tree_map_tensors(lambda g: g.to(of_grads), gradients(model(dtype), 0))
    want, state, _ = apart(params, grads, adamw_init(params, ADAMW), 0.25, of_work)
    work = like(params, of_work)
    with backend("triton"):
        factor = clip_factor(global_norm(grads), 0.25)
        got, kept = adamw_update(params, grads, adamw_init(params, ADAMW), ADAMW, factor=factor, into=work)
    assert_close((got, kept.exp_avg), (want, state.exp_avg), dtype=dtype)
    assert equal(work, tree_map_tensors(lambda p: p.to(of_work), got)), "the new params, rounded once"


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_leaf_without_a_gradient_is_not_written(name):
    params = model()
    work = like(params, BF16)
    with backend(name):
        adamw_update(params, missing(gradients(params, 0), 1), adamw_init(params, ADAMW), ADAMW, into=work)
    written = [path for path, w in paths(work).items() if w is not None and not w.isnan().any()]
    grads = paths(missing(gradients(params, 0), 1))
    assert written == [path for path, g in grads.items() if g is not None]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_weights_of_any_strides(name):
    params, grads = {"w": torch.randn(6, 8)}, {"w": torch.randn(6, 8)}
    work = {"w": torch.empty(8, 6, dtype=BF16).mT}
    with backend(name):
        new, _ = adamw_update(params, grads, adamw_init(params, ADAMW), ADAMW, into=work)
    assert torch.equal(work["w"], new["w"].bfloat16())


def test_a_traced_and_a_captured_step():
    params, grads = model(), gradients(model(), 0)
    state, factor = adamw_init(params, ADAMW), torch.tensor(0.25)

    def step(params, grads, state, factor):
        work = like(params, BF16)
        new, kept = adamw_update(params, grads, state, ADAMW, factor=factor, into=work)
        return tensors((new, kept, work))

    want = step(params, grads, state, factor)
    assert_close(tuple(make_fx(step)(params, grads, state, factor)(params, grads, state, factor)), tuple(want), dtype=F32)
    assert equal(graphed(step, params, grads, state, factor)(params, grads, state, factor), want)


def refused():
    params = model()
    work = cast(params, BF16)
    first = next(path for path, w in paths(work).items() if w is tensors(work)[0])

    def with_first(change):
        (first, *others) = tensors(work)
        new = iter((change(first), *others))
        return tree_map(lambda w: None if w is None else next(new), work)

    yield {"into": with_first(lambda w: w[:0])}, ValueError, rf"adamw_update: into.{first} must be"
    yield {"into": with_first(lambda w: w.double())}, TypeError, rf"adamw_update: into.{first} must be"
    yield {"into": with_first(lambda w: w.int())}, TypeError, rf"adamw_update: into.{first} must be"
    yield {"into": with_first(lambda w: None)}, TypeError, rf"adamw_update: into.{first} must be"
    for alias in (lambda t: t, lambda t: t.view_as(t)):
        shared = cast(params, BF16)
        shared["blocks"][1]["up"].weight = alias(shared["blocks"][0]["up"].weight)
        yield ({"into": shared}, ValueError, r"adamw_update: into.blocks.1.up.weight must be a tensor of its own")
    yield {"into": {}}, ValueError, "adamw_update: into must be a tree like params"
    for factor in (-1.0, float("nan"), torch.ones(2), torch.tensor(1)):
        yield {"factor": factor}, (ValueError, TypeError), "adamw_update: factor must be"


@pytest.mark.parametrize(("given", "error", "match"), list(refused()))
def test_what_cannot_be_written_raises_before_anything_changes(given, error, match):
    params = model()
    grads, state = gradients(params, 0), adamw_init(params, ADAMW)
    before = copy.deepcopy((params, state, given))
    with pytest.raises(error, match=match):
        adamw_update(params, grads, state, ADAMW, in_place=True, **given)
    assert equal((params, state), before[:2])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("alias", [lambda t: t, torch.Tensor.detach, lambda t: t.t().t(), lambda t: t.view_as(t)])
@pytest.mark.parametrize("of", ["params", "grads"])
def test_memory_of_what_is_read_is_no_place_to_write_to(of, alias, in_place):
    """A pure update would change the caller's param, or a gradient that it clips or adds to later."""
    trees = {"params": model()}
    trees["grads"] = gradients(trees["params"], 0)
    work, state = model(), adamw_init(trees["params"], ADAMW)
    work["blocks"][0]["up"].weight = alias(trees[of]["blocks"][0]["up"].weight)
    before = copy.deepcopy((trees, state))
    said = rf"adamw_update: into.blocks.0.up.weight must be a tensor of its own, got memory of {of}.blocks.0.up.weight"
    with pytest.raises(ValueError, match=said):
        adamw_update(**trees, state=state, cfg=ADAMW, into=work, in_place=in_place)
    assert equal((trees, state), before)
