"""`low_rank`: the op's laws, and wrong calls of it."""

import math

import pytest
import torch

from funcops import Needs, backend, random, report
from funcops.engine.trees import paths
from funcops.library.ops.grouped_low_rank import GroupedLowRankConfig, grouped_low_rank
from funcops.library.ops.low_rank import low_rank_fwd
from funcops.library.ops.low_rank_embedding import LowRankEmbeddingConfig, low_rank_embedding
from funcops.library.ops.permute import PermuteConfig, permute
from funcops.lora import LowRankConfig, LowRankParams, low_rank
from funcops.testing import LAWS, Case, Error


def reference(params, x, cfg):
    if cfg.dropout:
        rows, key = x
        kept = random.bits(key, rows.numel()).reshape(rows.shape) / 2**32 >= cfg.dropout
        x = torch.where(kept, rows / (1 - cfg.dropout), torch.zeros_like(rows))
    return cfg.scale * torch.einsum("...i,ri,or->...o", x, params.a, params.b)


def case(rows, i, o, rank, scale=0.5, p=0.0):
    return Case(
        op=low_rank,
        cfg=LowRankConfig(i, o, rank, scale=scale, dropout=p),
        x=(lambda d: (d.randn(*rows, i), d.key())) if p else (lambda d: d.randn(*rows, i)),
        reference=reference,
        name=f"low_rank-{rows}-{i}-{o}-{rank}-{scale}-{p}",
    )


