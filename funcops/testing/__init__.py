"""The laws of the contract, as checks for any op: `check_op(op, cfg=..., x=..., reference=...)`."""

from funcops.testing.case import Case, Draw, Error
from funcops.testing.dist import DistCase, Placed, check_dist
from funcops.testing.laws import LAWS, check_op
from funcops.testing.ranks import run_ranks
from funcops.testing.tolerances import assert_close

__all__ = ["Case", "DistCase", "Draw", "Error", "LAWS", "Placed", "assert_close", "check_dist", "check_op", "run_ranks"]
