import torch
from hypothesis import strategies as st
from rotation import turned

from funcops import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling, rope, rope_fwd
from funcops.testing import Case, Error


def case(rows, t, n, dim, per_row=False, **options):
    cfg = RopeConfig(dim, **options)

    axes = (len(cfg.sections),) if cfg.sections else ()

    def x(d):
        return d.randn(*rows, t, n, dim), d.integers(0, 50, *axes, *(rows if per_row else ()), t)

    return Case(op=rope, cfg=cfg, x=x, reference=turned, name=f"rope-{rows}-{t}-{n}-{dim}-{per_row}-{options}")


CASES = [
    case((2,), 5, 3, 8),
    case((2,), 5, 3, 8, interleaved=True),
    case((2,), 5, 1, 10, rotary_dim=6),
    case((2,), 5, 1, 10, rotary_dim=6, interleaved=True, per_row=True),
    case((), 1, 1, 2, theta=100.0),
    case((0,), 3, 2, 4),
    case((2,), 3, 1, 8, scaling=YarnScaling(8.0, original_context=32), theta=50.0),
    case((2,), 3, 1, 12, sections=(2, 3, 1), per_row=True),
]
SCALINGS = [
    LinearScaling(4.0),
    DynamicScaling(2.0, original_context=16, length=40),
    YarnScaling(8.0, original_context=64, attention_factor=1.5, truncate=False),
    YarnScaling(8.0, original_context=16, mscale=0.7, mscale_all_dim=1.3),
    Llama3Scaling(8.0, original_context=64),
    LongRopeScaling(
        short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 4.0, 5.0, 9.0), original_context=32, factor=4.0, length=50
    ),
]
AXES = [dict(sections=(2, 1, 1)), dict(sections=(2, 1, 1), layout="interleaved"), dict(sections=(3, 1), layout="axial")]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    half, extra = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    options = dict(rotary_dim=2 * half, interleaved=draw(st.booleans()))
    if half == 4:
        options |= draw(st.sampled_from([*AXES, *(dict(scaling=scaling) for scaling in SCALINGS)]))
    sizes = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    return case(rows, *sizes, 2 * half + extra, draw(st.booleans()), **options)


X = torch.ones(2, 5, 3, 8)
ERRORS = [
    Error(call=lambda: RopeConfig(7), match="RopeConfig: rotary_dim must be even, in 2..7, got 7"),
    Error(call=lambda: RopeConfig(8, rotary_dim=10), match="RopeConfig: rotary_dim must be even, in 2..8, got 10"),
    Error(call=lambda: rope_fwd(None, (X, torch.arange(4)), RopeConfig(8)), match="rope_fwd: x.1 (positions) must be [5], got [4]"),
    Error(call=lambda: rope_fwd(None, X, RopeConfig(8)), match="rope_fwd: x must be a tuple", error=TypeError),
    Error(
        call=lambda: RopeConfig(8, sections=(2, 1)),
        match="RopeConfig: sections must be a tuple of counts of at least 1, 4 in all, got (2, 1)",
    ),
    Error(
        call=lambda: RopeConfig(8, sections=(1, 3), layout="interleaved"),
        match="RopeConfig: sections must be counts that fit at every 2th of 4 pairs (layout 'interleaved'), got (1, 3)",
    ),
    Error(call=lambda: RopeConfig(8, layout="axial"), match="RopeConfig: layout must be 'blocks' without sections, got 'axial'"),
    Error(
        call=lambda: RopeConfig(8, scaling=LinearScaling(2.0), sections=(2, 2), layout="axial"),
        match="RopeConfig: scaling must be None for layout 'axial', got LinearScaling",
    ),
    Error(
        call=lambda: RopeConfig(6, scaling=SCALINGS[-1]),
        match="RopeConfig: scaling.short_factor must be of 3 numbers, one a pair, got 4",
    ),
    Error(
        call=lambda: RopeConfig(2, scaling=SCALINGS[1]), match="RopeConfig: rotary_dim must be above 2 for DynamicScaling, got 2"
    ),
    Error(
        call=lambda: RopeConfig(8, theta=1.0, scaling=SCALINGS[2]),
        match="RopeConfig: theta must be above 1 for YarnScaling, got 1.0",
    ),
    Error(
        call=lambda: rope_fwd(None, (X, torch.arange(5).expand(2, 5)), RopeConfig(8, sections=(2, 1, 1))),
        match="rope_fwd: x.1 (positions) must be [3, 5], got [2, 5]",
    ),
    Error(
        call=lambda: rope_fwd(None, (torch.ones(5, 8), torch.arange(5)), RopeConfig(8)),
        match="rope_fwd: x.0 must be [..., T, N, 8], got [5, 8]",
    ),
]
