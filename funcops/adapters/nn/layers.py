"""Modules with torch.nn's names, arguments, state_dict keys and initialisation, each of which runs one op of funcops.

They subclass torch.nn's modules, so that `isinstance` checks, hooks and initialisers of other libraries recognise them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import LOWER
from funcops.adapters.nn.module import OpModule, folded, is_plain, prepare
from funcops.adapters.nn.quantized import take_recipe
from funcops.engine.backend import wide
from funcops.engine.errors import fail, require, require_type
from funcops.library.formats.recipes import Recipe
from funcops.library.kernels.norm import dense
from funcops.library.ops._norm import DTYPES
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.dropout import DropoutConfig, dropout
from funcops.library.ops.embedding import EmbeddingConfig, EmbeddingParams, embedding
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.group_norm import GroupNormConfig, GroupNormParams, group_norm
from funcops.library.ops.layer_norm import LayerNormConfig, LayerNormParams, layer_norm
from funcops.library.ops.linear import LinearConfig, LinearParams, linear
from funcops.library.ops.qlinear import QLinearConfig
from funcops.library.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm
from funcops.library.ops.softmax import SoftmaxConfig, softmax

if TYPE_CHECKING:

    class _OneTensor(OpModule):
        """A layer for an editor, which marks a call without a tensor or with two, and knows that a tensor returns."""

        def __call__(self, input: Tensor) -> Tensor: ...
else:
    _OneTensor = OpModule


class Linear(_OneTensor, nn.Linear):
    """`torch.nn.Linear` by `funcops.linear`, or by `qlinear` with a `recipe` without state from `funcops.low_precision`: the
    parameters stay in high precision, and are quantised in every call, or once per step by `quantize_weights`.

    >>> import torch
    >>> from funcops import nn
    >>> layer = nn.Linear(3, 2)
    >>> layer(torch.ones(4, 3)).sum().backward()
    >>> layer.bias.grad, isinstance(layer, torch.nn.Linear)
    (tensor([4., 4.]), True)
    """

    op: Any = linear
    params_class, fields, values = LinearParams, ("weight", "bias"), ("in_features", "out_features", "recipe")
    autocast, reads_dense = LOWER, True
    recipe: Recipe | None = None

    def take(self, recipe: Any) -> None:
        take_recipe("funcops.nn.Linear", self, recipe)

    def op_input(self, x: Tensor) -> Any:
        return folded(x)

    def make_cfg(self) -> LinearConfig | QLinearConfig:
        if self.recipe is not None:
            return QLinearConfig(self.in_features, self.out_features, self.recipe, bias=self.bias is not None)
        return LinearConfig(in_features=self.in_features, out_features=self.out_features, bias=self.bias is not None)


class Embedding(_OneTensor, nn.Embedding):
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

    complete = True

    def make_cfg(self) -> EmbeddingConfig:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            wanted = "off (it has no functional form: use torch.nn.Embedding)"
            require(not getattr(self, name), "funcops.nn.Embedding", name, wanted, getattr(self, name))
        return EmbeddingConfig(num_embeddings=self.num_embeddings, dim=self.embedding_dim, padding_idx=self.padding_idx)


def ids(t: Any) -> Any:
    """Indices in the ops' dtype: int32 and uint8 become int64."""
    return t.long() if getattr(t, "dtype", None) in (torch.int32, torch.uint8) else t


class _Norm(_OneTensor):
    """A norm whose weight and bias may be missing: the op then gets ones and zeros."""

    complete = True
    whole = 1  # the number of parameters that the op requires

    def other_way(self) -> Any:
        return self.affine_free if None in self._own()[: self.whole] else None

    def affine_free(self, x: Any) -> Any:
        own = self._own()
        found = next((t for t in own if t is not None), x)
        if not (is_plain(x) and is_plain(found)) or x.dtype not in self.dtypes or (x.dtype, found.dtype) not in DTYPES:
            return self.plain(x)
        for i, fill in ((0, torch.ones), (1, torch.zeros)):
            if i < self.whole and own[i] is None:
                own[i] = fill(self._sizes(), dtype=found.dtype, device=x.device)
        return self.launched(own, x)

    def _sizes(self) -> Any:
        return self.normalized_shape


