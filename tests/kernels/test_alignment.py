"""Every kernel at unaligned addresses: all tensors are moved by 1, 3 and 5 elements."""

import pytest
import torch
from tiers import drawn
from tiny_kernel_calls import names, tiny
from torch import Tensor

from funcops.engine.backend import backend
from funcops.engine.trees import leaves, tree_map
from funcops.library.kernels.attention import aligned
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def moved(args, by):
    def move(t):
        if not isinstance(t, Tensor):
            return t
        room = torch.empty(t.numel() + by, dtype=t.dtype)
        return room[by:].view(t.shape).copy_(t)

    return tree_map(move, args)


def floats(tree):
    return [t for t in leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def check(got, want, dtype):
    """Partial sums, whose number depends on the implementation, are compared by their sum."""
    for g, w in zip(floats(got), floats(want), strict=True):
        g, w = (g, w) if g.shape == w.shape else (g.sum(0), w.sum(0))
        assert_close(g, w, dtype=dtype)


@pytest.mark.turns("i", "dtype", every=3)
@pytest.mark.parametrize(("i", "dtype"), drawn(range(len(names())), DTYPES, names()))
def test_every_kernel_at_odd_addresses(i, dtype):
    """Each call and dtype has its own move, and the calls of a kernel have different ones."""
    by = (1, 3, 5)[(i // 3 + DTYPES.index(dtype)) % 3]
    call = tiny(dtype)[i]
    dtype = call.dtype or dtype
    plain, args = moved(call.args, 0), moved(call.args, by)
    want = call.kernel.kernel.torch_impl(*plain)
    with backend("triton"):
        got = call.kernel(*args)
    check(got, want, dtype)
    if call.kernel.kernel.mutates:
        check(args, plain, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_copies_only_what_no_vector_reads(dtype):
    t = torch.zeros(2, 3, 4, 16, dtype=dtype)
    assert aligned(t) is t and aligned(t.transpose(1, 2)).data_ptr() == t.data_ptr()
    odd = torch.zeros(t.numel() + 1, dtype=dtype)[1:].view(t.shape)  # an address between two vectors
    for bad in (odd, t.transpose(2, 3), torch.zeros(2, 3, 4, 17, dtype=dtype)[..., :16]):
        copy = aligned(bad)
        assert copy.data_ptr() != bad.data_ptr() and copy.is_contiguous() and torch.equal(copy, bad)
