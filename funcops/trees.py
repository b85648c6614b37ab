"""`funcops.trees` is `funcops.engine.trees`."""

import sys as _sys

from funcops.engine import trees as _trees
from funcops.engine.trees import *  # noqa: F403  for editors, which read files

_sys.modules[__name__] = _trees
