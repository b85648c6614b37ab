"""How rules of fusion run a linear layer of any variant: its rows or features over ranks, or its operands in low precision.

    y = P + b, P the product of `rows(x)` and the weight        dx: the product of `dy_rows(dy)` and the weight

A rule asks for these properties, not for an op, so it serves each variant that has them. An op has its `LinearLayer` in `Op.layer`.
Its raw dgrad also takes the sums of dy over blocks of rows, of which it makes the bias gradient: `dgrad(residuals, dy, cfg, sums)`.

The functions of every variant but `linear` itself are `fwd`, `dgrad`, `wgrad` and `bwd` here, written once in terms of the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import NO_GRADIENT


class LinearLayer:
    """The base of the hooks of an op whose params are `LinearParams`. Its defaults hold for a layer without communication. A hook
    without a default is called only if the layer has its property: `kept` if `y_is_product`, `pending` if `dense`, `prepared` and
    `from_prepared` if `prepares`, `wait_x` if `start_x` sends something, and those from `run` on by the functions of the layer."""

    dense = True
    """Whether the operands of the products are tensors, not codes."""

    def __init__(self, name: str = "", residuals: Any = None, pending: Any = None) -> None:
        """The name of its op, and the classes of its residuals and pending; not given for a layer whose functions are its own."""
        self.name, self._residuals, self._pending = name, residuals, pending

    def keeps(self, config: type) -> Any:
        """The classes of its residuals, as an op declares them."""
        return self._residuals

    def y_is_product(self, cfg: Any) -> bool:
        """Whether y is the product of `rows(x, cfg)` and the weight, and the bias: a kernel may compute it together with the steps
        that follow."""
        return self.dense

    def bias_apart(self, cfg: Any) -> bool:
        """Whether y is the product of the prepared x, to which another kernel adds the bias: it may be added together with the
        steps that follow."""
        return not self.dense and cfg.bias and self.prepares(cfg) is not None

    def dx_is_product(self, cfg: Any) -> bool:
        """Whether dx is the product of `dy_rows(dy, cfg)` and the weight: a kernel may compute it together with the dgrad of the
        step before."""
        return self.dense

    def overlaps(self, cfg: Any) -> bool:
        """Whether the backward sends dx under the product of dw, which a rule that ends with dx would prevent."""
        return False

    def rows(self, x: Tensor, cfg: Any) -> Tensor:
        return x

    def dy_rows(self, dy: Tensor, cfg: Any) -> Tensor:
        return dy

    def y_rows(self, rows: int, cfg: Any) -> int:
        """The size of y's first dimension, from x's."""
        if not cfg.sequence_parallel:
            return rows
        return rows * cfg.axis.size if cfg.shards_features else rows // cfg.axis.size  # type: ignore[no-any-return]

    def x_rows(self, rows: int, cfg: Any) -> int:
        """The size of x's first dimension, from y's."""
        if not cfg.sequence_parallel:
            return rows
        return rows // cfg.axis.size if cfg.shards_features else rows * cfg.axis.size  # type: ignore[no-any-return]

    def _absent(self, hook: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}.{hook}: must be defined, as the layer says that a rule may call it")

    def kept(self, cfg: Any, needs: Needs, x: Tensor, weight: Tensor, y: Tensor) -> Any:
        """The residuals, of checked tensors."""
        raise self._absent("kept")

    def prepares(self, cfg: Any) -> Hashable:
        """Siblings for which this is equal prepare their shared x once: gathered, in codes. None if x is read as it is."""
        return None

    def prepared(self, x: Tensor, params: Any, cfg: Any, needs: Needs) -> Any:
        """x as the products of siblings in low precision read it, after the checks of `check`."""
        raise self._absent("prepared")

    def from_prepared(self, given: Any, params: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        """y and residuals from the prepared x."""
        raise self._absent("from_prepared")

    def check(self, params: Any, x: Tensor, cfg: Any) -> None:
        """Raise what the op's forward raises for its params."""

    def joins(self, cfg: Any) -> Hashable:
        """Siblings for which this is equal sum their parts of dx, or prepare x for their dw, once. None if they cannot."""
        return None

    def y_products(self, x: Tensor, cfg: Any, products: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The y of siblings, from the function that computes them from `rows(x, cfg)`, or from some of these rows."""
        return products(self.rows(x, cfg))

    def start_dx(self, dys: tuple[Tensor, ...], cfg: Any, product: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
        """The dx of siblings in flight, from the function that computes a rank's part of it, of all rows or of some."""
        return product(dys)

    def wait_dx(self, dx: Tensor, cfg: Any) -> Tensor:
        """The dx that `start_dx` returned, on arrival."""
        return dx

    def start_x(self, residuals: Any, dy: Tensor, cfg: Any) -> Any:
        """Begin to send the x that dw reads; None if nothing is sent. `wait_x` returns it, for `rows` of the pending."""
        return None

    def wait_x(self, sent: Any, residuals: Any, cfg: Any) -> Any:
        raise self._absent("wait_x")

    def dw_rows(self, pending: Any, cfg: Any) -> Tensor:
        """The x that dw reads."""
        return self.rows(pending.x, cfg)

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        """The fields of a pending that siblings with the same x share, made from x once; None if there is nothing to make."""
        return None

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any) -> Any:
        """The pending weight gradient, of dy and `dy_rows(dy, cfg)`."""
        raise self._absent("pending")

    # What the functions below are made of: the layer of an op with functions of its own, such as `linear`, has none of these.
    init: Callable[..., Any]  # (cfg, key, device, dtype) -> params
    check_x: Callable[..., None]  # (where, x, cfg): raise what the op's forward raises for its x
    run: Callable[..., tuple[Tensor, Any]]  # (params, x, cfg, needs) -> y and residuals, of checked tensors
    read_dy: Callable[..., tuple[Any, Any]]
    """`(where, residuals, dy, cfg, sums=None, into=None)`: check dy, and the accumulators if given, before anything is sent. It
    returns dy as the product for dx reads it, None if dx is not needed, and the pending weight gradient."""
    part: Callable[..., Tensor]
    """`(row, residuals, cfg)`: this rank's part of dx, as the `product` of `start_dx` computes it, from what `read_dy` returned."""
    gradients: Callable[..., Any]
    """`(where, pending, cfg, into, sent=None)`: the gradients of params, added to `into` if given. `sent`: x, if it is in flight"""
    bwd: Callable[..., tuple[Any, Tensor]]  # (residuals, dy, cfg, into), if it is not its halves one after the other
    products: Callable[..., list[Any]]  # (pending, cfg, *, into): as in `Op.products`

    def fwd(self, params: Any, x: Tensor, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        self.check_x(f"{self.name}_fwd", x, cfg)
        self.check(params, x, cfg)
        return self.run(params, x, cfg, needs)

    def dgrad(self, residuals: Any, dy: Tensor, cfg: Any, sums: Tensor | None = None) -> tuple[Tensor, Any]:
        row, pending = self.read_dy(f"{self.name}_dgrad", residuals, dy, cfg, sums)
        return NO_GRADIENT if row is None else self.wait_dx(self.dx_of(row, residuals, cfg), cfg), pending

    def dx_of(self, row: Any, residuals: Any, cfg: Any) -> Tensor:
        """dx in flight."""
        return self.start_dx((row,), cfg, lambda rows: self.part(rows[0], residuals, cfg))

    def wgrad(self, pending: Any, cfg: Any, into: Any) -> Any:
        return self.gradients(f"{self.name}_wgrad", pending, cfg, into)
