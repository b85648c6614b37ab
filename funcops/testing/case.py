"""A case: an op with a config, inputs and an independent reference; one row of the law tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.compose.step import check_body
from funcops.engine.contract.op import Op
from funcops.engine.errors import (
    require,
    require_callable,
    require_count,
    require_device,
    require_dtype,
    require_flag,
    require_type,
)
from funcops.engine.trees import tree_map_tensors

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """Makes seeded tensors in one dtype.

    >>> import torch
    >>> from funcops.testing import Draw
    >>> draw = Draw(torch.float64, 0)
    >>> draw.randn(2, 3).dtype, draw.integers(0, 10, 4).shape
    (torch.float64, torch.Size([4]))
    """

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        require_dtype("Draw", dtype)
        require_count("Draw", 0, seed=seed)
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cpu", generator=self.generator).to(self.dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device="cpu", generator=self.generator).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device="cpu", generator=self.generator)

    def key(self, seed: int = 1) -> Tensor:
        return random.key(seed, device="cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`x(draw)` makes x; `reference(params, x, cfg)` is plain differentiable PyTorch for y; `params(draw)` makes params, by
    default `op.init` with every leaf drawn anew.

    >>> import torch
    >>> from funcops import ScaleConfig, scale
    >>> from funcops.testing import Case
    >>> case = Case(op=scale, cfg=ScaleConfig(2.0), x=lambda draw: draw.randn(3), reference=lambda params, x, cfg: 2.0 * x)
    >>> params, x = case.make(torch.float64)
    >>> case.reference(params, x, case.cfg).equal(case.op.fwd(params, x, case.cfg)[0])
    True
    """

    op: Op
    cfg: Any
    x: Callable[[Draw], Any]
    reference: Callable[[Any, Any, Any], Any]
    params: Callable[[Draw], Any] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    name: str = ""
    free: tuple[str, ...] = ()  # paths, such as "x" or "x.0", of leaves that may have any size
    cancels: tuple[str, ...] = ()  # "x", "params.weight": leaves whose gradient's terms cancel; say why beside it
    unrounded: tuple[str, ...] = ()  # "params.weight": whose wider accumulators get the sum before it is rounded
    casts: bool = False  # whether y has another float dtype than the case: a cast's, a float32 loss's
    exempt: tuple[str, ...] = ()  # laws that cannot hold here; say why beside it
    device: str = "cpu"
    bits: int | None = None  # of a sum's mantissa, if the device's products keep fewer than their dtype has

    def __post_init__(self) -> None:
        check_body("Case", self.op, self.cfg)
        require_callable("Case", x=self.x)
        for name in ("reference", "params"):
            if getattr(self, name) is not None:
                require_callable("Case", **{name: getattr(self, name)})
        require_type("Case", "name", self.name, str)
        require_device("Case", self.device)
        require_flag("Case", casts=self.casts)
        if self.bits is not None:
            require_count("Case", bits=self.bits)
        for field in ("dtypes", "free", "cancels", "unrounded", "exempt"):
            value, wanted = getattr(self, field), torch.dtype if field == "dtypes" else str
            right = isinstance(value, tuple) and all(isinstance(one, wanted) for one in value)
            require(right, "Case", field, f"a tuple of {wanted.__name__}", repr(value))

    def __str__(self) -> str:
        return self.name or f"{self.op.name}-{self.cfg}"

    def make(self, dtype: torch.dtype, seed: int = 0) -> tuple[Any, Any]:
        """Make (params, x) in this dtype."""
        draw = Draw(dtype, seed)
        if self.params is not None:
            params = self.params(draw)
        else:
            params = self.op.init(self.cfg, key=random.key(seed, device="cpu"), dtype=dtype)
            params = tree_map_tensors(lambda t: draw.randn(*t.shape), params)
        return tree_map_tensors(lambda t: t.to(self.device), (params, self.x(draw)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """A bad call, and a fragment of the message it must give.

    >>> from funcops import ScaleConfig, scale
    >>> from funcops.testing import Error
    >>> bad = Error(call=lambda: scale.fwd(None, [1.0], ScaleConfig(2.0)), match="x must be", error=TypeError)
    >>> try:
    ...     bad.call()
    ... except bad.error as error:
    ...     bad.match in str(error)
    ...
    True
    """

    call: Callable[[], Any]
    match: str
    error: type[Exception] = ValueError

    def __post_init__(self) -> None:
        require_callable("Error", call=self.call)
        require_type("Error", "match", self.match, str)
        require_type("Error", "error", self.error, type)
