import torch
from hypothesis import strategies as st

from funcops import LatentSplitConfig, latent_split, latent_split_dgrad, latent_split_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    q, kv, shared = x
    own, v = kv[..., : cfg.own], kv[..., cfg.own :]
    return q, torch.stack([torch.cat((shared[..., 0, :], own[..., h, :]), -1) for h in range(cfg.heads)], -2), v


def case(rows, heads, shared, own, value):
    def x(d):
        sizes = (heads, shared + own), (heads, own + value), (1, shared)
        return tuple(d.randn(*rows, *size) for size in sizes)

    cfg = LatentSplitConfig(heads, shared=shared, own=own, value=value)
    return Case(op=latent_split, cfg=cfg, x=x, reference=reference, name=f"latent_split-{rows}-{heads}-{shared}-{own}-{value}")


CASES = [case((2, 5), 3, 4, 6, 7), case((1,), 1, 1, 1, 1), case((0, 3), 2, 2, 3, 1), case((), 4, 2, 5, 3)]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    return case(rows, *[draw(st.integers(1, 5)) for _ in range(4)])


CFG = LatentSplitConfig(2, shared=2, own=3, value=1)
X = torch.ones(4, 2, 5), torch.ones(4, 2, 4), torch.ones(4, 1, 2)
ERRORS = [
    Error(call=lambda: LatentSplitConfig(2, shared=0, own=3, value=1), match="LatentSplitConfig: shared must be at least 1, got 0"),
    Error(
        call=lambda: latent_split_fwd(None, X[:2], CFG),
        match="latent_split_fwd: x must be a tuple (q, kv, shared)",
        error=TypeError,
    ),
    Error(
        call=lambda: latent_split_fwd(None, (X[0], X[1], X[2].expand(4, 2, 2)), CFG),
        match="latent_split_fwd: x.2 (shared) must be [4, 1, 2], got [4, 2, 2]",
    ),
    Error(
        call=lambda: latent_split_dgrad(latent_split_fwd(None, X, CFG)[1], (None, X[0], X[0]), CFG),
        match="latent_split_dgrad: dy.2 must be [4, 2, 1], got [4, 2, 5]",
    ),
]
