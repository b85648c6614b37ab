from funcops.residuals.donate import donate as donate
from funcops.residuals.report import report as report
