"""The rules by which a tile's scale follows from its elements: MX exponents and NVFP4 scales by torchao's published code, the least
amax and amax algorithms by Transformer Engine's; in torch and in Triton's interpreter."""

import itertools
import math

import pytest
import torch

from funcops import ChainConfig, LinearConfig, QLinearConfig, Step, chain, linear, qlinear, random
from funcops.engine.backend import backend
from funcops.library.formats import turned
from funcops.library.kernels import quantize, quantize_after
from funcops.low_precision import (
    MXFP8,
    Format,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    dense,
    quantize_params,
    quantize_tensor,
    recipe_init,
    recipe_update,
    with_recipe,
)

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
MODES, ELEMENTS = ("rceil", "floor", "even", "ceil"), ("e4m3", "e5m2", "e2m1")
# by element: F8E4M3_MAX and the like, F8E4M3_MAX_POW2, MBITS_F8_E4M3, and ml_dtypes' type
OF = {
    "e4m3": (448.0, 8, 3, ml_dtypes.float8_e4m3fn),
    "e5m2": (57344.0, 15, 2, ml_dtypes.float8_e5m2),
    "e2m1": (6.0, 2, 1, ml_dtypes.float4_e2m1fn),
}


def torchao_mx(x, element, mode):
    """Codes and scales of rows, one tile each, as torchao/prototype/mx_formats/mx_tensor.py's `to_mx` makes them."""
    largest, target_max_pow2, mbits, dtype = OF[element]
    max_abs = torch.amax(torch.abs(x), -1, keepdim=True).float()
    if mode == "rceil":
        value = max_abs * (1.0 / largest)
        bits = value.view(torch.int32)
        exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        biased = exponent + torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0).int()
        biased = torch.where(torch.isfinite(value), biased, 255)
    else:
        if mode == "even":
            nan = torch.isnan(max_abs)
            max_abs = ((max_abs.view(torch.int32) + (1 << (23 - mbits - 1))) & (0x1FF << 23)).view(torch.float32)
            max_abs[nan] = math.nan
        bits = max_abs.view(torch.int32)
        pow2 = ((bits >> 23) & 0xFF) - 127
        if mode == "ceil":
            pow2 += (bits & 0x7FFFFF) > 0
        biased = torch.clamp(pow2 - target_max_pow2, -127, 128) + 127
        biased = torch.where(torch.isfinite(max_abs), biased, 255)
    reciprocal = (254 - biased) & 0xFF
    factor = torch.where(reciprocal == 0, 0x400000, reciprocal << 23)
    factor = torch.where(reciprocal == 255, 0x7F800001, factor).view(torch.float32)
    codes = torch.clamp(x.float() * factor, -largest, largest).numpy().astype(dtype).view(np.uint8)
    return torch.from_numpy(codes), biased.to(torch.uint8)


def bf16():
    """Every finite bfloat16."""
    all_of_them = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return all_of_them[all_of_them.isfinite()]


def hard():
    """float32 numbers at and beside each mantissa from which a rule goes to the next exponent, in every binade; and any others."""
    edges = [0, 0x600000, 0x400000, *[(1 << 23) - (1 << (22 - mbits)) for mbits in (1, 2, 3)], 0x800000]
    near = {max(0, min(edge + step, 0x7FFFFF)) for edge in edges for step in (-1, 0, 1)}
    bits = torch.tensor([[exponent << 23 | mantissa for mantissa in sorted(near)] for exponent in range(255)])
    drawn = torch.randint(0, 0x7F800000, (4096,), generator=torch.Generator().manual_seed(0))
    return torch.cat((bits.flatten(), drawn)).to(torch.int32).view(torch.float32)


def quantised(x, element, mode, impl=None):
    kind = Format(element, (1, 32), "e8m0", scaling_mode=mode).how()[3]
    made = (impl or quantize.quantize_row)(x, element, 1, 32, kind, None, None)
    return unpacked(made[0], x, element), made[1]


def unpacked(codes, x, element):
    if element != "e2m1":
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : x.shape[-1]]


