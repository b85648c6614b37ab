"""A tree of params with its gradients, and the optimisers that tests run on it."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.trees import leaf, leaves, tensors, tree, tree_map, tree_map_tensors
from funcops.optim import AdamWConfig, SGDConfig, adamw_init, adamw_update, sgd_init, sgd_update


@tree
class Layer:
    weight: Tensor = leaf("[O, I]")
    bias: Tensor | None = leaf("[O]")


def model(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype)

    return {
        "norm": Layer(draw(3), None),
        "blocks": ({"up": Layer(draw(5, 3), draw(5))}, {"up": Layer(draw(5, 3), None)}),
        "head": Layer(draw(7, 5), draw(7)),
        "empty": draw(0, 3),
        "gain": draw(),  # whose product with another 0-d tensor has the wider dtype of the two
    }


def gradients(params, seed, dtype=None):
    g = torch.Generator().manual_seed(1000 + seed)
    return tree_map_tensors(lambda p: torch.randn(p.shape, generator=g).to(dtype or p.dtype), params)


def equal(a, b):
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x is y for x, y in zip(leaves(a), leaves(b), strict=True))


def close(a, b, tol=2e-6):
    for x, y in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


ADAMW = AdamWConfig(lr=0.01, weight_decay=0.1)
SGDS = [
    SGDConfig(lr=0.01),
    SGDConfig(lr=0.01, momentum=0.9, weight_decay=0.1),
    SGDConfig(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
]
OPTIMISERS = [(adamw_init, adamw_update, ADAMW), *[(sgd_init, sgd_update, cfg) for cfg in SGDS]]


def missing(grads, index):
    """`grads` without the gradient of the index-th tensor."""
    count = iter(range(100))
    return tree_map(lambda g: g if g is None or next(count) != index else None, grads)
