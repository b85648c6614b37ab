"""`funcops.nn`: modules with torch.nn's names that run on funcops' operators. They live in `funcops.adapters.nn`."""

from funcops.adapters.nn import *  # noqa: F403
