"""The table instead of positions, and Hugging Face's tables; the laws test the rest of rope."""

import numpy as np
import pytest
import torch
from cases import rope as cases
from torch.utils.flop_counter import FlopCounterMode

from funcops import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    differentiable,
    graphs,
    rope,
    rope_bwd,
    rope_fwd,
    rope_table,
)
from funcops.library.ops import rope as ropes


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_a_table_is_its_positions(case, dtype):
    _, (x, positions) = case.make(dtype)
    table = rope_table(positions, case.cfg, dtype=wide(dtype))
    axes = 0 if case.cfg.sections is None else 1
    assert table.shape == (*positions.shape[axes:], 1, 3 * case.cfg.rotating)
    y, residuals = rope_fwd(None, (x, positions), case.cfg)
    y_table, kept = rope_fwd(None, (x, table), case.cfg)
    assert kept.positions is table
    dx = rope_bwd(residuals, y, case.cfg)[1]
    dx_table = rope_bwd(kept, y, case.cfg)[1]
    assert torch.equal(y, y_table) and torch.equal(dx[0], dx_table[0])
    assert dx_table[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_16_bits_are_rounded_once(case, dtype):
    """The arithmetic is in float32: the bits are a float32 result's, rounded."""
    _, (x, positions) = case.make(dtype)
    y, residuals = rope_fwd(None, (x, positions), case.cfg)
    want, kept = rope_fwd(None, (x.float(), positions), case.cfg)
    dx, want_dx = rope_bwd(residuals, y, case.cfg)[1][0], rope_bwd(kept, y.float(), case.cfg)[1][0]
    assert torch.equal(y, want.to(dtype)) and torch.equal(dx, want_dx.to(dtype))


X, CFG = torch.ones(2, 5, 3, 8), RopeConfig(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rope_table(torch.ones(5), CFG), TypeError, "rope_table: positions must be int64, got float32"),
        (lambda: rope_table(torch.arange(5), CFG, dtype=torch.bfloat16), TypeError, "rope_table: dtype must be float32 or float64"),
        (
            lambda: rope_fwd(None, (X, torch.ones(5, 6)), CFG),
            TypeError,
            r"x.1 must be positions of int64, or their table \(rope_table\) \[5, 1, 24\], got float32\[5, 6\]",
        ),
        (
            lambda: rope_fwd(None, (X, torch.ones(3, 5, 1, 24)), CFG),
            ValueError,
            r"x.1 \(table\) must be \[2, 5, 1, 24\], got \[3, 5, 1, 24\]",
        ),
        (lambda: rope_fwd(None, (X, torch.ones(5, 1, 24).double()), CFG), TypeError, r"x.1 \(table\) must be float32, got float64"),
        (lambda: rope_fwd(None, (X, [1]), CFG), TypeError, r"x.1 \(positions\) must be a tensor"),
    ],
)
def test_bad_tables(call, error, message):
    with pytest.raises(error, match=message):
        call()


