"""Every way to run ops under torch's autograd, each beside the plain torch that it stands for: two modules with equal
parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from funcops import (
    ActivationConfig,
    ChainConfig,
    LayerNormConfig,
    LayerNormParams,
    LinearConfig,
    LinearParams,
    ScaleConfig,
    SoftmaxConfig,
    Step,
    TorchConfig,
    activation,
    chain,
    differentiable,
    layer_norm,
    linear,
    op_from_torch,
    scale,
    softmax,
    with_policy,
)
from funcops import nn as fnn
from funcops.engine.residuals import Offload, Policy

D = 4


class Pure(nn.Module):
    """An op through `differentiable`; `tree(*parameters)` makes its params."""

    def __init__(self, op, cfg, tree, *parameters):
        super().__init__()
        self.run, self.cfg, self.tree = differentiable(op), cfg, tree
        self.own = nn.ParameterList(parameters)

    def forward(self, x):
        return self.run(self.tree(*self.own), x, self.cfg)


class Plain(nn.Module):
    def __init__(self, fn, *parameters):
        super().__init__()
        self.fn, self.own = fn, nn.ParameterList(parameters)

    def forward(self, x):
        return self.fn(x, *self.own)


class Frozen(nn.Module):
    """A layer whose weights are constants: nothing requests their gradients."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer.double().requires_grad_(False)]  # in a list, and so no parameters of this module

    def forward(self, x):
        return self.layers[0](x)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def weights(*shape):
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def group_norm(params, x, cfg):
    return F.group_norm(x, 2) * params["w"]


def init(cfg, *, key=None, device=None, dtype=None):
    return {"w": torch.ones(D, device=device, dtype=dtype)}


def mlp(of):
    return of.Sequential(of.LayerNorm(D), of.Linear(D, 8), of.GELU(), of.Linear(8, D))


def swapped(model):
    """A swapped copy of the model, and the model."""
    ours = copy.deepcopy(model)
    assert fnn.from_torch(ours).replaced
    return ours, model


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def hugging_face():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    return swapped(LlamaMLP(transformers.LlamaConfig(hidden_size=D, intermediate_size=8, num_attention_heads=2)))


def parts():
    """A chain's params of a linear's weight and bias."""
    return lambda w, b: {"up": LinearParams(w, b), "act": None}


CHAIN = ChainConfig(steps=(Step("up", linear, LinearConfig(D, D)), Step("act", activation, ActivationConfig("silu"))))
VIEW = ChainConfig(  # ends in a view of what the softmax keeps
    steps=(
        Step("up", linear, LinearConfig(D, D)),
        Step("soft", softmax, SoftmaxConfig()),
        Step("view", op_from_torch(lambda params, x, cfg: x[..., 1:], name="view"), TorchConfig()),
    )
)
OFFLOAD = with_policy(chain, Policy({"*.x": Offload()}))


def silu_of_linear(x, w, b):
    return F.silu(F.linear(x, w, b))


def pure(op, cfg, tree, plain, *shapes):
    def make():
        own = [weights(*shape) for shape in shapes]
        return Pure(op, cfg, tree, *own), Plain(plain, *[nn.Parameter(p.detach().clone()) for p in own])

    return make


def both(make):
    """A module of `funcops.nn` and the same of `torch.nn`, with the second's weights."""
    ours, plain = make(fnn), make(nn)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def frozen():
    """Two frozen modules: the first keeps nothing from which its x could be found."""

    def make(of):
        return of.Sequential(of.Linear(D, D), of.Softplus() if of is nn else nn.Softplus(), of.Linear(D, D))

    ours, plain = both(make)
    return Frozen(ours), Frozen(plain)


def of_both(wrap, make):
    return lambda: tuple(map(wrap, both(make)))


FACES = {
    "linear": pure(linear, LinearConfig(D, D), LinearParams, F.linear, (D, D), (D,)),
    "layer_norm": pure(layer_norm, LayerNormConfig(D), LayerNormParams, lambda x, w, b: F.layer_norm(x, (D,), w, b), (D,), (D,)),
    "activation": pure(activation, ActivationConfig("gelu"), lambda: None, F.gelu),
    "scale": pure(scale, ScaleConfig(3.0), lambda: None, lambda x: 3 * x),
    "softmax": pure(softmax, SoftmaxConfig(), lambda: None, lambda x: x.softmax(-1)),
    "op_from_torch": pure(
        op_from_torch(group_norm, init=init), TorchConfig(), lambda w: {"w": w}, lambda x, w: group_norm({"w": w}, x, None), (D,)
    ),
    "chain": pure(chain, CHAIN, parts(), silu_of_linear, (D, D), (D,)),
    "chain to a view": pure(
        chain,
        VIEW,
        lambda w, b: {"up": LinearParams(w, b), "soft": None, "view": None},
        lambda x, w, b: F.linear(x, w, b).softmax(-1)[..., 1:],
        (D, D),
        (D,),
    ),
    "policy": pure(OFFLOAD, CHAIN, parts(), silu_of_linear, (D, D), (D,)),
    "module": lambda: both(lambda of: of.Linear(D, D)),
    "frozen": frozen,
    "sequential": lambda: both(mlp),
    "from_torch": lambda: swapped(Wrapped(mlp(nn))),
    "llama_mlp": hugging_face,
    "checkpoint": of_both(lambda inner: Checkpointed(inner, False), mlp),
}


def made(face):
    """`(ours, plain)` in float64, with the same numbers on every machine."""
    torch.manual_seed(0)
    ours, plain = FACES[face]()
    return ours.double(), plain.double()