class LayerNorm(_Norm, nn.LayerNorm):
    """`torch.nn.LayerNorm` by `funcops.layer_norm`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
    tensor([[-1.,  1.]])
    """

    op, params_class, fields, values = layer_norm, LayerNormParams, ("weight", "bias"), ("normalized_shape", "eps")
    autocast = "aten::layer_norm"

    def make_cfg(self) -> LayerNormConfig:
        return LayerNormConfig(dim=tuple(self.normalized_shape), eps=self.eps, bias=self.bias is not None)


class RMSNorm(_Norm, nn.RMSNorm):
    """`torch.nn.RMSNorm` by `funcops.rms_norm`. An eps of None is the machine epsilon of the weight's dtype; without a weight, it
    runs torch's own forward.

    >>> import torch
    >>> from funcops import nn
    >>> nn.RMSNorm(2, eps=0.0)(torch.tensor([[0.0, 4.0]])).detach()
    tensor([[0.0000, 1.4142]])
    """

    op, params_class, fields, values = rms_norm, RMSNormParams, ("weight",), ("normalized_shape", "eps")
    autocast, pairs = "aten::rms_norm", DTYPES

    cfg_follows = "weight"

    def other_way(self) -> Any:
        return self.plain if self.weight is self.eps is None else super().other_way()

    def make_cfg(self) -> RMSNormConfig:
        eps = self.eps
        if eps is None:
            require(self.weight is not None, "funcops.nn.RMSNorm", "eps", "a number if the layer has no weight", None)
            eps = self._least()
        return RMSNormConfig(dim=tuple(self.normalized_shape), eps=eps)

    def known_cfg(self) -> Any:
        made = super().known_cfg()
        # The weight got another dtype by its `data`, or belongs to a functional_call.
        if self.eps is None and made.eps != self._least():
            made = self.__dict__["_cfg"] = self.make_cfg()
        return made

    def _least(self) -> float:
        """The machine epsilon of the dtype in which torch computes."""
        return torch.finfo(wide(self.weight.dtype)).eps


class GroupNorm(_Norm, nn.GroupNorm):
    """`torch.nn.GroupNorm` by `funcops.group_norm`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.GroupNorm(1, 2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
    tensor([[-1.,  1.]])
    """

    op, params_class, fields, whole = group_norm, GroupNormParams, ("weight", "bias"), 2
    values, autocast, pairs = ("num_groups", "num_channels", "eps"), "aten::group_norm", DTYPES
    reads_dense = torch.__version__ < "2.14"  # since then torch's norm keeps x as it is

    def op_input(self, x: Tensor) -> Any:
        """x, or the copy that torch's norm would make and keep, instead of all the memory of which x is a slice."""
        return dense(x, x) if self.reads_dense and type(x) is Tensor and not x.is_contiguous() else x

    def make_cfg(self) -> GroupNormConfig:
        return GroupNormConfig(self.num_groups, self.num_channels, eps=self.eps)

    def _sizes(self) -> Any:
        return self.num_channels


class Dropout(_OneTensor, nn.Dropout):
    """`torch.nn.Dropout` by `funcops.dropout`. Its key is drawn from torch's generator, so `torch.manual_seed` determines it.
    With `inplace`, torch's own forward runs, with torch's bits.

    >>> import torch
    >>> from funcops import nn
    >>> layer = nn.Dropout(0.5)
    >>> sorted(set(layer(torch.ones(64)).tolist())), set(layer.eval()(torch.ones(64)).tolist())
    ([0.0, 2.0], {1.0})
    """

    op, values = dropout, ("p", "training", "inplace")
    alone_on_cpu = "alone on a CPU it takes longer than torch's, because its bits are counted, not drawn in order"

    def rests(self) -> bool:
        """Whether it returns x itself: if p is 0, and in eval mode."""
        return self.p == 0.0 or not self.training

    def forward(self, input: Tensor) -> Any:
        return input if self.rests() and not self._patched() else super().forward(input)

    def other_way(self) -> Any:
        return self.plain if self.inplace else None

    def make_cfg(self) -> DropoutConfig:
        return DropoutConfig(p=self.p, train=self.training)

    def op_input(self, x: Tensor) -> Any:
        return x, drawn_key(x)


Dropout._of_step = Dropout.forward


def drawn_key(x: Tensor) -> Tensor:
    """A random key from torch's generator, on the device of x."""
    return torch.randint(-(2**62), 2**62, (2,), dtype=torch.int64, device=x.device)


KEEP_Y = ("relu", "sigmoid", "tanh")  # kinds whose backward, in torch, reads y instead of x