CONTEXT, SIZE = 512, 32
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(SIZE // 4)), tuple(2.0 + i for i in range(SIZE // 4))


def yarn(factor, part=1.0, **options):
    return YarnScaling(factor, original_context=CONTEXT, **options), {"rope_type": "yarn", "factor": factor, **options}, part


def llama3(factor, low, high):
    options = dict(low_freq_factor=low, high_freq_factor=high)
    return Llama3Scaling(factor, original_context=CONTEXT, **options), {"rope_type": "llama3", "factor": factor, **options}, 1.0


def longrope(length):
    options = dict(short_factor=SHORT, long_factor=LONG, factor=4.0, length=length)
    return LongRopeScaling(original_context=CONTEXT, **options), {"rope_type": "longrope", **options}, 0.5


def dynamic(length):
    options = dict(factor=2.0, length=length)
    return DynamicScaling(original_context=CONTEXT, **options), {"rope_type": "dynamic", **options}, 1.0


THEIRS = [  # a scaling, what Hugging Face calls it, and how much of a head turns
    (None, {"rope_type": "linear", "factor": 1.0}, 1.0),
    (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}, 1.0),
    (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}, 0.5),
    dynamic(None),
    dynamic(1500),
    yarn(4.0),
    yarn(32.0, truncate=False),
    yarn(40.0, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, beta_slow=2.0),
    yarn(4.0, 0.5, attention_factor=0.9),
    longrope(None),
    longrope(600),
    llama3(8.0, 1.0, 4.0),
    llama3(32.0, 2.0, 9.0),
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(("scaling", "given", "part"), THEIRS, ids=repr)
def test_tables_equal_hugging_face(scaling, given, part, theta):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_theta": theta, "partial_rotary_factor": part, "original_max_position_embeddings": CONTEXT, **given}
    length = given.pop("length", None)
    config = transformers.LlamaConfig(
        hidden_size=4 * SIZE, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=given
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, None, seq_len=length)
    cfg, positions = RopeConfig(SIZE, theta=theta, rotary_dim=int(part * SIZE), scaling=scaling), torch.arange(0, 8 * CONTEXT, 7)
    cos, sin = cos_and_sin(rope_table(positions, cfg), cfg)
    angle = positions[:, None].float() * inv_freq
    assert_within(cos, angle.cos() * factor, sin, angle.sin() * factor)


