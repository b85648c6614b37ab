"""Kept tensors in 8 bits: codecs' error bounds, the parts of a pending that a policy packs, and reports of them."""

import dataclasses
import itertools
import random as draws
import re

import pytest
import torch
from committed import committed
from hypothesis import given
from hypothesis import strategies as st
from launches import launches
from policy_cases import BOUNDS, COMBINED, bits, made, same
from tiers import drawn

from funcops import (
    Compress,
    Drop,
    EmbeddingConfig,
    GLUConfig,
    LinearConfig,
    Needs,
    Offload,
    Policy,
    Recompute,
    Save,
    backend,
    batch_wgrads,
    chain,
    donate,
    embedding,
    glu,
    linear,
    pack,
    random,
    report,
    unpack,
    with_policy,
)
from funcops.engine.errors import StaleResidualError
from funcops.engine.residuals.codec import CODECS, smaller
from funcops.engine.residuals.forms import Packed
from funcops.engine.trees import replace, tensors, tree_map_tensors
from funcops.library.kernels import coded_glu
from funcops.library.kernels import glu as glus
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, QTensor, quantize_params, with_recipe
from funcops.memory.policy import kept_paths
from funcops.models.blocks import mlp_config
from funcops.testing import LAWS
from funcops.testing.tolerances import assert_close

FP8 = Compress("fp8")


