"""The interpreter's masks: a block's comparison combined with a scalar's, for every dtype and operator, in either order."""

import itertools
import os

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

from triton import language as tl  # noqa: E402

from funcops.engine.backend.launch import launcher  # noqa: E402


@triton.jit
def masked(x_ptr, y_ptr, n, last, WIDE: tl.constexpr, FIRST: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    i = tl.arange(0, BLOCK)
    one = at < last if OP == "<" else (at >= last if OP == ">=" else at == last)
    mask = (one & (i < n)) if FIRST else ((i < n) & one)
    tl.store(y_ptr + at * BLOCK + i, tl.load(x_ptr + i, mask=mask, other=0.0), mask=mask)
    for j in range(at, at + 1):  # a scalar as a loop's bound
        tl.store(y_ptr + j * BLOCK + i, 7.0, mask=(i == n) & one)


@pytest.mark.parametrize("wide, first, op", [*itertools.product((False, True), (False, True), ("<", ">=", "=="))])
def test_a_scalar_comparison_masks_a_block(wide, first, op):
    x, y = torch.randn(8), torch.zeros(3, 8)
    launcher(masked)(3, 1, 1, x, y, 5, 1, wide, first, op, 8)
    held = {"<": [True, False, False], ">=": [False, True, True], "==": [False, True, False]}[op]
    expected = torch.cat([x[:5], torch.tensor([7.0, 0.0, 0.0])])
    assert torch.equal(y, torch.stack([expected if on else torch.zeros(8) for on in held]))
