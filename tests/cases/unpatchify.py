import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import UnpatchifyConfig, unpatchify, unpatchify_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """One-hot transposed convolutions."""
    n, size = len(cfg.patch), x.shape[-1]
    channels = size // torch.Size(cfg.patch).numel()
    weight = torch.eye(size, dtype=x.dtype).reshape(size, channels, *cfg.patch)
    maps = x.reshape(-1, *x.shape[-2:]).mT.reshape(-1, size, *cfg.grid)
    y = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1](maps, weight, stride=cfg.patch)
    return y.reshape(*x.shape[:-2], *y.shape[1:])


def case(rows, channels, patch, grid):
    count, of_patch = torch.Size(grid).numel(), torch.Size(patch).numel()
    return Case(
        op=unpatchify,
        cfg=UnpatchifyConfig(patch, grid),
        x=lambda d: d.randn(*rows, count, channels * of_patch),
        reference=reference,
        name=f"unpatchify-{rows}-{channels}-{patch}-{grid}",
    )


CASES = [case((2,), 3, (2, 2), (3, 2)), case((), 2, (3,), (2,)), case((1, 2), 1, (1, 2, 2), (2, 1, 3))]


@st.composite
def drawn(draw):
    n = draw(st.integers(1, 3))
    patch, grid = (tuple(draw(st.integers(1, 3)) for _ in range(n)) for _ in range(2))
    return case(tuple(draw(st.lists(st.integers(1, 2), max_size=2))), draw(st.integers(1, 3)), patch, grid)


ERRORS = [
    Error(
        call=lambda: UnpatchifyConfig((2, 2), (3,)),
        match="UnpatchifyConfig: grid must be of 2 sizes, as many as patch has, got (3,)",
    ),
    Error(
        call=lambda: unpatchify_fwd(None, torch.ones(2, 5, 8), UnpatchifyConfig((2, 2), (3, 2))),
        match="unpatchify_fwd: x must be [..., 6, 4 C], got [2, 5, 8]",
    ),
]
