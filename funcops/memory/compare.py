"""`diff`: the difference of two reports of what is kept."""

from __future__ import annotations

from typing import NamedTuple

from funcops.engine.errors import require_type, size_of
from funcops.engine.residuals.report import Report


class Change(NamedTuple):
    """A path whose bytes differ between two reports; 0 bytes if a report lacks it."""

    path: str
    before: int
    after: int


class Difference(list[Change]):
    """The paths whose bytes differ between two reports, the largest change first."""

    def __str__(self) -> str:
        width = max((len(change.path) for change in self), default=0)
        lines = [
            f"{c.path.ljust(width)}  {size_of(c.before):>12} -> {size_of(c.after):>12}  {_change(c.after - c.before):>12}"
            for c in self
        ]
        return "\n".join([*lines, f"{_change(sum(c.after - c.before for c in self))} in all"])

    __repr__ = __str__


def _change(nbytes: int) -> str:
    return "+" * (nbytes >= 0) + size_of(nbytes)


def diff(before: Report, after: Report) -> Difference:
    """Compare two reports: the paths whose bytes differ, before and after. Raises `TypeError` if an argument is not a report.

    >>> import torch
    >>> from funcops import Compress, Policy, SoftcapConfig, diff, report, softcap, with_policy
    >>> x, cfg = torch.ones(32, 128), SoftcapConfig(30.0)
    >>> before = report(softcap.fwd(None, x, cfg)[1])
    >>> after = report(with_policy(softcap, Policy({"x": Compress("fp8")})).fwd(None, x, cfg)[1])
    >>> print(diff(before, after))
    x     16.00 KiB ->     4.03 KiB    -11.97 KiB
    -11.97 KiB in all
    """
    for name, one in (("before", before), ("after", after)):
        require_type("diff", name, one, Report)
    sides = [{row.path: row.bytes for row in one.rows} for one in (before, after)]
    every = dict.fromkeys([*sides[0], *sides[1]])
    changes = [Change(path, sides[0].get(path, 0), sides[1].get(path, 0)) for path in every]
    return Difference(sorted((c for c in changes if c.before != c.after), key=lambda c: -abs(c.after - c.before)))
