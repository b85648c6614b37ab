"""Packed sequences that end before the rows do, which nobody notices on a device: the rows that are left are one more sequence."""

import pytest
import torch

from funcops.library.kernels import attention as library
from funcops.library.kernels import scored_attention as declared
from funcops.library.kernels.triton import scored_attention as by_triton
from funcops.testing.tolerances import assert_close

ENDS = {"early": [0, 3, 9], "empty": [0, 0, 9, 9], "none": [0], "whole": [0, 5, 14]}
T = 14


def attended(q, k, v, ends, causal):
    """Softmax written out, sequence by sequence."""
    parts = []
    for a, b in zip(ends, ends[1:], strict=False):
        s = torch.einsum("thd,shd->hts", q[0, a:b], k[0, a:b]) * 0.3
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1) if causal else torch.zeros(b - a, b - a, dtype=torch.bool)
        parts.append(torch.einsum("hts,shv->thv", s.masked_fill(hidden, float("-inf")).softmax(-1), v[0, a:b]))
    return torch.cat(parts).unsqueeze(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_rows_that_are_left_see_each_other_alone(by, name, causal, monkeypatch):
    monkeypatch.setattr(declared, "read_here", lambda _: False)  # as on a device
    draw = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, T, 2, 16, generator=draw) for _ in range(4))
    ends, score = torch.tensor(ENDS[name], dtype=torch.int32), (causal, 0, 0.0, False, 0.3)
    kernels = declared if by == "torch" else by_triton
    forward, backward = kernels.scored_attention_fwd, kernels.scored_attention_bwd
    if by == "torch":
        forward, backward = forward.kernel.torch_impl, backward.kernel.torch_impl
    out, lse = forward(q, k, v, None, ends, *score)
    found = backward(dy, q, k, v, None, ends, out, lse, *score, False)
    given = [t.double().requires_grad_() for t in (q, k, v)]
    want = attended(*given, [*ENDS[name], T], causal)
    assert_close(out, want.detach(), dtype=torch.float32, length=T)
    assert_close(found[:3], torch.autograd.grad(want, given, dy.double()), dtype=torch.float32, length=T)


@pytest.mark.parametrize("before", [0, 6])
def test_torchs_kernel_gets_ends_that_reach_the_last_row(before):
    """Over keys of more rows than q has, as over ranks, too."""
    q, k = torch.empty(1, T - before, 2, 8), torch.empty(1, T, 2, 8)
    of_q, of_k = library._ends(torch.tensor([0, 3, 9], dtype=torch.int32), q, k)
    assert of_k.tolist() == [0, 3, 9, T] and of_q.tolist() == [max(0, n - before) for n in (0, 3, 9, T)]
    assert library._ends(None, q, k) == (None, None)
