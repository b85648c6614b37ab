"""Forward and backward on fake CUDA tensors: no GPU is needed to see which implementation is chosen, and that no tensor is made
on another device."""

import pytest
import torch
from test_laws import CASES
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.testing.laws import float_like
from funcops.trees import leaves, tensors, tree_map_tensors

ROWS = [(case, dtype) for case, dtype in CASES if dtype in (torch.float64, torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=str)
def test_results_stay_on_the_device(case, dtype):
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg)
    dy = float_like(y, 7)
    want = y, case.op.bwd(residuals, dy, case.cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, x, dy = tree_map_tensors(
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), (params, x, dy)
        )
        try:
            y, residuals = case.op.fwd(params, x, case.cfg)
            got = y, case.op.bwd(residuals, dy, case.cfg)
        except RuntimeError as e:
            if "not linked with support for cuda" in str(e):
                pytest.skip("this build of torch cannot index a fake CUDA tensor")
            raise
    for g, w in zip(leaves(got), leaves(want), strict=True):
        assert (g is None) == (w is None)
        assert g is None or (g.shape, g.dtype, g.device.type) == (w.shape, w.dtype, "cuda")
    assert all(t.is_cuda for t in tensors(residuals))
