"""Ranks as threads of one process, and the laws of an op over ranks; `funcops.testing` has these names, too."""

from funcops.distributed.testing.dist import DistCase, Placed, check_dist
from funcops.distributed.testing.ranks import run_ranks

__all__ = ["DistCase", "Placed", "check_dist", "run_ranks"]
