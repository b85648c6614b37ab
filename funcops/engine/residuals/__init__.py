from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.pack_unpack import pack, unpack
from funcops.engine.residuals.policy import POLICIES, Compress, Drop, Offload, Policy, Recompute, Save
from funcops.engine.residuals.report import report

__all__ = ["Compress", "Drop", "Offload", "POLICIES", "Policy", "Recompute", "Save"]
__all__ += ["donate", "pack", "report", "unpack"]
