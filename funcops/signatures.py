"""The signatures of an op's functions, for editors and type checkers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from funcops.needs import Needs

P_in = TypeVar("P_in", contravariant=True)
X_in = TypeVar("X_in", contravariant=True)
C_in = TypeVar("C_in", contravariant=True)
Y_out = TypeVar("Y_out", covariant=True)
R_out = TypeVar("R_out", covariant=True)


class Written(Protocol[P_in, X_in, C_in, Y_out, R_out]):
    """A `fwd` as its author writes it."""

    def __call__(self, params: P_in, x: X_in, cfg: C_in, *, needs: Needs = ...) -> tuple[Y_out, R_out | None]: ...


class Forward(Protocol[P_in, X_in, C_in, Y_out, R_out]):
    """A `fwd` as its callers see it: there are residuals, unless `needs` asks for none."""

    @overload
    def __call__(self, params: P_in, x: X_in, cfg: C_in) -> tuple[Y_out, R_out]: ...
    @overload
    def __call__(self, params: P_in, x: X_in, cfg: C_in, *, needs: Needs) -> tuple[Y_out, R_out | None]: ...


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
