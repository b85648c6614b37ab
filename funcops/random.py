"""`funcops.random` is `funcops.engine.random`."""

import sys as _sys

from funcops.engine import random as _random
from funcops.engine.random import *  # noqa: F403  for editors, which read files

_sys.modules[__name__] = _random
