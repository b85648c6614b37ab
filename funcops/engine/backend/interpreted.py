"""Two patches of Triton's interpreter that our kernels need.

The interpreter gives the result of a comparison the dtype of its operands. A block that is broadcast from a scalar's comparison
(`(columns < n) & (row >= 0)`) then holds int32 or int64 instead of bool, which loads and stores reject as a mask: "mask has
unsupported dtype" (seen with Triton 3.9). Patched, a block made from a bool holds bools.

Triton 3.6 reads a scalar's value from an array of one element in a way that NumPy 2.4 rejects; patched, it reads it as later
versions do.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def mend() -> None:
    """Patch the interpreter, once per process, before it runs the first kernel."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    kind = interpreter.InterpreterBuilder
    before = kind.create_splat

    def create_splat(self: Any, *args: Any) -> Any:
        handle = before(self, *args)
        # the arguments are the shape or type of the block and the value to fill it with; their order differs between versions
        scalar = next(arg for arg in args if isinstance(arg, interpreter.TensorHandle))
        if scalar.data.dtype == np.bool_ and handle.data.dtype != np.bool_:
            return interpreter.TensorHandle(handle.data.astype(np.bool_), tl.int1)
        return handle

    kind.create_splat = create_splat
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *args: Any) -> None:
        patch(tensor, *args)  # which records the old methods, to restore them
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_lang_tensor
