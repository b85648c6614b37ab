"""The table of libraries that multiply, each with the epilogue of a linear layer, in the place of our kernels and of torch's.

`gemm(name)` requests one. It is asked for each product of a linear layer, fused or not; what it does not take goes where it goes by
default. None is taken without a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from funcops.engine.backend.select import PROVIDERS
from funcops.engine.errors import require, require_callable
from funcops.library.kernels.triton.quack_products import by_quack

Provider = Callable[[Tensor, Tensor, Tensor, Any], bool]
PRODUCTS: dict[str, Provider] = {"quack": by_quack}


def register_provider(name: str, provider: Provider) -> None:
    """`provider(a, b, out, e)` writes out = f(e.scale a b + e.bias) + e.add and returns True, or writes nothing and returns False.

    a [M, K] and b [K, N] have one dtype and any strides. out [M, N] is contiguous, of that dtype or, for gradients that are summed,
    of the wide one; it may be `e.add` itself. f is the activation `e.kind` ("" for none), whose argument goes to `e.z` [M, N] where
    `e.mode` is "keep". Where it is "derivative", out is e.scale a b times f'(e.z). A provider computes in the wide dtype, rounds
    once, and gives the same bits again. Raises `ValueError` for a name that is taken."""
    fresh = name.isidentifier() and name not in PROVIDERS
    require(fresh, "register_provider", "name", f"an identifier other than {', '.join(PROVIDERS)}", repr(name))
    require_callable("register_provider", provider=provider)
    PRODUCTS[name] = provider
    PROVIDERS.append(name)


def unregister_provider(name: str) -> None:
    """Take away what `register_provider` added."""
    require(name in PRODUCTS and name != "quack", "unregister_provider", "name", "a registered one", repr(name))
    del PRODUCTS[name]
    PROVIDERS.remove(name)
