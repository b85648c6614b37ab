"""`value_and_grad` of only some gradients."""

import pytest
import torch
from lora_model import batch, ours, same_bits

from funcops import CrossEntropyConfig, Needs, chain, cross_entropy, linear, value_and_grad, vjp
from funcops.engine.trees import paths
from funcops.lora import adapter, lora_needs


def test_frozen_params_have_none():
    _, cfg, params = ours()
    x, _, _ = batch()
    loss, grads = value_and_grad(chain, needs=lora_needs(cfg))(params, x, cfg)
    want, pullback = vjp(chain, params, x, cfg, needs=Needs(x=False))
    every, _ = pullback(torch.ones_like(want))
    assert torch.equal(loss, want) and same_bits(adapter(grads, cfg), adapter(every, cfg))
    assert {path for path, t in paths(grads).items() if t is not None} == {path for path in paths(grads) if ".lora." in path}
    with pytest.raises(ValueError, match="value_and_grad: needs must be with gradients of x, as x=True returns them, got Needs"):
        value_and_grad(chain, x=True, needs=lora_needs(cfg))


def test_a_mask_over_x():
    x = torch.zeros(1, 4), torch.tensor([3])
    run = value_and_grad(cross_entropy, x=True, needs=Needs(x=("0",), params=False))
    assert run(None, x, CrossEntropyConfig())[1][1][0].shape == (1, 4)
    with pytest.raises(TypeError, match="value_and_grad: needs must be Needs, got"):
        value_and_grad(linear, needs=True)
