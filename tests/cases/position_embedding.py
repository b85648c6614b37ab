import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import EmbeddingParams, PositionEmbeddingConfig, position_embedding, position_embedding_dgrad, position_embedding_fwd
from funcops.testing import Case, Error


def case(rows, t, most, dim, per_row=False):
    return Case(
        op=position_embedding,
        cfg=PositionEmbeddingConfig(most, dim),
        x=lambda d: (d.randn(*rows, t, dim), d.integers(0, most, *(rows if per_row else ()), t)),
        reference=lambda params, x, cfg: x[0] + F.embedding(x[1], params.weight),
        free=("x.1",),
        name=f"position_embedding-{rows}-{t}-{most}-{dim}-{per_row}",
    )


CASES = [
    case((2,), 9, 12, 5),
    case((2, 3), 4, 5, 69, per_row=True),
    case((), 1, 1, 1),
    case((0,), 3, 4, 2),
    case((2,), 0, 4, 2, per_row=True),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    return case(rows, draw(st.integers(0, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.booleans()))


CFG, PARAMS, X = PositionEmbeddingConfig(4, 2), EmbeddingParams(torch.ones(4, 2)), torch.ones(3, 2)
ERRORS = [
    Error(call=lambda: PositionEmbeddingConfig(0, 2), match="PositionEmbeddingConfig: positions must be at least 1, got 0"),
    Error(
        call=lambda: position_embedding_fwd(PARAMS, X, CFG),
        match="position_embedding_fwd: x must be a tuple (x, positions)",
        error=TypeError,
    ),
    Error(
        call=lambda: position_embedding_fwd(PARAMS, (X, torch.arange(2)), CFG),
        match="position_embedding_fwd: x.1 (positions) must be [3], got [2]",
    ),
    Error(
        call=lambda: position_embedding_fwd(PARAMS, (X[0], torch.arange(2)), CFG),
        match="position_embedding_fwd: x.0 must be [..., T, 2], got [2]",
    ),
    Error(call=lambda: position_embedding_fwd(PARAMS, (X, torch.tensor([0, 1, 4])), CFG), match="", error=IndexError),
    Error(
        call=lambda: position_embedding_dgrad(position_embedding_fwd(PARAMS, (X, torch.arange(3)), CFG)[1], X[:2], CFG),
        match="position_embedding_dgrad: dy must be [3, 2], got [2, 2]",
    ),
    Error(
        call=lambda: position_embedding_fwd(PARAMS, (X.int(), torch.arange(3)), CFG),
        match="position_embedding_fwd: x.0 must be float64 or float32 or bfloat16 or float16, got int32",
        error=TypeError,
    ),
]
