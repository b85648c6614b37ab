"""A tensor that several steps of a call derive from another, such as a rotary table from positions, is made once.

The program of a half of a combinator with such steps opens a memo while it runs (`Source`); however deep a step is, it finds there
what the first one made. The memo ends with the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from funcops.engine.backend.declare import tracing

__all__ = ["once"]


class _Call(threading.local):
    made: dict[Any, Any] | None = None  # what its steps have made, with what it was made of; None outside of such a program


call = _Call()
# By it a write between two steps is seen. The module that reads versions, which is above this one, sets it: contract/versions.py.
version: Callable[[torch.Tensor], Any] = id


def once(make: Callable[..., torch.Tensor], of: torch.Tensor, *how: Hashable) -> torch.Tensor:
    """`make(of, *how)`, or what an earlier step of the same call made so of the same tensor, of any shape and dtype.

    A tracer makes its own: its program may read nothing that was made before, and it joins equal steps itself. So does each step
    of an inference tensor, which has no version by which a write to it is seen."""
    if call.made is None or of.is_inference() or tracing():
        return make(of, *how)
    # What is made on one stream may not be there for another.
    key = make, id(of), version(of), of.is_cuda and torch.cuda.current_stream(of.device), how
    found = call.made.get(key)
    if found is None:
        found = call.made[key] = of, make(of, *how)  # with the tensor, as long as its id is a key
    return found[1]  # type: ignore[no-any-return]