def overflows(x, element, mode):
    """Whether EVEN rounds a tile's amax up to infinity, for which torchao returns NaN; here elements saturate."""
    amax = x.float().abs().amax(-1, keepdim=True)
    return (amax.view(torch.int32) + (1 << (22 - OF[element][2])) >= 0x7F800000) & (mode == "even")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_scales_and_codes_are_torchaos(element, mode):
    mixed = torch.stack([bf16()[torch.randperm(len(bf16()), generator=torch.Generator().manual_seed(seed))] for seed in (0, 1)])
    fp32 = hard()
    alone = torch.nn.functional.pad(fp32[:, None], (0, 31))
    alone[:, 1], alone[:, 2] = alone[:, 0] * 0.7, -alone[:, 0] / 3
    for x in (bf16()[:, None], bf16().view(-1, 32), mixed.view(-1, 32), alone, torch.zeros(3, 32)):
        codes, scales = quantised(x, element, mode)
        want_codes, want_scales = torchao_mx(x, element, mode)
        same = ~overflows(x, element, mode)
        assert same.float().mean() > 0.95
        assert (scales != want_scales)[same].sum() == 0, "scales"
        assert ((codes != want_codes) & same).sum() == 0, "codes"


@pytest.mark.parametrize(
    ("mode", "least", "most"), [("rceil", 224, 448), ("floor", 256, 512), ("even", 248, 496), ("ceil", 128, 256)], ids=MODES
)
def test_a_tiles_largest_is_in_the_range_that_the_page_gives(mode, least, most):
    """In e4m3, over the scale: above the least and up to the most where exponents are rounded up, else from the least, below the
    most."""
    amax = torch.arange(2**13, 2**14)[:, None] / 2.0**13
    over = amax / torch.exp2(quantised(amax, "e4m3", mode)[1].float() - 127)
    up = mode in ("rceil", "ceil")
    assert (over.min() == least) == (not up) and least <= over.min() < least * 1.001
    assert (over.max() == most) == up and most * 0.999 < over.max() <= most


def test_rules_differ_where_they_should():
    x = torch.tensor([[448.0], [449.0], [256.0], [480.0], [496.0], [257.0]])
    found = {mode: quantised(x, "e4m3", mode)[1].flatten().sub(127).view(torch.int8).tolist() for mode in MODES}
    assert found["rceil"] == [0, 1, 0, 1, 1, 0] and found["floor"] == [0, 0, 0, 0, 0, 0]
    assert found["even"] == [0, 0, 0, 0, 1, 0] and found["ceil"] == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_differs_from_torchao_on_purpose(mode):
    """torchao makes a tile with NaN or infinity NaN, and one whose amax EVEN rounds to infinity; here 8-bit elements keep their
    values."""
    huge = torch.finfo(torch.float32).max
    x = torch.tensor([[1.0, 2.0, math.nan], [1.0, 2.0, math.inf], [1.0, 2.0, huge]])
    _, theirs = torchao_mx(x, "e4m3", mode)
    assert theirs.flatten()[:2].tolist() == [255, 255] and (theirs[2].item() == 255) == (mode == "even")
    y = quantize_tensor(x, Format("e4m3", (1, 32), "e8m0", scaling_mode=mode)).dequantize()
    assert y[0, :2].tolist() == [1.0, 2.0] and y[0, 2].isnan()
    assert not y[1].isnan().any() and y[1, 2] == math.inf
    assert not y[2].isnan().any() and y[2, 2] >= huge * 0.8
    few = quantize_tensor(x, Format("e2m1", (1, 32), "e8m0", scaling_mode=mode)).dequantize()
    assert few[0].isnan().all() and not few[1:].isnan().any()


def plain(t):
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(got, want, what):
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype and torch.equal(*(plain(t) for t in (one, other))), what


