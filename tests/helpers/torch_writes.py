"""Ways in which torch writes to parameters, each of which makes stale what was computed from them."""

from __future__ import annotations

import itertools

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def _steps(optimiser, **options):
    return lambda parameters: optimiser(parameters, lr=0.1, **options).step()


def _inplace(parameters):
    with torch.no_grad():
        torch._foreach_add_(parameters, 1.0)


def _inference(parameters):
    with torch.inference_mode():
        for p in parameters:
            p.mul_(2.0)


def _data(parameters):
    for p in parameters:
        p.data = p.data + 1


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)  # those with a fused form on the CPU
WRITES = {  # by name, a function of parameters that have gradients
    **{f"{cls.__name__} {way}": _steps(cls, **{way: True}) for cls, way in itertools.product(FUSED, ("foreach", "fused"))},
    "in place": _inplace,
    "in inference mode": _inference,
}
REPLACES = {  # the same for ways that leave the parameters' memory unchanged
    "another vector": lambda ps: vector_to_parameters(parameters_to_vector(ps) + 1, ps),
    "other data": _data,
}
