"""The two tiers. What is marked `slow` is the second: `make test` leaves it out, `make test-all` runs both.

A grid whose cases prove much the same is drawn: each row's turn comes at another column, so that every row and every column is in
the first tier, and the rest of the grid in the second.
"""

import pytest

COLLECTED = pytest.StashKey()  # every test, before any is left out by its marks


def drawn(rows, columns, ids=None, families=None):
    """Parameters (row, column): in the first tier the i-th row with the i-th column, cyclically; all others are marked slow. With
    `families`, one for each row, only the first row of a family is in the first tier."""
    columns = list(columns)
    ids = [str(row) for row in rows] if ids is None else ids
    again = [families is not None and family in families[:i] for i, family in enumerate(families or ids)]
    return [
        pytest.param(row, column, id=f"{name}-{column}", marks=() if i % len(columns) == j and not again[i] else pytest.mark.slow)
        for i, (row, name) in enumerate(zip(rows, ids, strict=True))
        for j, column in enumerate(columns)
    ]