def both_ways(kernel, *args, exact=True):
    with backend("triton"), np.errstate(over="ignore", invalid="ignore"):
        got = kernel(*args)
    count = len(got) if exact else 2  # a norm's rstd is a sum in another order
    same_bits(got[:count], kernel.kernel.torch_impl(*args)[:count], (kernel.kernel.name, args[1:]))
    return got


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("element", ELEMENTS)
def test_triton_has_the_same_rules(element, mode):
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-45, 3.4e38]).repeat(6)[:32]
    edges = torch.cat((hard()[::17], special))
    for x in (edges[: len(edges) // 32 * 32].view(-1, 32), bf16()[5::677, None], torch.randn(34, 45).bfloat16()):
        for tile in ((1, 32), (32, 32)):
            how = Format(element, tile, "e8m0", scaling_mode=mode).how()
            both_ways(quantize.quantize_row, x, *how, None, None)
        both_ways(quantize.quantize_both, x, *Format(element, (1, 32), "e8m0", scaling_mode=mode).how(), None)


# The least amax


def te_scale(amax, largest, pow2, epsilon, value_for_inf):
    """`compute_scale_from_amax` of Transformer Engine's recipe_common.cuh."""
    amax = np.where(amax < np.float32(epsilon), np.float32(epsilon), amax).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(largest) / amax
    scale = np.where(np.isinf(scale), np.float32(value_for_inf), scale)
    scale = np.where(np.isinf(amax) | (amax == 0) | np.isnan(amax), np.float32(1), scale)
    return (scale.view(np.int32) & np.int32(-8388608)).view(np.float32) if pow2 else scale


@pytest.mark.turns("kind")
@pytest.mark.parametrize("epsilon", [0.0, 2.0**-126, 1e-12, 0.5, 3e38])
@pytest.mark.parametrize("kind", ["pow2", "float32"])
def test_the_least_amax_is_transformer_engines(kind, epsilon):
    x = torch.cat((hard()[::7], torch.tensor([0.0, math.inf])))[:, None]
    for element in ("e4m3", "e5m2"):
        largest, _, _, dtype = OF[element]
        factor = te_scale(x.numpy(), largest, kind == "pow2", epsilon, np.finfo(np.float32).max)
        with np.errstate(over="ignore"):
            codes = np.clip(x.numpy() * factor, -largest, largest).astype(dtype).view(np.uint8)
        for rows, cols, columns in ((1, 0, False), (1, 128, True)):
            made = quantize.quantize_row(x, element, rows, cols, kind, None, None, epsilon)
            scales = made[1].mT if columns else made[1]
            same_bits((made[0], scales), (torch.from_numpy(codes), torch.from_numpy(1 / factor)), (element, cols))
    both_ways(quantize.quantize_row, x[::5], "e4m3", 1, 0, kind, None, None, epsilon)
    both_ways(quantize.quantize_row, x[::5], "e4m3", 0, 0, kind, x[:1, 0] + 0.25, None, epsilon)
    for tile in ((1, 128), (128, 128)):
        both_ways(quantize.quantize_row, torch.randn(40, 140) * 1e-12, "e4m3", *tile, kind, None, None, epsilon)
        both_ways(quantize.quantize_both, torch.randn(40, 140) * 1e-12, "e4m3", *tile, kind, None, epsilon)


@pytest.mark.parametrize("tile", [(1, 0), (1, 32), (2, 32), (32, 32), (1, 128)], ids=str)
def test_tiles_that_kernels_lack_and_an_amax_given_for_tiles_are_left_to_torch(tile):
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0))
    for kind, amax in itertools.product(("pow2", "float32", "e8m0"), (None, torch.tensor([9.0]))):
        both_ways(quantize.quantize_row, x, "e4m3", *tile, kind, amax, None)


@pytest.mark.parametrize("make", [Fp8Block, Fp8Current], ids=lambda make: make.__name__)
def test_small_tensors_have_the_least_amax(make):
    """With a least amax of 1, numbers below 2^-10 / 448 vanish; without, they are written as precisely as others."""
    x, cfg = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)), LinearConfig(128, 128, bias=False)
    params = linear.init(cfg, key=random.key(0), dtype=torch.float32)
    for keep in ("row", "col", "input"):
        recipe = make(amax_epsilon=1.0, keep=keep)
        own = QLinearConfig(128, 128, recipe, bias=False)
        assert recipe.x.amax_epsilon == recipe.w.amax_epsilon == recipe.dy.amax_epsilon == 1.0
        y, residuals = qlinear.fwd(params, x * 1e-7, own)
        assert not y.any() and qlinear.fwd(params, x * 1e-7, QLinearConfig(128, 128, make(keep=keep), bias=False))[0].all()
        dparams, dx = qlinear.bwd(residuals, x, own)
        w, dy = (quantize_tensor(t, format) for t, format in ((params.weight, recipe.w), (x, recipe.dy)))
        torch.testing.assert_close(dx, dense(dy) @ dense(w), rtol=1e-5, atol=1e-5)
        assert not dparams.weight.any()


def test_tiles_made_anew_keep_the_least_amax():
    format, x = Format("e4m3", (1, 128), amax_epsilon=2.0), torch.rand(130, 256)
    row, col = (quantize_tensor(x, format, side=side) for side in ("row", "col"))
    same_bits([turned(row).scales.contiguous()], [col.scales.contiguous()], "scales")
    assert (turned(row).scales == 2.0**-7).all()
    args = row.codes, row.scales, "e4m3", 1, 128, 2.0
    both_ways(quantize.retile, *args)


