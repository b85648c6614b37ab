"""`funcops.dist`: parallelism over ranks, as functions. It lives in `funcops.distributed`."""

from funcops.distributed import *  # noqa: F403
from funcops.distributed import __all__ as __all__
