"""The table in place of positions; the rest of rope is held by the laws."""

import pytest
import torch
from cases import rope as cases

from funcops import RopeConfig, rope_bwd, rope_fwd, rope_table


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_a_table_is_its_positions(case, dtype):
    _, (x, positions) = case.make(dtype)
    table = rope_table(positions, case.cfg, dtype=wide(dtype))
    assert table.shape == (*positions.shape, 1, 3 * case.cfg.rotating)
    y, residuals = rope_fwd(None, (x, positions), case.cfg)
    y_table, kept = rope_fwd(None, (x, table), case.cfg)
    assert kept.positions is table
    dx = rope_bwd(residuals, y, case.cfg)[1]
    dx_table = rope_bwd(kept, y, case.cfg)[1]
    assert torch.equal(y, y_table) and torch.equal(dx[0], dx_table[0])
    assert dx_table[1] is None


X, CFG = torch.ones(2, 5, 3, 8), RopeConfig(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rope_table(torch.ones(5), CFG), TypeError, "rope_table: positions must be int64, got float32"),
        (lambda: rope_table(torch.arange(5), CFG, dtype=torch.bfloat16), TypeError, "rope_table: dtype must be float32 or float64"),
        (lambda: rope_fwd(None, (X, torch.ones(5, 6)), CFG), ValueError,
            r"rope_fwd: x.1 \(table\) must be \[5, 1, 24\], got \[5, 6\]"),
        (lambda: rope_fwd(None, (X, torch.ones(3, 5, 1, 24)), CFG), ValueError,
            r"x.1 \(table\) must be \[2, 5, 1, 24\], got \[3, 5, 1, 24\]"),
        (lambda: rope_fwd(None, (X, torch.ones(5, 1, 24).double()), CFG), TypeError, r"x.1 \(table\) must be float32, got float64"),
        (lambda: rope_fwd(None, (X, [1]), CFG), TypeError, r"x.1 \(positions\) must be a tensor"),
    ],
)  # fmt: skip
def test_bad_tables(call, error, message):
    with pytest.raises(error, match=message):
        call()
