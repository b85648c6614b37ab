"""`funcops.graphs`: CUDA graphs for pure functions, and a recorder where there is no GPU.
They live in `funcops.adapters.graphs`."""

from funcops.adapters.graphs import *  # noqa: F403
