from funcops.residuals.donate import donate
from funcops.residuals.ledger import Ledger
from funcops.residuals.policy import POLICIES, Compress, Drop, Offload, Policy, Recompute, Save
from funcops.residuals.put_away import fetch, stow
from funcops.residuals.report import diff, report

__all__ = ["Compress", "Drop", "Ledger", "Offload", "POLICIES", "Policy", "Recompute", "Save"]
__all__ += ["diff", "donate", "fetch", "report", "stow"]