BYTES = {"bf16": lambda k: 2 * k, "fp8": lambda k: k - -k // 128, "mxfp8": lambda k: k - -k // 32, "int8": lambda k: k + 4}


@given(
    st.sampled_from(list(CODECS)),
    st.sampled_from([(), (0,), (1,), (3,), (2, 3), (2, 0, 2)]),
    st.integers(1, 300),
    st.sampled_from([1e-40, 1e-20, 1.0, 1e20, 3e37]),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_codecs_keep_their_bounds(name, rows, columns, size, dtype, turned, seed):
    if name in ("bf16", "int8") and size == 1e-40:
        size = 1e-30  # of numbers that have all their digits
    t = torch.randn(*rows, columns, generator=torch.Generator().manual_seed(seed)).clamp(-8, 8) * size
    t[..., : columns // 3] *= 1e-3
    t[..., columns // 2 :: 37] *= 1e-5
    t = t.to(dtype)
    t = t.mT if turned and t.dim() > 1 else t
    codec = CODECS[name]
    parts = codec.encode(t)
    back = codec.decode(parts, dtype)
    assert back.dtype is dtype and back.shape == t.shape
    assert sum(p.nbytes for p in parts) == t.shape[:-1].numel() * BYTES[name](t.shape[-1]) if t.shape[-1] else True
    off = (back.double() - t.double()).abs()
    rounding = t.double().abs() * 2.0**-8 if dtype is torch.bfloat16 else 0
    assert torch.all(off <= BOUNDS[name](t) * 1.001 + rounding)
    zeros = torch.zeros(2, 3)
    assert torch.equal(codec.decode(codec.encode(zeros), torch.float32), zeros)


ENDS = [
    (name, t) for name in CODECS for t in (torch.float32, torch.bfloat16, torch.float16) if smaller(name, torch.ones(1, dtype=t))
]


@pytest.mark.parametrize(("name", "dtype"), ENDS)
def test_codecs_keep_their_bounds_at_both_ends_of_a_dtype(name, dtype):
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    highest = info.max if dtype is torch.float16 else 0.96 * info.max  # above, bfloat16 and e4m3 have no number
    steps = torch.arange(200, dtype=torch.float64)
    for ends in (highest * (1 - steps / 400), least * (steps + 1), least * 2.0 ** (steps % 24), least * (1 + steps) * 128):
        whole = (ends * (1 - 2 * (steps % 2))).to(dtype)
        for t in (whole.view(2, 100), whole.view(200, 1).expand(200, 7).tril(3)):  # rows of many sizes, and of one
            back = CODECS[name].decode(CODECS[name].encode(t), dtype)
            rounding = t.double().abs() * info.eps + least + (2.0**-133 if name == "bf16" else 0.0)
            assert torch.all((back.double() - t.double()).abs() <= BOUNDS[name](t) * 1.001 + rounding)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_in_int8(bad):
    t = torch.randn(4, 30)
    t[1, 5], t[2] = bad, bad
    back = CODECS["int8"].decode(CODECS["int8"].encode(t), t.dtype)
    assert back[1:3].isnan().all() and torch.all((back - t)[[0, 3]].abs() <= BOUNDS["int8"](t)[[0, 3]] * 1.001)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, of the interpreter: an infinity comes back
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_both_implementations_give_the_same_codes_and_values(name):
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (
        ((3, 300), torch.float32),
        ((2, 5, 64), torch.bfloat16),
        ((1, 129), torch.float16),
        ((2, 0, 3), torch.float32),
    ):
        t = (torch.randn(shape, generator=generator) * 3).to(dtype)
        t[..., 0], t[..., 1], t[..., 2] = torch.nan, torch.inf, 1e4
        found = []
        for implementation in ("torch", "triton"):
            with backend(implementation):
                parts = CODECS[name].encode(t)
                found.append((*parts, CODECS[name].decode(parts, dtype).nan_to_num(7.0)))
        assert same(*found)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_nan_and_infinity_survive_packing(name):
    """A NaN stays a NaN, an infinity an infinity; other blocks are unaffected."""
    t = torch.randn(4, 300)
    t[0, 5], t[1, 200], t[2, 0] = torch.nan, torch.inf, -torch.inf
    back = CODECS[name].decode(CODECS[name].encode(t), t.dtype)
    assert torch.equal(back.isnan(), t.isnan()) and torch.equal(back[t.isinf()], t[t.isinf()])
    calm = CODECS[name].decode(CODECS[name].encode(t.nan_to_num(0, 0, 0)), t.dtype)
    assert torch.equal(back[0, 6:], calm[0, 6:]) and torch.equal(back[1, :128], calm[1, :128]) and torch.equal(back[3], calm[3])


def test_a_block_keeps_what_its_targets_are():
    """The committed bytes per token and unit, which `test_committed_figures.py` counts again."""
    rows = {
        (provider, metric): value for (case, provider, metric), value in committed("cpu-residuals").items() if case == "llama block"
    }
    bars = {"fp8: the SwiGLU's input": 17.8, "fp8: the inputs of the SwiGLU and of norms": 15.9, "compress_fp8": 12.0}
    attention = "Fp8Block with attention"  # 11.5 codes, scales, and 0.016 of norms; below that only by products that run again
    bars |= {f"{attention}, compress_fp8": 11.6, f"{attention}, MLP recomputed": 10.5}
    for name, bar in bars.items():
        assert rows[f"funcops, {name}", "kept"] <= bar, name
    assert rows["funcops", "pending dy"] == 21.0 and rows["funcops, fp8: *.dy", "pending dy"] <= 10.9


WAITING = [c for c in COMBINED if any(kept.waits and kept.path.endswith("dy") for kept in kept_paths(c.op, c.cfg))]
LATER = [Compress("fp8"), Compress("bf16"), Offload()]


@pytest.mark.parametrize(("case", "action"), drawn(WAITING, LATER, families=[c.op.name for c in WAITING]))
@pytest.mark.slow
def test_laws_where_dy_waits_in_another_form(case, action):
    case = dataclasses.replace(case, op=with_policy(case.op, Policy({"*dy": action})))
    for law in ("split", "pure", "mirror", "traceable"):
        if law not in case.exempt:
            LAWS[law](case, torch.float64)


def steps(cfg, dtype, count):
    """Params, and the xs and dys of so many microbatches."""
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    drawn = [random.uniform(random.key(i), (6, 16), low=-1, high=1, dtype=dtype) for i in range(2 * count)]
    return params, drawn[:count], drawn[count:]


@pytest.mark.parametrize("codec", ["fp8", "mxfp8", "int8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delayed_gradient_reads_the_rounded_dy(codec, dtype):
    """Bit for bit: weight gradients read dy as the codec decodes it, whichever way they run; dx reads dy itself."""
    if codec == "bf16" and dtype is torch.bfloat16:
        codec = "fp8"
    cfg = mlp_config(16, 24)
    params, xs, dys = steps(cfg, dtype, 3)
    op = with_policy(chain, Policy({"*.dy": Compress(codec)}))
    waiting, total = [], []
    for x, dy in zip(xs, dys, strict=True):
        kept, plain = op.fwd(params, x, cfg)[1], chain.fwd(params, x, cfg)[1]
        dx, pending = op.dgrad(kept, dy, cfg)
        want_dx, want = chain.dgrad(plain, dy, cfg)
        assert torch.equal(dx, want_dx)
        assert type(pending["up"].dy) is type(pending["down"].dy) is Packed and pending["down"].dy.shape == dy.shape
        for name in ("up", "down"):
            coded = CODECS[codec].decode(CODECS[codec].encode(want[name].dy), dtype)
            want[name] = replace(want[name], dy=coded)
        total.append(chain.wgrad(want, cfg))
        assert same(op.wgrad(pending, cfg), total[-1]) and same(op.bwd(donate(kept), dy, cfg), (total[-1], dx))
        waiting.append(pending)
    sums = tree_map_tensors(lambda t: torch.zeros_like(t, dtype=torch.float32), total[0])
    for one in waiting:
        op.wgrad(one, cfg, into=sums)
    rounded = tree_map_tensors(lambda t: t.to(dtype), sums)
    assert same(batch_wgrads(op, waiting, cfg), rounded), "unpacked one after another, wherever they are collected"
    assert_close(sums, batch_wgrads(op, [donate(one) for one in waiting], cfg), dtype=dtype)


def test_rules_for_pendings():
    cfg, params, x, dy = made("llama", torch.bfloat16)

    def dys(policy, needs=Needs.ALL):
        op = with_policy(chain, policy)
        _, pending = op.dgrad(op.fwd(params, x, cfg, needs=needs)[1], dy, cfg)
        return {row.path: row.dtype for row in report(pending, params, x).rows if row.path.endswith(".dy")}

    plain = dict.fromkeys(dys(Policy()), "bfloat16")
    assert len(plain) == 6
    for policy in ("compress_fp8", "compress_int8", Policy({"*": FP8}), Policy({"mlp.*": FP8}), Policy({"*[xy]": FP8})):
        assert dys(policy) == plain, "only a pattern that ends in dy means it"
    assert dys(Policy({"*.dy": FP8})) == dict.fromkeys(plain, "fp8")
    last = Policy({"*dy": FP8, "attn.qkv.*.dy": Compress("mxfp8"), "mlp.up.dy": Save()})
    assert sorted(dys(last).values()) == ["bfloat16", "fp8", "fp8", "mxfp8", "mxfp8", "mxfp8"]
    assert dys(last, Needs(params=["attn.qkv.q.proj.weight"])) == {"attn.qkv.q.proj.dy": "mxfp8"}
    for rules, message in (
        ({"mlp.down.dy": Recompute()}, "rules must be without Recompute for mlp.down.dy, an input of the backward"),
        ({"mlp.act.dy": FP8}, "rules must be globs over .*, got 'mlp.act.dy'"),
    ):
        with pytest.raises(ValueError, match=message):
            with_policy(chain, Policy(rules)).init(cfg, device="meta")


def test_packed_pendings_are_guarded_and_dropped_as_plain_ones():
    cfg = LinearConfig(8, 4, bias=True)
    op, (params, x, dy) = (
        with_policy(linear, Policy({"dy": FP8})),
        (linear.init(cfg, key=random.key(0)), torch.randn(3, 8), torch.randn(3, 4)),
    )
    dx, pending = op.dgrad(op.fwd(params, x, cfg)[1], dy, cfg)
    before = bits(op.wgrad(pending, cfg))
    dy.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(tensors(op.wgrad(pending, cfg)), before, strict=True)), (
        "a copy, that no write reaches"
    )
    pending.dy.parts[0].add_(0)
    with pytest.raises(StaleResidualError, match="linear_wgrad: pending.dy"):
        op.wgrad(pending, cfg)
    dropped = with_policy(linear, Policy({"dy": Drop()}))
    _, waiting = dropped.dgrad(dropped.fwd(params, x, cfg)[1], dy, cfg)
    with pytest.raises(ValueError, match="linear_wgrad: pending.dy must be kept, .* got dropped"):
        dropped.wgrad(waiting, cfg)
    ids = EmbeddingConfig(5, 3)
    words = with_policy(embedding, Policy({"dy": FP8}))
    _, kept = words.fwd(embedding.init(ids, key=random.key(0)), torch.tensor([0, 4, 4]), ids)
    _, rows = words.dgrad(kept, torch.ones(3, 3), ids)
    assert type(rows.dy) is Packed and words.wgrad(rows, ids).weight[4].tolist() == [2.0, 2.0, 2.0]


def rows_of(kept, *owners):
    return {row.path: row for row in report(kept, *owners).rows}


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Current(), MXFP8(), NVFP4(stochastic=False)], ids=lambda r: type(r).__name__)
def test_a_report_shows_a_quantised_tensor_as_one_row(recipe):
    """With its format, the shape that it represents, and the bytes of codes and scales; or as an alias, if the working tree has
    it."""
    cfg = with_recipe(mlp_config(64, 96), recipe)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(32, 64, dtype=torch.bfloat16)
    work = quantize_params(params, cfg)
    y, kept = chain.fwd(work, x, cfg)
    rows = rows_of(kept, work, x)
    for name, width in (("up", 64), ("down", 96)):
        row, q = rows[f"{name}.x"], kept[name].x
        assert (row.shape, row.dtype, row.alias_of) == ((32, width), recipe.x.name, "")
        assert row.bytes == sum(t.nbytes for t in tensors(q)) < (0.6 if recipe.x.element == "e2m1" else 1.1) * 32 * width
        for side in ("row", "col"):
            weight = rows[f"{name}.weight.{side}"]
            assert (weight.bytes, weight.dtype, weight.shape) == (0, recipe.w.name, kept[name].weight.shape)
            assert weight.alias_of == f"params.{name}.weight.row" or weight.alias_of == f"params.{name}.weight.{side}"
    _, pending = chain.dgrad(kept, torch.randn_like(y), cfg)
    waiting = rows_of(pending, work, x)
    assert waiting["down.dy"].dtype == recipe.dy.name and waiting["down.dy"].shape == y.shape
    assert sum(row.bytes for row in rows.values()) == report(kept, work, x).kept_bytes
    half = replace(kept["up"], weight=replace(kept["up"].weight, col=None))
    part = replace(half, x=replace(half.x, codes=x))
    assert rows_of(part, work, x)["x"].bytes == half.x.scales.untyped_storage().nbytes() + (half.x.scale is not None) * 4


@pytest.mark.parametrize("recipe", [Fp8Block(), MXFP8(), NVFP4(stochastic=False)], ids=str)
def test_a_quantised_tensor_is_not_compressed_again(recipe):
    """Its float32 scales are exact, and stay so: a rule for it raises, an optional one passes it by, `pack` leaves it."""
    cfg = with_recipe(mlp_config(64, 96), recipe)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(20, 64), torch.randn(20, 64)
    for pattern in ("up.x", "*.dy"):
        op = with_policy(chain, Policy({pattern: FP8}))
        with pytest.raises(ValueError, match=r"rules at .* must be for tensors that it makes smaller, got .* for QTensor"):
            op.dgrad(op.fwd(params, x, cfg)[1], dy, cfg)
    op = with_policy(chain, Policy({"*.x": FP8, "*.dy": FP8}, optional=True))
    kept, plain = op.fwd(params, x, cfg)[1], chain.fwd(params, x, cfg)[1]
    (dx, pending), (want_dx, want) = op.dgrad(kept, dy, cfg), chain.dgrad(plain, dy, cfg)
    assert type(kept["act"].x) is Packed and dx.shape == want_dx.shape
    assert all(type(part) is QTensor for part in (kept["up"].x, kept["down"].x, pending["up"].dy, pending["down"].dy))
    assert same(op.bwd(kept, dy, cfg), (op.wgrad(pending, cfg), dx))
    for action in (FP8, Compress("int8"), Offload()):
        again = unpack(pack(want, action))
        assert same([again[name] for name in ("up", "down")], [want[name] for name in ("up", "down")])


@pytest.mark.parametrize("recipe", [Fp8Block(keep="input"), MXFP8(keep="input"), Fp8Block(keep="input", wgrad="high")], ids=str)
def test_both_halves_are_the_whole_where_x_is_recomputed(recipe):
    """Whether dy waits in few bits is the recipe's, not a question of where x is."""
    cfg = with_recipe(mlp_config(64, 96), recipe)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(20, 64), torch.randn(20, 64)
    found = []
    for one in (cfg, dataclasses.replace(cfg, recompute=False)):
        kept = chain.fwd(params, x, one)[1]
        dx, pending = chain.dgrad(kept, dy, one)
        assert type(pending["up"].dy) is (QTensor if recipe.wgrad == "low" else torch.Tensor)
        found += [(chain.wgrad(pending, one), dx), chain.bwd(kept, dy, one)]
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("implementation", "dtypes"),
    [
        ("torch", (torch.float32, torch.bfloat16, torch.float16)),
        ("triton", (torch.bfloat16,)),
        pytest.param("triton", (torch.float32, torch.float16), marks=pytest.mark.slow),
    ],
)
def test_a_glu_of_codes_equals_the_glu_of_decoded_values(implementation, dtypes):
    """Bit for bit, also where a block of scales reaches from one half into the other."""
    generator = draws.Random("coded glu")
    for dtype in dtypes:
        for codec, width in [(name, one.block) for name, one in CODECS.items() if one.block]:
            rows, half = generator.choice([(3,), (2, 0), (2, 9)]), generator.choice([width, 2 * width, 3 * width, 40, 200])
            x = torch.randn(*rows, 2 * half).to(dtype)
            x[..., 3:5] = torch.tensor([torch.nan, 1e4])
            dy, kind, first = (
                torch.randn(*rows, half).to(dtype),
                generator.choice(list(glus.GATES)),
                generator.choice([True, False]),
            )
            with backend(implementation):
                codes, scales = CODECS[codec].encode(x)
                decoded = CODECS[codec].decode((codes, scales), dtype)
                want = glus.glu_fwd(decoded, None, kind, first), glus.glu_bwd(dy, decoded, None, kind, first, True, False)[0]
                got = (
                    coded_glu.coded_glu_fwd(codes, scales, width, kind, first, dtype),
                    coded_glu.coded_glu_bwd(dy, codes, scales, width, kind, first),
                )
            assert [t.dtype for t in got] == [dtype, dtype] and [t.shape for t in got] == [dy.shape, x.shape]
            assert same(*[[t.nan_to_num(7.0) for t in found] for found in (want, got)]), (dtype, codec, rows, half, kind, first)


@pytest.mark.parametrize("codec", CODECS)
def test_a_backward_reads_a_glus_codes_as_they_are(codec, monkeypatch):
    """On a device neither y nor dx launches a copy of x in x's dtype."""
    cfg = mlp_config(256, 512)
    op = with_policy(chain, Policy({"act.x": Compress(codec)}))
    params, x = op.init(cfg, device="meta", dtype=torch.float32), torch.empty(64, 256, device="meta")
    with launches(monkeypatch):
        y, kept = op.fwd(params, x, cfg)
    assert type(kept["act"].x) is Packed
    with launches(monkeypatch) as found:
        op.bwd(kept, y, cfg)
    decoding, glu_of = [name for name in found if "decode" in name or name == "to_copy"], [name for name in found if "glu." in name]
    if CODECS[codec].block:
        assert not decoding and glu_of == ["coded_glu.coded"] * 2, found
    else:
        assert glu_of == ["glu.forward", "glu.backward"], found


GLUS = [
    GLUConfig(kind="swiglu", gate="first"),
    GLUConfig(kind="glu", gate="second"),
    GLUConfig(kind="clamped_swiglu", gate="first"),
    GLUConfig(kind="swiglu", gate="first", scaled=True),
    GLUConfig(kind="geglu", paired=True),
]


@pytest.mark.parametrize("cfg", GLUS, ids=str)
def test_every_glu_reads_a_packed_x(cfg):
    """dx, by halves and by the whole backward, equals the dx of the decoded x."""
    for codec, width in itertools.product(CODECS, (48, 128)):
        t, dy = torch.randn(6, 2 * width), torch.randn(6, width)
        x = (t, torch.rand(6)) if cfg.scaled else (t[:, :width].contiguous(), t[:, width:].contiguous()) if cfg.paired else t
        op = with_policy(glu, Policy({"x": Compress(codec)}))
        _, kept = op.fwd(None, x, cfg)
        first = x if isinstance(x, torch.Tensor) else x[0]
        plain = CODECS[codec].decode(CODECS[codec].encode(first), first.dtype)
        want = glu.dgrad(glu.fwd(None, plain if first is x else (plain, x[1]), cfg)[1], dy, cfg)[0]
        assert type(kept.x) is Packed and same(op.dgrad(kept, dy, cfg)[0], want) and same(op.bwd(kept, dy, cfg)[1], want)
        with pytest.raises(ValueError, match=re.escape(f"dy must be [6, {width}], got [6, 1]")):
            op.bwd(kept, dy[:, :1], cfg)
        (kept.x.parts[0]).add_(0)
        with pytest.raises(StaleResidualError, match="residuals.x"):
            op.bwd(kept, dy, cfg)
