import torch
from hypothesis import strategies as st

from funcops import ModulateConfig, modulate, modulate_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    t, scale, shift = (part.movedim(0, -2) if part.dim() > 2 else part for part in x)
    return (t + t * scale + shift).movedim(-2, 0) if x[0].dim() > 2 else t + t * scale + shift


def case(batches, places, width):
    return Case(
        op=modulate,
        cfg=ModulateConfig(),
        x=lambda d: (d.randn(batches, *places, width), d.randn(batches, width), d.randn(batches, width)),
        reference=reference,
        name=f"modulate-{batches}-{places}-{width}",
    )


CASES = [case(2, (3,), 69), case(3, (2, 2), 8), case(4, (), 5), case(1, (1,), 1), case(2, (0,), 3), case(0, (2,), 3)]


@st.composite
def drawn(draw):
    return case(draw(st.integers(0, 3)), tuple(draw(st.lists(st.integers(0, 4), max_size=2))), draw(st.integers(1, 9)))


X, ROW = torch.ones(2, 5, 3), torch.ones(2, 3)
ERRORS = [
    Error(
        call=lambda: modulate_fwd(None, (X, ROW), ModulateConfig()),
        match="modulate_fwd: x must be a tuple (x, scale, shift), got tuple of 2",
        error=TypeError,
    ),
    Error(
        call=lambda: modulate_fwd(None, (X, X, ROW), ModulateConfig()),
        match="modulate_fwd: x.1 (scale) must be [2, 3], got [2, 5, 3]",
    ),
    Error(
        call=lambda: modulate_fwd(None, (X, ROW, ROW.double()), ModulateConfig()),
        match="modulate_fwd: x.2 (shift) must be float32, got float64",
        error=TypeError,
    ),
]