class _Activation(_OneTensor):
    """With `inplace`, torch's own forward runs, because x must hold y, except as a step of a `Sequential`, where no one else has
    x. So it does with `keeps_y`: torch's backward reads y, which the next layer keeps anyway; the op would keep x beside it. Before
    another step of a `Sequential` the op runs, and y is recomputed from x."""

    kind: str
    op = activation
    keeps_y = False

    def other_way(self) -> Any:
        return self.plain if self.keeps_y or getattr(self, "inplace", False) else None

    def make_cfg(self) -> ActivationConfig:
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

    kind, values, keeps_y = "relu", ("inplace",), True


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

    kind, keeps_y = "sigmoid", True


class Tanh(_Activation, nn.Tanh):
    """`torch.nn.Tanh` by `funcops.activation`.

    >>> import torch
    >>> from funcops import nn
    >>> nn.Tanh()(torch.tensor([0.0, 100.0]))
    tensor([0., 1.])
    """

    kind, keeps_y = "tanh", True


class _AlongDim(_OneTensor):
    """An op over the last dimension. For another `dim` torch's own forward runs: it keeps no more, and y has its layout."""

    dim: Any

    def other_way(self) -> Any:
        return None if self.dim == -1 else self.plain


class Softmax(_AlongDim, nn.Softmax):
    """`torch.nn.Softmax` by `funcops.softmax`. Without a `dim`, torch's own forward chooses one.

    >>> import torch
    >>> from funcops import nn
    >>> nn.Softmax(-1)(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    op, values, autocast = softmax, ("dim",), "aten::softmax.int"

    def make_cfg(self) -> SoftmaxConfig:
        require(self.dim is not None, "funcops.nn.Softmax", "dim", "an int (only torch's own forward chooses one)", None)
        return SoftmaxConfig()


class GLU(_AlongDim, nn.GLU):
    """`torch.nn.GLU` by `funcops.glu`; `kind` and `gate` select other gates.

    >>> import torch
    >>> from funcops import nn
    >>> nn.GLU()(torch.tensor([3.0, 0.0])), nn.GLU(kind="reglu", gate="first")(torch.tensor([3.0, 5.0]))
    (tensor([1.5000]), tensor([15.]))
    """

    op, values = glu, ("kind", "gate", "dim")
    alone_on_cpu = "alone on a CPU it takes longer than torch's, which is one operator, and keeps no less"

    def __init__(self, dim: int = -1, *, kind: str = "glu", gate: str = "second") -> None:
        require_type("funcops.nn.GLU", "dim", dim, int)
        super().__init__(dim)
        self.kind, self.gate = kind, gate
        self.make_cfg()
        prepare(self)

    def make_cfg(self) -> GLUConfig:
        if self.dim != -1 and not self._is_torchs():
            return GLUConfig(kind=self.kind, paired=True)
        return GLUConfig(kind=self.kind, gate=self.gate)

    def other_way(self) -> Any:
        return super().other_way() if self._is_torchs() or self.dim == -1 else self.of_halves

    def of_halves(self, x: Any) -> Any:
        """A gate that torch lacks, along another dimension: of two tensors, so that y is not a view with that dimension moved."""
        if not is_plain(x) or x.dtype not in self.dtypes or x.dim() == 0:
            return self.plain(x)
        size = x.shape[self.dim]
        if size % 2:
            fail(f"funcops.nn.{type(self).__name__}", "x", f"of an even size along dimension {self.dim}", list(x.shape))
        halves = x.split(size // 2, self.dim) if size else (x, x)
        return self.launched([], halves if self.gate == "first" else halves[::-1])

    def plain(self, *given: Any) -> Any:
        where, wanted = f"funcops.nn.{type(self).__name__}", f"a plain tensor: torch has no {self.kind}"
        require(self._is_torchs(), where, "x", wanted, type(given[0]).__name__)
        return super().plain(*given)

    def _is_torchs(self) -> bool:
        return (self.kind, self.gate) == ("glu", "second")

    def extra_repr(self) -> str:
        gates = "" if self._is_torchs() else f", kind={self.kind!r}, gate={self.gate!r}"
        return f"dim={self.dim}{gates}"


class SwiGLU(GLU):
    """`silu(first half) * second half`, the order of most models with SwiGLU.

    >>> import torch
    >>> from funcops import nn
    >>> nn.SwiGLU()(torch.tensor([100.0, 5.0]))
    tensor([500.])
    """

    def __init__(self, *, gate: str = "first") -> None:
        super().__init__(kind="swiglu", gate=gate)
