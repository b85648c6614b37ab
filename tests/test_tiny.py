"""Read this first: the whole contract on numbers that fit in the head.

y = x w^T + b with one row x = [1, 2], w = [[3, 4]], b = [5]: y = 3 + 8 + 5 = 16.
With dy = [10]: dx = dy w = [30, 40], dw = dy^T x = [[10, 20]], db = [10].
"""

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    DonatedError,
    LinearConfig,
    LinearParams,
    Needs,
    Step,
    activation,
    chain_bwd,
    chain_fwd,
    donate,
    linear,
    linear_bwd,
    linear_dgrad,
    linear_fwd,
    linear_wgrad,
)

CFG = LinearConfig(2, 1)
PARAMS = LinearParams(torch.tensor([[3.0, 4.0]]), torch.tensor([5.0]))
X, DY = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0]])


def test_forward_returns_y_and_residuals():
    y, residuals = linear_fwd(PARAMS, X, CFG)
    assert y.tolist() == [[16.0]]
    assert residuals.x is X and residuals.weight is PARAMS.weight  # nothing was copied
    assert repr(residuals) == "LinearResiduals(x=float32[1, 2], weight=float32[1, 2])"


def test_backward_gives_every_gradient():
    _, residuals = linear_fwd(PARAMS, X, CFG)
    dparams, dx = linear_bwd(residuals, DY, CFG)
    assert dx.tolist() == [[30.0, 40.0]]
    assert dparams.weight.tolist() == [[10.0, 20.0]] and dparams.bias.tolist() == [10.0]


def test_the_same_backward_in_two_halves():
    _, residuals = linear_fwd(PARAMS, X, CFG)
    dx, pending = linear_dgrad(residuals, DY, CFG)  # now
    assert dx.tolist() == [[30.0, 40.0]]
    assert pending.x is X and pending.dy is DY
    dparams = linear_wgrad(pending, CFG)  # whenever you like
    assert dparams.weight.tolist() == [[10.0, 20.0]]


def test_gradients_add_up_in_main_grad():
    main_grad = LinearParams(torch.ones(1, 2), torch.ones(1))
    for _ in range(2):
        _, residuals = linear_fwd(PARAMS, X, CFG)
        returned, _ = linear_bwd(residuals, DY, CFG, into=main_grad)
    assert returned is main_grad
    assert main_grad.weight.tolist() == [[21.0, 41.0]] and main_grad.bias.tolist() == [21.0]


def test_unneeded_tensors_are_neither_kept_nor_computed():
    _, residuals = linear_fwd(PARAMS, X, CFG, needs=Needs(params=False))
    assert residuals.x is None
    dparams, dx = linear_bwd(residuals, DY, CFG)
    assert dx.tolist() == [[30.0, 40.0]] and dparams.weight is None and dparams.bias is None
    assert linear_fwd(PARAMS, X, CFG, needs=Needs.NONE)[1] is None


def test_donated_residuals_are_used_once():
    _, residuals = linear_fwd(PARAMS, X, CFG)
    cell = donate(residuals)
    linear_bwd(cell, DY, CFG)
    for used in (cell, residuals):
        with pytest.raises(DonatedError, match="linear_bwd: .*[rR]esiduals must be unused, got"):
            linear_bwd(used, DY, CFG)


def test_a_chain_is_an_op_whose_trees_are_dicts_by_step():
    """relu(16) = 16, so the gradients are those above; with x negated y = relu(-6) = 0, and all of them are 0."""
    cfg = ChainConfig(steps=(Step("up", linear, CFG), Step("act", activation, ActivationConfig(kind="relu"))))
    params = {"up": PARAMS, "act": None}
    y, residuals = chain_fwd(params, X, cfg)
    dparams, dx = chain_bwd(residuals, DY, cfg)
    assert y.tolist() == [[16.0]] and dx.tolist() == [[30.0, 40.0]]
    assert list(residuals) == list(dparams) == ["up", "act"] and dparams["up"].weight.tolist() == [[10.0, 20.0]]
    y, residuals = chain_fwd(params, -X, cfg)
    assert y.tolist() == [[0.0]] and chain_bwd(residuals, DY, cfg)[1].tolist() == [[0.0, 0.0]]


def test_a_wrong_argument_is_named():
    with pytest.raises(ValueError, match=r"^linear_fwd: x must be \[\.\.\., 2\], got \[1, 3\]$"):
        linear_fwd(PARAMS, torch.ones(1, 3), CFG)
