import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import CrossEntropyConfig, cross_entropy, cross_entropy_dgrad, cross_entropy_fwd
from funcops.testing import Case, Error


def loss(logits, labels, cfg):
    """F.cross_entropy plus z_loss * logsumexp^2 over the rows that count."""
    flat, ids = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    options = dict(label_smoothing=cfg.label_smoothing, ignore_index=cfg.ignore_index)
    rows = F.cross_entropy(flat, ids, reduction="none", **options)
    counts = ids != cfg.ignore_index
    rows = rows + torch.where(counts, cfg.z_loss * flat.logsumexp(-1) ** 2, 0.0)
    if cfg.entropy:
        entropies = torch.distributions.Categorical(logits=flat).entropy() * counts
        return rows.reshape(labels.shape), entropies.reshape(labels.shape)
    if cfg.reduction == "none":
        return rows.reshape(labels.shape)
    return rows.sum() if cfg.reduction == "sum" else rows.sum() / counts.sum()


def case(rows, vocab, ignored=False, **options):
    def x(d):
        labels = d.integers(0, vocab, *rows)
        if ignored and labels.numel():
            labels.view(-1)[0] = options.get("ignore_index", -100)
        return d.randn(*rows, vocab), labels

    return Case(
        op=cross_entropy,
        cfg=CrossEntropyConfig(**options),
        casts=True,
        x=x,
        reference=lambda params, x, cfg: loss(*x, cfg),
        free=() if rows else ("x.0",),
        name=f"cross_entropy-{rows}-{vocab}-{ignored}-{options}",
    )


CASES = [
    case((3, 5), 69),
    case((), 3),
    case((7,), 5, ignored=True, label_smoothing=0.1),
    case((7,), 5, ignored=True, z_loss=1e-2, ignore_index=0),
    case((2, 2), 1, reduction="sum"),
    case((4,), 6, ignored=True, reduction="none", label_smoothing=0.3, z_loss=0.1),
    case((0,), 4, reduction="sum"),
    case((0,), 4, reduction="none"),
    case((2, 3), 37, ignored=True, reduction="none", entropy=True),
    case((5,), 64, reduction="none", entropy=True, label_smoothing=0.2, z_loss=0.05),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    options = dict(
        label_smoothing=draw(st.sampled_from([0.0, 0.2])),
        z_loss=draw(st.sampled_from([0.0, 0.05])),
        reduction=draw(st.sampled_from(["mean", "sum", "none"])),
    )
    options["entropy"] = options["reduction"] == "none" and draw(st.booleans())
    return case(rows, draw(st.integers(1, 9)), **options)


X, BOTH = (torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)), CrossEntropyConfig(reduction="none", entropy=True)
ERRORS = [
    Error(call=lambda: CrossEntropyConfig(label_smoothing=1.0), match="CrossEntropyConfig: label_smoothing must be in [0, 1)"),
    Error(call=lambda: CrossEntropyConfig(reduction="avg"), match="CrossEntropyConfig: reduction must be 'mean'"),
    Error(call=lambda: CrossEntropyConfig(z_loss=-1.0), match="CrossEntropyConfig: z_loss must be at least 0"),
    Error(
        call=lambda: CrossEntropyConfig(entropy=True),
        match="CrossEntropyConfig: reduction must be 'none' with entropy, as each row has its own, got mean",
    ),
    *[
        Error(call=lambda dy=dy: cross_entropy_dgrad(cross_entropy_fwd(None, X, BOTH)[1], dy, BOTH), match=match, error=error)
        for dy, match, error in (
            (X[0][:, 0], "cross_entropy_dgrad: dy must be a tuple (dloss, dentropy), as cfg.entropy says", TypeError),
            ((None, X[0]), "cross_entropy_dgrad: dy.1 (dentropy) must be [2], got [2, 4]", ValueError),
        )
    ],
    Error(
        call=lambda: cross_entropy_fwd(None, (X[0], torch.zeros(3, dtype=torch.int64)), CrossEntropyConfig()),
        match="cross_entropy_fwd: x.1 (labels) must be [2], got [3]",
    ),
    Error(
        call=lambda: cross_entropy_fwd(None, (X[0], X[1].int()), CrossEntropyConfig()),
        match="cross_entropy_fwd: x.1 (labels) must be int64, got int32",
        error=TypeError,
    ),
    Error(
        call=lambda: cross_entropy_fwd(None, X[0], CrossEntropyConfig()),
        match="cross_entropy_fwd: x must be a tuple (logits, labels)",
        error=TypeError,
    ),
    Error(
        call=lambda: cross_entropy_fwd(None, (X[0], X[1] + 4), CrossEntropyConfig()),
        match="cross_entropy_fwd: x.1 (labels) must be ids from 0 to 3, or -100, got 4",
        error=IndexError,
    ),
]
