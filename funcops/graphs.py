"""`funcops.graphs`: CUDA graphs for pure functions, and a recorder for machines without a GPU.
They live in `funcops.adapters.graphs`."""

from funcops.adapters.graphs import *  # noqa: F403
