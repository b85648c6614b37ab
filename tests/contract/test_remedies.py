"""A wrong call of a newcomer gets the argument, what came, and what to write instead."""

import pytest
import torch

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    PositionEmbeddingConfig,
    RMSNormConfig,
    Step,
    chain,
    cross_entropy,
    dist,
    embedding,
    linear,
    linear_cross_entropy,
    position_embedding,
    random,
    remat,
    rms_norm,
    with_policy,
)
from funcops import nn as fnn
from funcops.backend import backend
from funcops.graphs import graphed, make_graphed_callables
from funcops.low_precision import Fp8Block, with_recipe
from funcops.ops.embedding import EmbeddingParams

CFG, PARAMS, X = LinearConfig(4, 4), linear.init(LinearConfig(4, 4), key=random.key(0)), torch.ones(2, 4)
DEEP = ChainConfig(steps=(Step("a", linear, CFG), Step("b", linear, CFG)))
LAYERS = chain.init(DEEP, key=random.key(0))
KEY = "key must be a key, random.key(0) for example"
RECIPES = "with_recipe: recipe must be a recipe, such as Fp8Current(), Fp8Delayed(), Fp8Block(), MXFP8() or NVFP4(), got "
REMEDY = "call the backward of the op that ran the forward"


def mixed(forward, backward):
    _, residuals = forward.fwd(LAYERS, X, DEEP)
    return lambda: backward.bwd(residuals, X, DEEP)


def captured(*given):
    """The call, which captures first: no graph outlives it."""
    return lambda: graphed(lambda a, more: a + more["b"], X, {"b": X})(*given)


def callable_of(*given, **named):
    def call():
        (made,) = make_graphed_callables((torch.nn.Linear(4, 4),), ((X.clone(),),))
        made(*given, **named)

    return call


CALLS = {
    "a number for a key": (TypeError, f"linear_init: {KEY}, got 0", lambda: linear.init(CFG, key=0)),
    "no key": (TypeError, f"{KEY}; only on the meta device may it be None", lambda: linear.init(CFG)),
    "two dtypes": (
        TypeError,
        "linear_fwd: params.weight must be float64, got float32: x is float64, cast one of them",
        lambda: linear.fwd(PARAMS, X.double(), CFG),
    ),
    "a recipe's name": (TypeError, f"{RECIPES}'fp8'", lambda: with_recipe(DEEP, "fp8")),
    "a recipe's class": (TypeError, f"{RECIPES}the class Fp8Block: call it", lambda: with_recipe(DEEP, Fp8Block)),
    "a policy's residuals": (TypeError, REMEDY, mixed(with_policy(chain, "minimal"), chain)),
    "residuals for a policy": (TypeError, REMEDY, mixed(chain, with_policy(chain, "minimal"))),
    "residuals for remat": (TypeError, REMEDY, mixed(chain, remat(chain))),
    "None for a module": (TypeError, "Linear: x must be a tensor, got None", lambda: fnn.Linear(4, 4)(None)),
    "a list for a module": (TypeError, "RMSNorm: x must be a tensor, got list", lambda: fnn.RMSNorm(4)([1.0])),
    "an abstract mesh": (
        RuntimeError,
        "dist: axis must be of a mesh of processes (Mesh.of, or funcops.testing.run_ranks for threads), got axis 'tp' of 2 of",
        lambda: dist.finish(dist.sum_over_start(X, dist.Mesh.abstract({"tp": 2}, 0)["tp"])),
    ),
    "a missing input": (ValueError, "inputs must be as captured, 0, 1.b, got missing ['1.b'], extra []", captured(X)),
    "an extra input": (ValueError, "missing [], extra ['1.c']", captured(X, {"b": X, "c": X})),
    "a callable's input": (ValueError, "arguments must be as captured, 0.0, got missing ['0.0'], extra ['1.x']", callable_of(x=X)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_to_write(name):
    error, text, call = CALLS[name]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def losses(labels):
    return torch.zeros(len(labels), 8), torch.tensor(labels, dtype=torch.int64)


HEAD = LinearCrossEntropyParams(torch.zeros(8, 4))
TABLE = EmbeddingParams(torch.zeros(8, 4))
IDS = {
    "embedding_fwd: x must be ids from 0 to 7, got": lambda ids: embedding.fwd(
        TABLE, torch.tensor(ids, dtype=torch.int64), EmbeddingConfig(8, 4)
    ),
    "cross_entropy_fwd: x.1 (labels) must be ids from 0 to 7, or -100, got": lambda ids: cross_entropy.fwd(
        None, losses(ids), CrossEntropyConfig()
    ),
    "linear_cross_entropy_fwd: x.1 (labels) must be ids from 0 to 7, or -100, got": lambda ids: linear_cross_entropy.fwd(
        HEAD, (torch.zeros(len(ids), 4), torch.tensor(ids, dtype=torch.int64)), LinearCrossEntropyConfig(4, 8)
    ),
    "position_embedding_fwd: x.1 (positions) must be ids from 0 to 7, got": lambda ids: position_embedding.fwd(
        TABLE, (torch.zeros(len(ids), 4), torch.tensor(ids, dtype=torch.int64)), PositionEmbeddingConfig(8, 4)
    ),
}


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("ids", [[8], [0, 7, 9], [-1, 3], [2**40, 0], [-(2**40)]], ids=str)
@pytest.mark.parametrize("text", IDS)
def test_an_id_out_of_range_is_named(text, ids, implementation):
    if implementation == "triton":
        pytest.importorskip("triton")
    first = next(i for i in ids if not 0 <= i < 8)
    with backend(implementation), pytest.raises(IndexError) as caught:
        IDS[text](ids)
    assert str(caught.value) == f"{text} {first}"
    IDS[text]([0, 7])
    IDS[text]([])
    if "or -100" in text:
        IDS[text]([-100, 7])


def test_an_id_out_of_range_has_the_path_of_its_step():
    steps = ChainConfig(steps=(Step("table", embedding, EmbeddingConfig(8, 4)), Step("norm", rms_norm, RMSNormConfig(4))))
    with pytest.raises(IndexError, match="^table: embedding_fwd: x must be ids from 0 to 7, got 9"):
        chain.fwd({"table": TABLE, "norm": None}, torch.tensor([9]), steps)


@pytest.mark.parametrize("text", IDS)
def test_ids_of_a_batch_by_vmap_are_not_read(text):
    ids = torch.tensor([[0, 7], [1, 2]])
    got = torch.vmap(lambda row: BATCHED[text](row)[0])(ids)
    torch.testing.assert_close(got, torch.stack([BATCHED[text](row)[0] for row in ids]))


LOGITS = torch.linspace(-1, 1, 16).reshape(2, 8)
BATCHED = dict(
    zip(
        IDS,
        (
            lambda ids: embedding.fwd(TABLE, ids, EmbeddingConfig(8, 4)),
            lambda ids: cross_entropy.fwd(None, (LOGITS, ids), CrossEntropyConfig()),
            lambda ids: linear_cross_entropy.fwd(HEAD, (LOGITS[:, :4], ids), LinearCrossEntropyConfig(4, 8)),
            lambda ids: position_embedding.fwd(TABLE, (LOGITS[:, :4], ids), PositionEmbeddingConfig(8, 4)),
        ),
        strict=True,
    )
)
