"""Modules with torch.nn's names, arguments, state_dict keys and initialisation, each of them one op of funcops.

They subclass torch.nn's, so that `isinstance` checks, hooks and initialisers of other libraries find what they know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import LOWER
from funcops.adapters.nn.module import OpModule, prepare
from funcops.adapters.nn.quantized import take_recipe
from funcops.errors import require
from funcops.ops._norm import DTYPES
from funcops.ops.activation import ActivationConfig, activation
from funcops.ops.dropout import DropoutConfig, dropout
from funcops.ops.embedding import EmbeddingConfig, EmbeddingParams, embedding
from funcops.ops.glu import GLUConfig, glu
from funcops.ops.layer_norm import LayerNormConfig, LayerNormParams, layer_norm
from funcops.ops.linear import LinearConfig, LinearParams, linear
from funcops.ops.qlinear import QLinearConfig
from funcops.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm
from funcops.recipes import Recipe


class Linear(OpModule, nn.Linear):
    """`torch.nn.Linear` by `funcops.linear`; with a `recipe` of `funcops.low_precision` (one without state) by `qlinear`: the
    parameters stay in high precision, and are quantised in every call, or once a step by `quantize_weights`.

    >>> import torch
    >>> from funcops import nn
    >>> layer = nn.Linear(3, 2)
    >>> layer(torch.ones(4, 3)).sum().backward()
    >>> layer.bias.grad, isinstance(layer, torch.nn.Linear)
    (tensor([4., 4.]), True)
    """

    op: Any = linear
    params_class, fields, values = LinearParams, ("weight", "bias"), ("in_features", "out_features", "recipe")
    autocast = LOWER
    recipe: Recipe | None = None

    def take(self, recipe: Any) -> None:
        take_recipe("funcops.nn.Linear", self, recipe)

    def make_cfg(self) -> LinearConfig | QLinearConfig:
        if self.recipe is not None:
            return QLinearConfig(self.in_features, self.out_features, self.recipe, bias=self.bias is not None)
        return LinearConfig(in_features=self.in_features, out_features=self.out_features, bias=self.bias is not None)


class Embedding(OpModule, nn.Embedding):
    """`torch.nn.Embedding` by `funcops.embedding`, without max_norm, scale_grad_by_freq and sparse.

    >>> import torch
    >>> from funcops import nn
    >>> nn.Embedding(10, 4)(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])
    """

    op, params_class, fields = embedding, EmbeddingParams, ("weight",)
    values = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    dtypes = frozenset((torch.int64, torch.int32))

    def op_input(self, x: Tensor) -> Tensor:
        return ids(x)

    def make_cfg(self) -> EmbeddingConfig:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            require(not getattr(self, name), "funcops.nn.Embedding", name, "off: it has no functional form", getattr(self, name))
        return EmbeddingConfig(num_embeddings=self.num_embeddings, dim=self.embedding_dim, padding_idx=self.padding_idx)


def ids(t: Any) -> Any:
    """Indices as the ops take them: int32 and uint8 as int64."""
    return t.long() if getattr(t, "dtype", None) in (torch.int32, torch.uint8) else t


class LayerNorm(OpModule, nn.LayerNorm):
    """`torch.nn.LayerNorm` by `funcops.layer_norm`, with its weight.

    >>> import torch
    >>> from funcops import nn
    >>> nn.LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
    tensor([[-1.,  1.]])
    """

    op, params_class, fields, values = layer_norm, LayerNormParams, ("weight", "bias"), ("normalized_shape", "eps")
    autocast = "aten::layer_norm"

    def make_cfg(self) -> LayerNormConfig:
        _affine("LayerNorm", self)
        return LayerNormConfig(dim=tuple(self.normalized_shape), eps=self.eps, bias=self.bias is not None)


class RMSNorm(OpModule, nn.RMSNorm):
    """`torch.nn.RMSNorm` by `funcops.rms_norm`, with its weight. An eps of None is the smallest step of the weight's dtype.

    >>> import torch
    >>> from funcops import nn
    >>> nn.RMSNorm(2, eps=0.0)(torch.tensor([[0.0, 4.0]])).detach()
    tensor([[0.0000, 1.4142]])
    """

    op, params_class, fields, values = rms_norm, RMSNormParams, ("weight",), ("normalized_shape", "eps")
    autocast, pairs = "aten::rms_norm", DTYPES

    def make_cfg(self) -> RMSNormConfig:
        _affine("RMSNorm", self)
        eps = torch.finfo(self.weight.dtype).eps if self.eps is None else self.eps
        return RMSNormConfig(dim=tuple(self.normalized_shape), eps=eps)


def _affine(name: str, module: Any) -> None:
    require(module.weight is not None, f"funcops.nn.{name}", "elementwise_affine", "True: the op has a weight", False)


class Dropout(OpModule, nn.Dropout):
    """`torch.nn.Dropout` by `funcops.dropout`. Its key is drawn from torch's generator, so `torch.manual_seed` decides.

    >>> import torch
    >>> from funcops import nn
    >>> layer = nn.Dropout(0.5)
    >>> sorted(set(layer(torch.ones(64)).tolist())), set(layer.eval()(torch.ones(64)).tolist())
    ([0.0, 2.0], {1.0})
    """

    op, values = dropout, ("p", "training", "inplace")

    def rests(self) -> bool:
        """Whether it gives x itself: without p, and in eval mode."""
        return self.p == 0.0 or not self.training

    def forward(self, x: Tensor) -> Any:
        return x if self.rests() else super().forward(x)

    def make_cfg(self) -> DropoutConfig:
        require(not self.inplace, "funcops.nn.Dropout", "inplace", "False", self.inplace)
        return DropoutConfig(p=self.p, train=self.training)

    def op_input(self, x: Tensor) -> Any:
        return x, drawn_key(x)


def drawn_key(x: Tensor) -> Tensor:
    """A random key from torch's own generator, on the device of x."""
    return torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=x.device)


