"""The laws of the contract, as checks for anybody's op: `check_op(op, cfg=..., x=..., reference=...)`."""

from funcops.testing.case import Case as Case
from funcops.testing.case import Draw as Draw
from funcops.testing.case import Error as Error
from funcops.testing.dist import DistCase as DistCase
from funcops.testing.dist import Placed as Placed
from funcops.testing.dist import check_dist as check_dist
from funcops.testing.laws import LAWS as LAWS
from funcops.testing.laws import check_op as check_op
from funcops.testing.ranks import run_ranks as run_ranks
from funcops.testing.tolerances import assert_close as assert_close
