from funcops.residuals.donate import donate
from funcops.residuals.ledger import Ledger
from funcops.residuals.pack_unpack import pack, unpack
from funcops.residuals.policy import POLICIES, Compress, Drop, Offload, Policy, Recompute, Save
from funcops.residuals.report import diff, report

__all__ = ["Compress", "Drop", "Ledger", "Offload", "POLICIES", "Policy", "Recompute", "Save"]
__all__ += ["diff", "donate", "pack", "report", "unpack"]
