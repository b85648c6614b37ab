"""Two mends of Triton's interpreter, which kernels that it runs need.

The interpreter gives the result of a comparison the dtype of what was compared. As a block of one scalar's comparison
(`(columns < n) & (row >= 0)`) it then holds int32 or int64 in place of bool, which loads and stores refuse as a mask:
"mask has unsupported dtype" (seen with Triton 3.9). Here a block made of a bool is a block of bools.

Triton 3.6 takes a scalar's value from an array of one element in a way that NumPy 2.4 refuses; here as later Tritons do.
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
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *args: Any) -> None:
        patch(tensor, *args)  # which notes what was there, to be restored
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_lang_tensor
