"""Scales that are powers of two, of rows whose largest number is at the edge of a format's range."""

import pytest
import torch

pytest.importorskip("triton")

from funcops.engine.backend import backend
from funcops.library.kernels.quantize import quantize_row


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_scales_that_are_powers_of_two_hold_the_largest_number_itself(element):
    """Rows are drawn whose largest number is the format's largest times a power of two, or the number beside that."""
    largest = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[element]
    sizes = largest * torch.exp2(torch.arange(-20.0, 20.0, 4.0))
    x = torch.stack([torch.nextafter(sizes, sizes * 0), sizes, torch.nextafter(sizes, sizes * 2)], 1).view(-1, 1) * torch.ones(32)
    for kind in ("e8m0", "e8m0_floor", "e8m0_even", "e8m0_ceil"):
        want, got = [], []
        for name, found in (("torch", want), ("triton", got)):
            with backend(name):
                found += [t.clone() for t in quantize_row(x, element, 1, 32, kind, None, None)]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True)), kind