@pytest.mark.parametrize(
    "format", [Format("e4m3", (1, 32), "e8m0", scaling_mode="floor"), Format("e4m3", amax_epsilon=30.0)], ids=str
)
def test_outputs_are_quantised_by_the_same_rules(format):
    """A norm, a GLU and an activation write the codes that a quantiser makes of their y."""
    x, w = torch.randn(9, 256), torch.rand(256)
    how, rest = (format.element, format.tile[1], format.how()[3]), format.amax_epsilon
    both_ways(quantize_after.rms_norm_quantize, x, w, 1e-5, False, *how, rest, exact=False)
    both_ways(quantize_after.layer_norm_quantize, x, w, w, 1e-5, False, *how, rest, exact=False)
    both_ways(quantize_after.glu_quantize, x, "swiglu", True, *how, rest)
    codes, scales = both_ways(quantize_after.activation_quantize, x, "relu", *how, rest)
    plain = quantize.quantize_row(x.relu(), *format.how(), None, None, rest)
    same_bits((codes, scales), plain, "activation")
    default = quantize_after.activation_quantize.kernel.torch_impl(x, "relu", *how[:2], format.scales)
    assert not torch.equal(default[1], scales)


# Recipes


@pytest.mark.parametrize("mode", MODES)
def test_a_recipe_has_the_rule(mode):
    recipe = MXFP8(scaling_mode=mode)
    cfg = QLinearConfig(64, 96, recipe, bias=False)
    params, x = qlinear.init(cfg, key=random.key(0), dtype=torch.float32), torch.randn(32, 64)
    y, residuals = qlinear.fwd(quantize_params(params, cfg, dtype=torch.float32), x, cfg)
    of_x, of_w = (t.float().view(-1, 32) for t in (x, params.weight))
    decoded = []
    for tiles, like in ((of_x, x), (of_w, params.weight)):
        codes, scales = torchao_mx(tiles, "e4m3", mode)
        decoded.append((codes.view(torch.float8_e4m3fn).float() * torch.exp2(scales.float() - 127)).view(like.shape))
    torch.testing.assert_close(y, decoded[0] @ decoded[1].mT, rtol=1e-5, atol=1e-5)
    assert qlinear.bwd(residuals, torch.randn(32, 96), cfg)[1].shape == x.shape


def test_refusals_of_rules():
    for make, message in (
        (lambda: MXFP8(scaling_mode="up"), "MXFP8: scaling_mode must be one of rceil, floor, even, ceil, got 'up'"),
        (lambda: Format("e4m3", scaling_mode="floor"), "Format: scaling_mode must be one of rceil with pow2 scales, got 'floor'"),
        (lambda: Fp8Block(amax_epsilon=-1.0), "Fp8Block: amax_epsilon must be 0, or a normal float32 (2^-126 at least), got -1.0"),
        (
            lambda: Fp8Current(amax_epsilon=math.inf),
            "Fp8Current: amax_epsilon must be 0, or a normal float32 (2^-126 at least), got inf",
        ),
        (
            lambda: Format("e4m3", (1, 32), "e8m0", amax_epsilon=1.0),
            "Format: amax_epsilon must be 0 with e8m0 scales (it is for pow2 and float32), got 1.0",
        ),
        (
            lambda: Fp8Delayed(algorithm="mean"),
            "Fp8Delayed: algorithm must be 'max', 'most_recent', or a function from the history [H, n] to amaxes [n], got 'mean'",
        ),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value) == message


# An amax algorithm of one's own


def mean(history):
    return history.mean(0)


def wrong(history):
    return history.mean(1)


def float_of(history):
    return float(history[0, 0])


