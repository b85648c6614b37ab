import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import PatchifyConfig, patchify, patchify_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """One-hot convolutions with kernel and stride p, as patch embeddings are usually written."""
    n, channels, p = len(cfg.patch), x.shape[-len(cfg.patch) - 1], cfg.patch
    flat = x.reshape(-1, *x.shape[-n - 1 :])
    size = channels * torch.Size(p).numel()
    weight = torch.eye(size, dtype=x.dtype).reshape(size, channels, *p)
    y = (F.conv1d, F.conv2d, F.conv3d)[n - 1](flat, weight, stride=p).flatten(2).mT
    return y.reshape(*x.shape[: -n - 1], -1, size)


def case(rows, channels, patch, grid):
    sizes = [p * g for p, g in zip(patch, grid, strict=True)]
    return Case(
        op=patchify,
        cfg=PatchifyConfig(patch),
        x=lambda d: d.randn(*rows, channels, *sizes),
        reference=reference,
        free=() if max(patch) > 1 else ("x",),
        name=f"patchify-{rows}-{channels}-{patch}-{grid}",
    )


CASES = [
    case((2,), 3, (2, 2), (3, 2)),
    case((), 2, (3,), (2,)),
    case((1, 2), 1, (1, 2, 2), (2, 1, 3)),
    case((2,), 1, (1, 1), (1, 1)),
]


@st.composite
def drawn(draw):
    n = draw(st.integers(1, 3))
    patch, grid = (tuple(draw(st.integers(1, 3)) for _ in range(n)) for _ in range(2))
    return case(tuple(draw(st.lists(st.integers(1, 2), max_size=2))), draw(st.integers(1, 3)), patch, grid)


ERRORS = [
    Error(call=lambda: PatchifyConfig((2, 0)), match="PatchifyConfig: patch must be a tuple of one or more sizes of at least 1"),
    Error(
        call=lambda: patchify_fwd(None, torch.ones(2, 3, 4, 5), PatchifyConfig((2, 2))),
        match="patchify_fwd: x must be [..., C, 2 n, 2 n], got [2, 3, 4, 5]",
    ),
    Error(
        call=lambda: patchify_fwd(None, torch.ones(4, 4), PatchifyConfig((2, 2))),
        match="patchify_fwd: x must be [..., C, 2 n, 2 n], got [4, 4]",
    ),
]
