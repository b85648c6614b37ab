"""Triton's interpreter with the changes of `helpers/quick_triton.py` gives the same results as without."""

import pytest
import torch

pytest.importorskip("triton")

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


@pytest.mark.parametrize("end", ["all", "few", "one", "none", "transposed"])
@pytest.mark.parametrize("to", ["bfloat16", "float32"])
def test_casts_have_the_bits_of_the_interpreters_own(to, end):
    """Every bfloat16, subnormal numbers and NaN included, and as many float32 numbers."""
    upper = np.arange(2**16, dtype=np.uint16)
    lower = torch.randint(2**16, (2**16,), generator=torch.Generator().manual_seed(3)).numpy().astype(np.uint32)
    bits = upper if to == "float32" else ((upper.astype(np.uint32) << 16) | lower).view(np.float32)
    normal = (upper & 0x7F80) != 0
    given = {
        "all": bits,
        "few": bits[normal],
        "one": bits[-1:],
        "none": bits[:0],
        "transposed": bits[normal][:4096].reshape(64, 64).T,
    }[end]
    dtypes = (tl.float32, tl.bfloat16) if to == "bfloat16" else (tl.bfloat16, tl.float32)
    got = interpreter._convert_float(given, *dtypes, None)
    want = interpreter._convert_float.__wrapped__(given, *dtypes, None)
    assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all()
