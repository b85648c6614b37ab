import importlib.util
from pathlib import Path

import torch
from hypothesis import strategies as st

from funcops import LinearCrossEntropyConfig, linear_cross_entropy, linear_cross_entropy_dgrad, linear_cross_entropy_fwd
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyParams
from funcops.testing import Case, Error

_spec = importlib.util.spec_from_file_location("cases_loss", Path(__file__).with_name("cross_entropy.py"))
_loss = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loss)


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def case(rows, features, vocab, **options):
    cfg = LinearCrossEntropyConfig(features, vocab, **options)
    return Case(
        op=linear_cross_entropy,
        cfg=cfg,
        casts=True,
        x=lambda d: (d.randn(*rows, features), d.integers(0, vocab, *rows)),
        reference=lambda params, x, cfg: _loss.loss(capped(x[0] @ params.weight.T, cfg.softcap), x[1], cfg),
        name=f"linear_cross_entropy-{rows}-{features}-{vocab}-{options}",
    )


CASES = [
    case((3, 5), 4, 69),
    case((3, 5), 4, 7, chunk_bytes=56),  # two rows a chunk, one class
    case((7,), 3, 5, chunk_bytes=1, label_smoothing=0.1, z_loss=0.01),
    case((2,), 3, 300, chunk_bytes=1600),  # 200 classes a chunk, so 128
    case((2,), 1, 1, reduction="sum"),
    case((3, 2), 4, 9, softcap=1.5, chunk_bytes=200),  # two rows a chunk, two classes
    case((4,), 3, 6, reduction="none", chunk_bytes=40),
    case((3, 2), 4, 9, softcap=1.5, reduction="none", entropy=True, chunk_bytes=200),
    case((0,), 3, 4, reduction="sum"),
    case((3, 5), 4, 7, chunk_bytes=200, gradient="forward"),  # seven rows a chunk
    case((4,), 3, 6, softcap=1.5, reduction="sum", z_loss=0.01, gradient="forward"),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    options = dict(
        softcap=draw(st.sampled_from([None, None, 2.0])),
        chunk_bytes=draw(st.sampled_from([1, 200, 2**20])),
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
    )
    options["entropy"] = options["reduction"] == "none" and draw(st.booleans())
    if options["reduction"] != "none":
        options["gradient"] = draw(st.sampled_from(["backward", "forward"]))
    return case(rows, draw(st.integers(1, 5)), draw(st.integers(1, 9)), **options)


X = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
PARAMS, EARLY = LinearCrossEntropyParams(torch.ones(5, 4)), LinearCrossEntropyConfig(4, 5, gradient="forward")
ERRORS = [
    Error(
        call=lambda: LinearCrossEntropyConfig(4, 5, reduction="none", gradient="forward"),
        match="LinearCrossEntropyConfig: gradient must be 'backward' (a dy for each row comes too late), got 'forward'",
    ),
    Error(
        call=lambda: LinearCrossEntropyConfig(4, 5, chunk_bytes=0),
        match="LinearCrossEntropyConfig: chunk_bytes must be at least 1, got 0",
    ),
    Error(
        call=lambda: LinearCrossEntropyConfig(4, 5, softcap=0.0),
        match="LinearCrossEntropyConfig: softcap must be None, or above 0, and finite, got 0.0",
    ),
    Error(
        call=lambda: linear_cross_entropy_fwd(PARAMS, (X[0], X[1] + 5), LinearCrossEntropyConfig(4, 5)),
        match="linear_cross_entropy_fwd: x.1 (labels) must be ids from 0 to 4, or -100, got 5",
        error=IndexError,
    ),
    Error(
        call=lambda: linear_cross_entropy_dgrad(linear_cross_entropy_fwd(PARAMS, X, EARLY)[1], torch.ones(2), EARLY),
        match="linear_cross_entropy_dgrad: dy must be [], got [2]",
    ),
]
