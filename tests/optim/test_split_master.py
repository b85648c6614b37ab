"""Master weights as bfloat16 and 16 bits that are left: every pattern of float32 by sample, and training with them."""

import pytest
import torch

from funcops.engine import trees
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.precision import join_master, split_master


def patterns():
    """Float32 of every exponent and sign, with low halves at, beside and between the points where rounding turns."""
    high = torch.arange(0, 1 << 16, 5, dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234])
    bits = (high[:, None] << 16 | low).flatten()
    return bits.to(torch.int32).view(torch.float32)


def test_every_pattern_comes_back():
    t = patterns()
    (weight,), (rest,) = split_master((t,))
    assert weight.dtype is torch.bfloat16 and rest.dtype is torch.int16
    (back,) = join_master((weight,), (rest,))
    nan = t.isnan()
    assert nan.any() and not nan.all()
    assert torch.equal(back.view(torch.int32)[~nan], t.view(torch.int32)[~nan]) and back[nan].isnan().all()
    assert weight[nan].isnan().all() and not weight[~nan].isnan().any()


def test_the_weights_are_the_nearest():
    t = patterns()
    t = t[t.isfinite()]
    (weight,), _ = split_master((t,))
    cast = t.bfloat16()
    halfway = (t.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~halfway], cast[~halfway])
    both = weight[halfway].double(), cast[halfway].double()
    near = both[0].isfinite() & both[1].isfinite()
    there = t[halfway].double()
    assert torch.equal((both[0] - there).abs()[near], (both[1] - there).abs()[near])


def test_a_step_has_the_bits_of_float32_masters():
    cfg, params = AdamWConfig(), {"w": torch.randn(33, 7), "b": None, "ids": torch.arange(3)}
    weights, rest = split_master(params)
    assert rest["b"] is None and rest["ids"] is None and weights["ids"] is params["ids"]
    assert trees.nbytes((weights["w"], rest["w"])) == 4 * 33 * 7
    back = join_master(weights, rest)
    assert torch.equal(back["w"], params["w"]) and back["b"] is None and back["ids"] is params["ids"]
    only = {"w": params["w"]}
    state = other = adamw_init(only, cfg)
    weights, rest = split_master(only)
    for i in range(3):
        grads = {"w": torch.randn(33, 7, generator=torch.Generator().manual_seed(i))}
        only, state = adamw_update(only, grads, state, cfg)
        master, other = adamw_update(join_master(weights, rest), grads, other, cfg)
        weights, rest = split_master(master)
    assert torch.equal(join_master(weights, rest)["w"], only["w"])


def test_strides_and_shapes_stay():
    for t in (torch.randn(4, 6).t(), torch.randn(()), torch.randn(0, 3), torch.randn(2, 3, requires_grad=True)):
        (weight,), (rest,) = split_master((t,))
        assert weight.shape == rest.shape == t.shape and torch.equal(join_master((weight,), (rest,))[0], t)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (
            lambda: split_master({"w": torch.ones(2).double()}),
            TypeError,
            "split_master: params must be a tree with a float32 tensor",
        ),
        (lambda: split_master(3), TypeError, "split_master: params must be"),
        (lambda: join_master({"w": torch.ones(2)}, {"w": torch.ones(2).short()}), TypeError, "join_master: weights.w must be"),
        (lambda: join_master({"w": torch.ones(2).bfloat16()}, {"w": torch.ones(2)}), TypeError, "join_master: remainder.w must be"),
        (lambda: join_master({"w": torch.ones(2).bfloat16()}, {"w": torch.ones(3).short()}), ValueError, "remainder.w must be"),
        (
            lambda: join_master({"w": torch.ones(2).bfloat16()}, {"v": None}),
            ValueError,
            "remainder must be a tree like weights, got one",
        ),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()
