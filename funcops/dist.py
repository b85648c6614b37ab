"""`funcops.dist`: parallelism over ranks, as functions. It lives in `funcops.distributed`."""

import sys as _sys

from funcops.contract.moved import Face as _Face
from funcops.distributed import *  # noqa: F403
from funcops.distributed import __all__ as __all__

__path__: list[str] = []  # so that `import funcops.dist.mesh` is asked of `funcops.contract.moved`
_sys.modules[__name__].__class__ = _Face