class _Activation(OpModule):
    kind: str
    op = activation

    def make_cfg(self) -> ActivationConfig:
        require(not getattr(self, "inplace", False), f"funcops.nn.{type(self).__name__}", "inplace", "False", True)
        return ActivationConfig(kind=self.kind)


class GELU(_Activation, nn.GELU):
    """`torch.nn.GELU` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.GELU()(torch.tensor([0.0, 100.0]))
    tensor([  0., 100.])
    """

    values = ("approximate",)

    def make_cfg(self) -> ActivationConfig:
        return ActivationConfig(kind="gelu" if self.approximate == "none" else "gelu_tanh")


class ReLU(_Activation, nn.ReLU):
    """`torch.nn.ReLU` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    kind, values = "relu", ("inplace",)


class SiLU(_Activation, nn.SiLU):
    """`torch.nn.SiLU` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.SiLU()(torch.tensor([0.0, 100.0]))
    tensor([  0., 100.])
    """

    kind, values = "silu", ("inplace",)


class Sigmoid(_Activation, nn.Sigmoid):
    """`torch.nn.Sigmoid` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.Sigmoid()(torch.tensor([-200.0, 0.0]))
    tensor([0.0000, 0.5000])
    """

    kind = "sigmoid"


class Tanh(_Activation, nn.Tanh):
    """`torch.nn.Tanh` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.Tanh()(torch.tensor([0.0, 100.0]))
    tensor([0., 1.])
    """

    kind = "tanh"


class GLU(OpModule, nn.GLU):
    """`torch.nn.GLU` over the last dimension by `funcops.glu`; `kind` and `gate` choose another of its gates.

    >>> import torch
    >>> from funcops import nn
    >>> nn.GLU()(torch.tensor([3.0, 0.0])), nn.GLU(kind="reglu", gate="first")(torch.tensor([3.0, 5.0]))
    (tensor([1.5000]), tensor([15.]))
    """

    op, values = glu, ("kind", "gate", "dim")

    def __init__(self, dim: int = -1, *, kind: str = "glu", gate: str = "second") -> None:
        super().__init__(dim)
        self.kind, self.gate = kind, gate
        self.make_cfg()
        prepare(self)

    def make_cfg(self) -> GLUConfig:
        require(self.dim == -1, "funcops.nn.GLU", "dim", "-1", self.dim)
        return GLUConfig(kind=self.kind, gate=self.gate)

    def plain(self, *given: Any) -> Any:
        torchs = (self.kind, self.gate) == ("glu", "second")
        require(
            torchs, f"funcops.nn.{type(self).__name__}", "x", f"a plain tensor: torch has no {self.kind}", type(given[0]).__name__
        )
        return super().plain(*given)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, gate={self.gate!r}"


class SwiGLU(GLU):
    """`silu(first half) * second half`, as most models of that kind have it.

    >>> import torch
    >>> from funcops import nn
    >>> nn.SwiGLU()(torch.tensor([100.0, 5.0]))
    tensor([500.])
    """

    def __init__(self, *, gate: str = "first") -> None:
        super().__init__(kind="swiglu", gate=gate)