def cos_and_sin(table, cfg):
    cos, _, sin = table.squeeze(-2).chunk(3, -1)
    return cos[..., : cfg.rotating // 2], sin[..., : cfg.rotating // 2]


def assert_within(*pairs, atol=1e-6):
    for ours, theirs in zip(pairs[::2], pairs[1::2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "vision"])
def test_tables_of_several_axes_equal_hugging_face(family):
    pytest.importorskip("transformers")
    if family == "vision":
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionConfig, Qwen2VLVisionRotaryEmbedding

        theirs = Qwen2VLVisionRotaryEmbedding(Qwen2VLVisionConfig(embed_dim=128, num_heads=4, num_attention_heads=4))
        cfg, positions = RopeConfig(32, sections=(8, 8), layout="axial"), torch.randint(0, 99, (2, 9))
        cos, sin = theirs(torch.ones(1), positions.T)
    else:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLTextConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

        sections, layout = ((8, 4, 4), "blocks") if family == "qwen2_vl" else ((6, 5, 5), "interleaved")
        made, rotary = {
            "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding),
            "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
        }[family]
        parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
        theirs = rotary(made(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=parameters))
        cfg, positions = RopeConfig(32, sections=sections, layout=layout), torch.randint(0, 99, (3, 2, 9))
        cos, sin = theirs(torch.ones(1), positions)
    ours = cos_and_sin(rope_table(positions, cfg), cfg)
    assert_within(ours[0], cos[..., :16], ours[1], sin[..., :16])


@pytest.mark.parametrize("options", [*cases.AXES, *(dict(scaling=scaling) for scaling in cases.SCALINGS)], ids=repr)
def test_a_table_is_made_on_the_device(options):
    """So a captured step may make one."""
    cfg = RopeConfig(8, **options)
    positions = torch.arange(6).reshape(-1, 3 if cfg.sections is None else 6 // len(cfg.sections))
    assert graphs.check_capturable(lambda p: rope_table(p, cfg), positions) == []


@pytest.fixture
def made(monkeypatch):
    """Copies of the positions at which tables were made; none was kept before."""
    found, make = [], ropes._table_at
    ropes._last_made.cache_clear()
    monkeypatch.setattr(ropes, "_table_at", lambda *given: found.append(given[0].clone()) or make(*given))
    return found


@pytest.mark.parametrize("options", [*cases.AXES, *(dict(scaling=scaling) for scaling in cases.SCALINGS)], ids=repr)
def test_a_short_table_is_made_once_for_equal_positions(options, made):
    """Equal configs share it, and training may read what an evaluation in inference mode made."""
    positions = torch.arange(6).reshape(-1, *([] if "sections" not in options else [6 // len(options["sections"])])).squeeze(-1)
    positions = positions.expand(len(options["sections"]), -1).clone() if "sections" in options else positions
    x = torch.randn(positions.shape[-1], 2, 8, requires_grad=True)
    with torch.inference_mode():
        first = rope_fwd(None, (x.detach(), positions.clone()), RopeConfig(8, **options))[0].clone()
    for _ in range(2):
        cfg = RopeConfig(8, **options)
        y = differentiable(rope)(None, (x, positions.clone()), cfg)
        assert y.equal(first)
        y.sum().backward()
    assert len(made) == 1
    wide_x = x.detach().double()
    assert rope_fwd(None, (wide_x, positions), cfg)[0].dtype is torch.float64 and len(made) == 2


POSITIONS = {"torch": lambda: torch.arange(3), "numpy": lambda: torch.from_numpy(np.arange(3))}


@pytest.mark.parametrize("memory", POSITIONS)
def test_positions_that_change_make_another_table(memory, made):
    """However they change: torch counts no write through NumPy. The table has the config, dtype and shape that are asked."""
    positions, x, cfg = POSITIONS[memory](), torch.randn(3, 2, 8), RopeConfig(8)

    def right(x, positions, cfg):
        dtype = wide(x.dtype)
        return rope_fwd(None, (x, positions), cfg)[0].equal(rope_fwd(None, (x, rope_table(positions, cfg, dtype=dtype)), cfg)[0])

    assert right(x, positions, cfg)
    positions.numpy()[:] += 5
    assert right(x, positions, cfg) and made[-1].tolist() == [5, 6, 7]
    drawn = np.random.default_rng(0)
    for _ in range(40):
        shape = [(3,), (1, 3), (2, 3)][drawn.integers(3)]
        given = torch.from_numpy(drawn.integers(0, 2, shape)) + drawn.integers(2)
        other = RopeConfig(8, theta=[1e4, 5e5][drawn.integers(2)], interleaved=bool(drawn.integers(2)))
        x = torch.randn(*shape, 2, 8, dtype=[torch.float64, torch.bfloat16][drawn.integers(2)])
        assert right(x, given, other)


@pytest.mark.parametrize("length", [2**16 // 24, 2**16 // 24 + 1])
def test_a_long_table_is_made_anew(length, made):
    """It would hold memory that no report counts."""
    for _ in range(2):
        rope_fwd(None, (torch.ones(length, 1, 8), torch.arange(length)), RopeConfig(8))
    assert len(made) == 1 + (length * 24 > 2**16)


def test_whoever_watches_sees_a_table_made(made):
    """A mode or a transform takes nothing from a call before it, and leaves nothing for one after it."""
    x, positions, cfg = torch.randn(3, 2, 8), torch.arange(3), RopeConfig(8)

    def turn(x, positions):
        return rope_fwd(None, (x, positions), cfg)[0]

    for _ in range(2):
        with FlopCounterMode(display=False):
            turn(x, positions)
        torch.func.functionalize(turn)(x, positions)
    assert len(made) == 4
    turn(x, positions)
    assert len(made) == 5


def test_tables_of_other_axes_than_the_configs():
    with pytest.raises(ValueError, match=r"rope_table: positions must be \[2, ..., T\], one for each of sections, got \[3, 5\]"):
        rope_table(torch.ones(3, 5, dtype=torch.int64), RopeConfig(8, sections=(2, 2)))


def test_only_a_scaling_that_lacks_the_length_takes_it():
    plain, long = RopeConfig(8), RopeConfig(8, scaling=DynamicScaling(2.0, original_context=4))
    assert plain.at_length(100) is plain and long.at_length(100).scaling.length == 100
    assert long.at_length(100).at_length(7).scaling.length == 100