def of_groups(params, x, cfg):
    rows, offsets, order, place = (*x, None, None)[:4]
    rows = rows if place is None else rows.flatten(0, -2)[order // place.shape[-1]]
    ends = offsets.tolist()
    found = [cfg.scale * rows[i:j] @ a.mT @ b.mT for a, b, i, j in zip(params.a, params.b, ends, ends[1:], strict=False)]
    return torch.cat([*found, torch.zeros(len(rows) - ends[-1], cfg.out_features, dtype=rows.dtype)])


def grouped(gathered):
    def x(d):
        if not gathered:
            return d.randn(9, 4), torch.tensor([0, 3, 3, 7], dtype=torch.int32)
        indices = torch.tensor([[0, 2], [2, 3], [0, 2]], dtype=torch.int32)  # 3 is a dropped choice
        (t, _, *given), _ = permute.fwd(None, (d.rand(3, 2), d.randn(3, 4), indices), PermuteConfig(3, gathered=True))
        return t, *given

    cfg = GroupedLowRankConfig(4, 5, 2, scale=0.5, experts=3, gathered=gathered)
    params = lambda d: LowRankParams(d.randn(3, 2, 4), d.randn(3, 5, 2))  # noqa: E731
    return Case(op=grouped_low_rank, cfg=cfg, x=x, params=params, reference=of_groups, name=f"grouped-{gathered}")


def of_ids(*shape, vocab=6, dim=5, rank=2, **more):
    cfg = LowRankEmbeddingConfig(vocab, dim, rank, scale=-0.5, **more)

    def embedded(params, x, cfg):
        table = torch.nn.functional.embedding(x, params.a.mT, padding_idx=cfg.padding_idx)
        return cfg.scale * table @ params.b.mT

    x = lambda d: torch.arange(7).repeat(9)[: math.prod(shape)].view(shape) % vocab  # noqa: E731
    exempt = () if cfg.padding_idx is None else ("finite_differences",)  # defined as 0, not the derivative
    return Case(
        op=low_rank_embedding, cfg=cfg, x=x, reference=embedded, free=("x",), exempt=exempt, name=f"ids-{shape}-{cfg.padding_idx}"
    )


CASES = [case((2, 5), 69, 3, 2), case((2, 5), 9, 3, 2, 2.0, 0.25), case((0,), 4, 3, 1), case((), 3, 2, 4, -1.5, 0.5)]
CASES += [of_ids(2, 5), of_ids(3, 4, padding_idx=1), of_ids(0), of_ids(), grouped(False), grouped(True)]


@pytest.mark.turns("law", "case", every=4)
@pytest.mark.parametrize("law", [name for name in LAWS if name != "compiles"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_law(law, case):
    for dtype in () if law in case.exempt else case.dtypes if law == "right" else case.dtypes[:1]:
        LAWS[law](case, dtype)


@pytest.mark.parametrize("case", [*CASES[1:3], CASES[4], CASES[-1]], ids=str)
def test_laws_on_triton(case):
    with backend("triton"):
        for law in ("right", "split", "pure"):
            LAWS[law](case, torch.float32)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_each_side_keeps_what_it_reads_alone(case):
    """a's gradient reads x and b, b's reads x a^T, and dx reads neither."""
    params, x = case.make(torch.float32)
    first = "x.0" if case.cfg.dropout else "x"
    wanted = {"params.a": {"x", "b", "key"}, "params.b": {"u"}, first: {"a", "b", "key"}}
    for gradient, fields in wanted.items():
        side, _, path = gradient.partition(".")
        needs = Needs(**{"x": False, "params": False, side: (path,) if path else True})
        _, residuals = case.op.fwd(params, x, case.cfg, needs=needs)
        held = {name for name, t in paths(residuals).items() if t is not None}
        assert held == fields - (set() if case.cfg.dropout else {"key"}), gradient


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[:2], CASES[4]], ids=str)
def test_compiles(case):
    LAWS["compiles"](case, torch.float32)


def _call(x=None, a=None, b=None, key=None, **more):
    x = torch.ones(2, 4) if x is None else x
    params = LowRankParams(torch.ones(2, 4) if a is None else a, torch.ones(3, 2) if b is None else b)
    return lambda: low_rank_fwd(params, x if key is None else (x, key), LowRankConfig(4, 3, 2, **more))


def _dgrad(op, params, x, cfg, dy=None, into=None):
    """A forward, a dgrad and a wgrad, which adds nothing where it raises."""

    def call():
        y, residuals = op.fwd(params, x, cfg)
        _, pending = op.dgrad(residuals, y if dy is None else dy, cfg)
        try:
            op.wgrad(pending, cfg, into=into)
        finally:
            assert into is None or all(bool((t == 1).all()) for t in (into.a, into.b))

    return call


OF_ROWS = LowRankParams(torch.ones(2, 4), torch.ones(3, 2)), torch.ones(2, 4), LowRankConfig(4, 3, 2)
OF_IDS = OF_ROWS[0], torch.tensor([0, 3]), LowRankEmbeddingConfig(4, 3, 2)
OF_GROUPS = (
    LowRankParams(torch.ones(2, 2, 4), torch.ones(2, 3, 2)),
    (torch.ones(2, 4), torch.tensor([0, 1, 2], dtype=torch.int32)),
    GroupedLowRankConfig(4, 3, 2, experts=2),
)
BAD = [
    Error(call=_call(x=torch.ones(2, 5)), match="low_rank_fwd: x must be [..., 4], got [2, 5]"),
    Error(call=_call(a=torch.ones(4, 2)), match="low_rank_fwd: params.a must be [2, 4], got [4, 2]"),
    Error(call=_call(b=torch.ones(3, 2).double()), match="low_rank_fwd: params.b must be float32, got float64", error=TypeError),
    Error(
        call=_call(dropout=0.5),
        match="low_rank_fwd: x must be a tuple (x, key), as cfg.dropout is above 0, got float32[2, 4]",
        error=TypeError,
    ),
    Error(call=_call(key=random.key(0)), match="low_rank_fwd: x must be a tensor [..., 4], got tuple", error=TypeError),
    Error(
        call=_call(key=torch.ones(2), dropout=0.5), match="low_rank_fwd: x.1 (the key) must be int64, got float32", error=TypeError
    ),
    Error(call=lambda: LowRankConfig(4, 3, 0), match="LowRankConfig: rank must be"),
    Error(call=lambda: LowRankConfig(4, 3, 1, dropout=1.0), match="LowRankConfig: dropout must be below 1, got 1.0"),
    Error(
        call=lambda: LowRankEmbeddingConfig(4, 3, 1, dropout=0.5),
        match="LowRankEmbeddingConfig: dropout must be 0 (ids cannot be dropped), got 0.5",
    ),
    Error(
        call=lambda: LowRankEmbeddingConfig(4, 3, 1, padding_idx=4),
        match="LowRankEmbeddingConfig: padding_idx must be None or in 0..3, got 4",
    ),
    Error(
        call=lambda: low_rank_embedding.fwd(
            LowRankParams(torch.ones(2, 4), torch.ones(3, 2)), torch.tensor([4]), LowRankEmbeddingConfig(4, 3, 2)
        ),
        match="low_rank_embedding_fwd: x must be ids from 0 to 3, got 4",
        error=IndexError,
    ),
    Error(call=_call(x=torch.ones(2, 5), key=random.key(0), dropout=0.5), match="low_rank_fwd: x.0 must be [..., 4], got [2, 5]"),
    Error(call=_dgrad(low_rank, *OF_ROWS, torch.ones(2, 4)), match="low_rank_dgrad: dy must be [2, 3], got [2, 4]"),
    Error(call=lambda: GroupedLowRankConfig(4, 3, 2, experts=0), match="GroupedLowRankConfig: experts must be at least 1, got 0"),
    Error(
        call=_dgrad(grouped_low_rank, LowRankParams(torch.ones(2, 2, 4), torch.ones(2, 2, 3)), *OF_GROUPS[1:]),
        match="grouped_low_rank_fwd: params.b must be [2, 3, 2], got [2, 2, 3]",
    ),
    Error(
        call=_dgrad(grouped_low_rank, *OF_GROUPS, torch.ones(2, 4)), match="grouped_low_rank_dgrad: dy must be [2, 3], got [2, 4]"
    ),
    Error(
        call=_dgrad(grouped_low_rank, *OF_GROUPS, into=LowRankParams(torch.ones(2, 2, 4), torch.ones(2, 2, 3))),
        match="grouped_low_rank_wgrad: into.b must be [2, 3, 2], got [2, 2, 3]",
    ),
    Error(
        call=_dgrad(low_rank_embedding, OF_IDS[0], torch.ones(2), OF_IDS[2]),
        match="low_rank_embedding_fwd: x must be int64, got float32",
        error=TypeError,
    ),
    Error(
        call=_dgrad(low_rank_embedding, LowRankParams(torch.ones(4, 2), torch.ones(3, 2)), *OF_IDS[1:]),
        match="low_rank_embedding_fwd: params.a must be [2, 4], got [4, 2]",
    ),
    Error(
        call=_dgrad(low_rank_embedding, LowRankParams(torch.ones(2, 4), torch.ones(3, 2).double()), *OF_IDS[1:]),
        match="low_rank_embedding_fwd: params.b must be float32, got float64",
        error=TypeError,
    ),
    Error(
        call=_dgrad(low_rank_embedding, *OF_IDS, torch.ones(2, 4)), match="low_rank_embedding_dgrad: dy must be [2, 3], got [2, 4]"
    ),
    Error(
        call=_dgrad(low_rank_embedding, *OF_IDS, into=LowRankParams(torch.ones(4, 2), torch.ones(3, 2))),
        match="low_rank_embedding_wgrad: into.a must be [2, 4], got [4, 2]",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.match[:60])
def test_bad_calls_raise_by_name(bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bad.error) as raised:
        bad.call()
    assert bad.match in str(raised.value) and not list(tmp_path.iterdir())


def test_the_report_says_which_half_needs_what():
    """With dropout x and the key are read by the weight gradient, a and the key by dx."""
    params, x = CASES[1].make(torch.float32)
    rows = {row.path: row.needed_by for row in report(low_rank.fwd(params, x, CASES[1].cfg)[1]).rows}
    assert {path: set(said.split("+")) for path, said in rows.items()} == {
        "x": {"wgrad"},
        "u": {"wgrad"},
        "a": {"dgrad"},
        "b": {"dgrad", "wgrad"},
        "key": {"dgrad", "wgrad"},
    }
