"""Good arguments of the public callables of `funcops.invariant`: see `good_arguments`."""

from __future__ import annotations

from good_rows import CFG, CHAIN, Row

from funcops import linear

SIZES = {"rows": (0,), "queries": (0, 48, 160)}

INVARIANT = {
    "invariant.PinnedConfig": Row(lambda: {"op": linear, "cfg": CFG, "rows": 64, "queries": 96}, SIZES),
    "invariant.with_invariant": Row(lambda: {"cfg": CHAIN, "rows": 64, "queries": 96}, SIZES),
}
