"""Stochastic rounding: values on the grid stay, values between go to a neighbour, with the right probability."""

import pytest
import torch

from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
from funcops.library.kernels import quantize as kernels
from funcops.library.kernels.quantize import ELEMENTS
from funcops.low_precision import Fp8Delayed, recipe_init, recipe_update, with_recipe

WORDS = torch.cat(
    [
        torch.tensor([0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1]),
        torch.randint(2**32, (248,), generator=torch.Generator().manual_seed(0)),
    ]
)


def grid(element):
    """All nonnegative values of an element, in order."""
    of = ELEMENTS[element]
    subnormal = [of.least * i for i in range(2**of.mantissa)]
    normal = [2.0**e * (1 + i / 2**of.mantissa) for e in range(of.emin, 20) for i in range(2**of.mantissa)]
    return torch.tensor([v for v in subnormal + normal if v <= of.largest])


def rounded(v, element, words):
    return kernels._stochastic(v, ELEMENTS[element], words)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("element", ELEMENTS)
def test_values_on_the_grid_stay(element, sign):
    v = sign * grid(element)
    pairs = v.unsqueeze(1).expand(-1, len(WORDS)).contiguous()
    assert rounded(pairs, element, WORDS.expand_as(pairs)).equal(pairs)


@pytest.mark.parametrize("element", ELEMENTS)
def test_values_between_go_to_a_neighbour_with_the_chance_of_where_they_are(element):
    low, high = grid(element)[:-1], grid(element)[1:]
    of_step = torch.tensor([2.0**-10, 0.25, 1 / 3, 0.5, 0.9, 1 - 2.0**-10])
    v = low.unsqueeze(1) + of_step * (high - low).unsqueeze(1)
    count = 4096
    words = (torch.arange(count) * (2**32 // count)).expand(*v.shape, -1)
    found = rounded(v.unsqueeze(-1).expand_as(words).contiguous(), element, words)
    lows, highs = (t.view(-1, 1, 1).expand_as(found) for t in (low, high))
    assert ((found == lows) | (found == highs)).all()
    chance = ((v - low.unsqueeze(1)) / (high - low).unsqueeze(1)).double()
    assert ((found == highs).double().mean(-1) - chance).abs().max() <= 1 / count


@pytest.mark.parametrize("element", ELEMENTS)
def test_nan_and_infinity_stay(element):
    largest = ELEMENTS[element].largest
    v = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, 2 * largest])
    found = rounded(v, element, WORDS[:5])
    assert found[0] == torch.inf and found[1] == -torch.inf and found[2].isnan() and (found[3:] >= largest).all()


@pytest.mark.parametrize("margin", [-200, -18, -17, -3, 0, 3, 17, 18, 127, 128, 200, 10**6])
@pytest.mark.parametrize("fwd", ["e4m3", "e5m2"])
def test_a_margin_makes_scales_that_serve_or_is_refused(fwd, margin):
    """Over amaxes from the smallest float32 to the largest: the scale and its inverse are finite and above 0."""
    most = 17 if fwd == "e4m3" else 31
    if abs(margin) > most:
        with pytest.raises(ValueError, match=rf"^Fp8Delayed: margin must be from -{most} to {most} .*, got {margin}"):
            Fp8Delayed(fwd=fwd, bwd="e5m2", margin=margin)
        return
    recipe = Fp8Delayed(fwd=fwd, bwd="e5m2", margin=margin, history=2)
    cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), recipe)
    state = recipe_init(cfg, chain.init(cfg, key=random.key(0)))
    for amax in (1e-45, 1e-38, 1e-20, 1.0, 1e20, 3.4e38):
        (made,) = recipe_update(state, {"up.weight": torch.full((3,), amax)}, recipe).values()
        assert (made.scale > 0).all() and made.scale.isfinite().all() and (1 / made.scale).isfinite().all(), (amax, made.scale)
