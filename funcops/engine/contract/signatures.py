"""The signatures of an op's functions, for editors and type checkers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from funcops.engine.contract.needs import Needs

__all__ = ["C", "G", "P", "R", "X", "Y", "BwdOf", "DgradOf", "Forward", "HasFwd", "InitOf", "Run", "WgradOf"]

P = TypeVar("P")
X = TypeVar("X")
C = TypeVar("C")
Y = TypeVar("Y")
R = TypeVar("R")
G = TypeVar("G")
# type checkers want it said: contravariant what is an argument alone, covariant what is a result alone
P_in = TypeVar("P_in", contravariant=True)
X_in = TypeVar("X_in", contravariant=True)
C_in = TypeVar("C_in", contravariant=True)
R_in = TypeVar("R_in", contravariant=True)
D_in = TypeVar("D_in", contravariant=True)
G_in = TypeVar("G_in", contravariant=True)
# both: the type of `into` and of the result
P_any = TypeVar("P_any")
Y_out = TypeVar("Y_out", covariant=True)
R_out = TypeVar("R_out", covariant=True)


class Written(Protocol[P_in, X_in, C_in, Y_out, R_out]):
    """A `fwd` as its author writes it."""

    def __call__(self, params: P_in, x: X_in, cfg: C_in, *, needs: Needs = ...) -> tuple[Y_out, R_out | None]: ...


class Forward(Protocol[P_in, X_in, C_in, Y_out, R_out]):
    """A `fwd` as its callers see it: there are residuals, unless `needs` asks for no gradient."""

    # without `needs` residuals are never None, so no caller has to ask
    @overload
    def __call__(self, params: P_in, x: X_in, cfg: C_in) -> tuple[Y_out, R_out]: ...
    @overload
    def __call__(self, params: P_in, x: X_in, cfg: C_in, *, needs: Needs) -> tuple[Y_out, R_out | None]: ...


class HasFwd(Protocol[P_in, X_in, C_in, Y_out, R_out]):
    """An op, for the type of what is made of its forward (`Op` is a tuple, whose own type mypy cannot take apart)."""

    @property
    def fwd(self) -> Forward[P_in, X_in, C_in, Y_out, R_out]: ...


class Run(Protocol[P_in, X_in, C_in, Y_out]):
    """The forward of an op with another result, as `value_and_grad` and `differentiable` return it."""

    def __call__(self, params: P_in, x: X_in, cfg: C_in) -> Y_out: ...


class WrittenDgrad(Protocol[R_in, D_in, C_in, Y_out]):
    """A `dgrad` as its author writes it."""

    def __call__(self, residuals: R_in, dy: D_in, cfg: C_in) -> Y_out: ...


class DgradOf(Protocol[R_in, D_in, C_in, Y_out]):
    """A `dgrad` as its callers see it. A dy of None is zero; residuals of None (the forward saved nothing) raise."""

    def __call__(self, residuals: R_in | None, dy: D_in | None, cfg: C_in) -> Y_out: ...


class WrittenBwd(Protocol[R_in, D_in, C_in, P_any, Y_out]):
    """A `bwd` as its author writes it."""

    def __call__(self, residuals: R_in, dy: D_in, cfg: C_in, *, into: P_any | None = ...) -> tuple[P_any, Y_out]: ...


class BwdOf(Protocol[R_in, D_in, C_in, P_any, Y_out]):
    """A `bwd` as its callers see it; residuals or a dy of None mean the same as in `DgradOf`."""

    def __call__(self, residuals: R_in | None, dy: D_in | None, cfg: C_in, *, into: P_any | None = ...) -> tuple[P_any, Y_out]: ...


class WrittenWgrad(Protocol[G_in, C_in, P_any]):
    """A `wgrad` as its author writes it."""

    def __call__(self, pending: G_in, cfg: C_in, *, into: P_any | None = ...) -> P_any: ...


class WgradOf(Protocol[G_in, C_in, P_any]):
    """A `wgrad` as its callers see it: the pending may be None."""

    def __call__(self, pending: G_in | None, cfg: C_in, *, into: P_any | None = ...) -> P_any: ...


class NoInit(Protocol[C_in]):
    """The `init` of an op without params."""

    def __call__(self, cfg: C_in, *, key: Tensor | None = ..., device: Any = ..., dtype: torch.dtype | None = ...) -> None: ...


class InitOf(Protocol[C_in, Y_out]):
    """The `init` of an op with params."""

    def __call__(self, cfg: C_in, *, key: Tensor | None = ..., device: Any = ..., dtype: torch.dtype | None = ...) -> Y_out: ...


class Init(Protocol):
    def __call__(self, cfg: Any, *, key: Tensor | None = ..., device: Any = ..., dtype: torch.dtype | None = ...) -> Any: ...


class Fwd(Protocol):
    def __call__(self, params: Any, x: Any, cfg: Any, *, needs: Needs = ...) -> tuple[Any, Any]: ...


class Bwd(Protocol):
    def __call__(self, residuals: Any, dy: Any, cfg: Any, *, into: Any = ...) -> tuple[Any, Any]: ...


class Dgrad(Protocol):
    def __call__(self, residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]: ...


class Wgrad(Protocol):
    def __call__(self, pending: Any, cfg: Any, *, into: Any = ...) -> Any: ...
