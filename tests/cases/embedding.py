import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import EmbeddingConfig, EmbeddingParams, embedding, embedding_fwd
from funcops.testing import Case, Error


def case(rows, vocab, dim, padding_idx=None):
    return Case(
        op=embedding,
        cfg=EmbeddingConfig(vocab, dim, padding_idx=padding_idx),
        x=lambda d: d.integers(0, vocab, *rows),
        reference=lambda params, x, cfg: F.embedding(x, params.weight, cfg.padding_idx),
        free=("x",),
        exempt=() if padding_idx is None else ("finite_differences",),  # defined as 0, not the derivative
        name=f"embedding-{rows}-{vocab}-{dim}-{padding_idx}",
    )


CASES = [case((2, 9), 5, 3), case((), 3, 1), case((0,), 4, 2), case((69,), 7, 5, padding_idx=2)]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return case(rows, draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.sampled_from([None, 0])))


PARAMS = EmbeddingParams(torch.ones(4, 2))
ERRORS = [
    Error(
        call=lambda: embedding_fwd(PARAMS, torch.ones(3), EmbeddingConfig(4, 2)),
        match="embedding_fwd: x must be int64, got float32",
        error=TypeError,
    ),
    Error(call=lambda: embedding_fwd(PARAMS, torch.tensor([4]), EmbeddingConfig(4, 2)), match="", error=IndexError),
    Error(call=lambda: EmbeddingConfig(4, 2, padding_idx=4), match="EmbeddingConfig: padding_idx must be None or in 0..3"),
]
