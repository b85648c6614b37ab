from typing import TYPE_CHECKING

from funcops.contract.renamed import old_names
from funcops.residuals.donate import donate
from funcops.residuals.ledger import Ledger
from funcops.residuals.pack_unpack import pack, unpack
from funcops.residuals.policy import POLICIES, Compress, Drop, Offload, Policy, Recompute, Save
from funcops.residuals.report import diff, report

__all__ = ["Compress", "Drop", "Ledger", "Offload", "POLICIES", "Policy", "Recompute", "Save"]
__all__ += ["diff", "donate", "pack", "report", "unpack"]


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_names(__name__, fetch="unpack", stow="pack")
