import torch
from hypothesis import strategies as st

from funcops import DropoutConfig, dropout, dropout_fwd, random
from funcops.testing import Case, Error


def reference(params, x, cfg):
    t, key = x
    if not cfg.train or cfg.p == 0:
        return t * 1.0
    if cfg.p == 1:
        return t * 0.0
    kept = random.bits(key, t.numel()).reshape(t.shape) / 2**32 >= cfg.p
    return torch.where(kept, t / (1 - cfg.p), torch.zeros_like(t))


def case(shape, p, train=True):
    return Case(
        op=dropout,
        cfg=DropoutConfig(p, train=train),
        x=lambda d: (d.randn(*shape), d.key()),
        reference=reference,
        free=("x.0",),
        name=f"dropout-{shape}-{p}-{train}",
    )


CASES = [
    case((2, 69), 0.5),
    case((7,), 0.0625),
    case((0, 3), 0.5),
    case((), 0.75),
    case((4,), 0.0),
    case((4,), 1.0),
    case((4,), 0.5, train=False),
]


@st.composite
def drawn(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return case(shape, draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.booleans()))


ERRORS = [
    Error(call=lambda: DropoutConfig(1.5), match="DropoutConfig: p must be in [0, 1], got 1.5"),
    Error(
        call=lambda: dropout_fwd(None, (torch.ones(3), torch.ones(2)), DropoutConfig(0.5)),
        match="dropout_fwd: x.1 (the key) must be int64, got float32",
        error=TypeError,
    ),
    Error(
        call=lambda: dropout_fwd(None, torch.ones(3), DropoutConfig(0.5)),
        match="dropout_fwd: x must be a tuple (x, key)",
        error=TypeError,
    ),
]
