"""The property `view` of an op, against the memory of its y."""

import pytest
import torch
from dist_cases import ONE, collectives
from law_cases import CASES

from funcops.engine.contract.needs import Needs
from funcops.engine.trees import tensors
from funcops.testing.laws import run

NAMES = sorted({case.op.name for case, _ in CASES})


def shares(case, dtype):
    """Whether y is x, or a view of it; None if there is nothing to share."""
    params, x, *_ = run(case, dtype)
    y, _ = case.op.fwd(params, x, case.cfg, needs=Needs.NONE)
    memory = {t.untyped_storage().data_ptr() for t in tensors(x) if t.numel()}
    found = [t.untyped_storage().data_ptr() in memory for t in tensors(y) if t.numel()]
    return all(found) if found and memory else None


@pytest.mark.parametrize("name", NAMES)
def test_an_op_whose_y_is_a_view_says_so(name):
    own = [(case, dtype) for case, dtype in CASES if case.op.name == name]
    found = {shares(case, dtype) for case, dtype in own[:6]} - {None}
    assert (found == {True}) == own[0][0].op.view


@pytest.mark.parametrize(("op", "case"), [*collectives(1, 1, 1, 0)], ids=lambda given: getattr(given, "name", ""))
def test_a_collective_passes_for_a_view(op, case):
    """It only moves numbers, or adds them; on one rank y is x."""
    x = torch.randn(8, 8)
    y, _ = op.fwd(None, x, case.cfg(ONE), needs=Needs.NONE)
    assert op.view and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