def delayed(algorithm):
    cfg = with_recipe(
        ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), Fp8Delayed(history=4, algorithm=algorithm, margin=1)
    )
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    return cfg, recipe_init(cfg, params)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", mean], ids=["max", "most_recent", "mean"])
def test_scales_follow_from_an_algorithm_of_ones_own(algorithm, stacked):
    """Transformer Engine's `_amax_and_scale_update`: amax = amax_compute_algo(history), s = largest / amax / 2^margin."""
    recipe = Fp8Delayed(history=4, algorithm=algorithm, margin=1)
    state = delayed(algorithm)[1]
    lead = (2, 3) if stacked else ()
    state = {path: type(s)(s.scale.expand(*lead, 3), s.history.expand(*lead, 4, 3)) for path, s in state.items()}
    steps = torch.rand(7, *lead, 3, generator=torch.Generator().manual_seed(0)) + 0.5
    for i, amaxes in enumerate(steps):
        state = recipe_update(state, {"up.weight": amaxes}, recipe)
        history = torch.zeros(4, *lead, 3)
        history[: i + 1] = steps[max(0, i - 3) : i + 1].flip(0)
        amax = {"max": history.amax(0), "most_recent": history[0]}.get(
            algorithm if isinstance(algorithm, str) else "", history.mean(0)
        )
        want = torch.tensor([448.0, 448.0, 57344.0]) / amax / 2
        torch.testing.assert_close(state["up.weight"].scale, want, rtol=1e-6, atol=0)
    assert torch.equal(state["up.weight"].history.movedim(-2, 0), history)


def test_an_algorithms_result_is_checked():
    _, state = delayed(mean)
    amaxes = {"up.weight": torch.ones(3)}
    with pytest.raises(
        ValueError, match=r"^recipe_update: recipe\.algorithm, wrong\(history \[4, 3\]\), must be .*\[3\].*got .*\[4\]"
    ):
        recipe_update(state, amaxes, Fp8Delayed(history=4, algorithm=wrong))
    with pytest.raises(TypeError, match=r"^recipe_update: recipe\.algorithm, float_of\(history"):
        recipe_update(state, amaxes, Fp8Delayed(history=4, algorithm=float_of))
    for nothing in (torch.zeros_like, lambda t: t / 0, lambda t: -t):
        after = recipe_update(state, amaxes, Fp8Delayed(history=4, algorithm=lambda history, f=nothing: f(history[0])))
        assert torch.equal(after["up.weight"].scale, torch.ones(3)) and after["up.weight"].history[0].eq(1).all()
    assert hash(Fp8Delayed(algorithm=mean)) == hash(Fp8Delayed(algorithm=mean)) and Fp8Delayed(algorithm=mean) != Fp8Delayed()


# Which NVFP4 scales follow the published formula


def test_nvfp4_scales_are_those_of_the_published_formula_and_torchaos_have_a_floor():
    """arXiv 2509.25149, appendix: s_enc = 6 * 448 / amax_x, s_b = e4m3(amax_b / 6 * s_enc); core_nvfp4.cuh the same. torchao's
    `nvfp4_quantize` clamps s_b at 2^-6, e4m3's least normal number."""
    x = bf16().view(-1, 16)
    amax = x.abs().max().float().reshape(1)
    own = quantize_tensor(x, Format("e2m1", (1, 16), "e4m3"), amax=amax).scales.flatten()
    blocks, s_enc = x.float().abs().amax(1), torch.full((1,), 448.0 * 6.0) / amax
    paper = (blocks / 6.0 * s_enc).clamp(max=448.0).numpy().astype(ml_dtypes.float8_e4m3fn)
    engine = (blocks * (s_enc * torch.tensor(1.0 / 6.0))).clamp(max=448.0).numpy().astype(ml_dtypes.float8_e4m3fn)
    per_tensor_scale = amax / (448.0 * 6.0)
    torchao = (blocks / 6.0 / per_tensor_scale).clamp(2.0**-6, 448.0).numpy().astype(ml_dtypes.float8_e4m3fn)
    paper, engine, torchao = (torch.from_numpy(s.view(np.uint8)) for s in (paper, engine, torchao))
    assert len(own) == 4080 and (own != paper).sum() == 0 and (own != engine).sum() == 0
    assert (own != torchao).sum() == (paper != torchao).sum() == 3840
    assert torch.equal(own != torchao, paper < 8) and torchao[own != torchao].eq(8).all()  # 8 is the code of 2^-6
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 256, generator=g)
    scales = quantize_tensor(normal, Format("e2m1", (1, 16), "e4m3")).scales
    blocks = normal.view(64, 16, 16).abs().amax(2)
    torchao = (blocks / 6.0 / (normal.abs().max() / (448.0 * 6.0))).clamp(2.0**-6, 448.0).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert torch.equal(scales, torch.from_numpy(torchao.view(np.uint8)))
