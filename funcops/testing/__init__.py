"""The laws of the contract, as checks for any op: `check_op(op, cfg=..., x=..., reference=...)`."""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from funcops.testing.case import Case, Draw, Error
from funcops.testing.laws import LAWS, check_op
from funcops.testing.tolerances import assert_close

if _TYPE_CHECKING:
    from funcops.distributed.testing import DistCase, Placed, check_dist, run_ranks

__all__ = ["Case", "DistCase", "Draw", "Error", "LAWS", "Placed", "assert_close", "check_dist", "check_op", "run_ranks"]

if not _TYPE_CHECKING:  # a checker would take every name for one of the module's

    def __getattr__(name: str) -> object:
        """A name of `funcops.distributed.testing`, imported at its first use: the laws of an op need no ranks."""
        if name not in __all__:
            raise AttributeError(f"module 'funcops.testing' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
        return getattr(_import_module("funcops.distributed.testing"), name)
