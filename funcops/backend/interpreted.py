"""A mend of Triton's interpreter, which every kernel that it runs needs from Triton 3.8 on.

The interpreter gives the result of a comparison the dtype of what was compared. As a block of one scalar's comparison
(`(columns < n) & (row >= 0)`) it then holds int32 or int64 in place of bool, which loads and stores refuse as a mask:
"mask has unsupported dtype". Here a block made of a bool is a block of bools.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def mend() -> None:
    """Once for a process, before the first kernel that is interpreted."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    kind = interpreter.InterpreterBuilder
    before = kind.create_splat

    def create_splat(self: Any, *args: Any) -> Any:
        handle = before(self, *args)
        # called with the shape, or the type of the block, and what to fill it with, in an order that versions change
        scalar = next(arg for arg in args if isinstance(arg, interpreter.TensorHandle))
        if scalar.data.dtype == np.bool_ and handle.data.dtype != np.bool_:
            return interpreter.TensorHandle(handle.data.astype(np.bool_), tl.int1)
        return handle

    kind.create_splat = create_splat
