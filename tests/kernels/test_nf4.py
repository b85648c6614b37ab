"""NF4 against its published derivation, bitsandbytes' thresholds, and codes that bitsandbytes 0.50.2 made."""

import hashlib
import random as draws

import pytest
import torch

from funcops.library.kernels import nf4
from funcops.library.kernels.triton import nf4 as by_triton
from funcops.testing.tolerances import assert_close

# dQuantizeNF4 of bitsandbytes' csrc/kernels.cu: a code is the number of thresholds below x
THRESHOLDS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_levels_share_out_a_normal_distribution():
    """QLoRA's create_normal_map(offset=0.9677083): 8 quantiles above zero, 7 below, over the largest."""
    above = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([above, below, torch.zeros(1, dtype=torch.float64)]).sort().values
    assert torch.allclose(torch.tensor(nf4.LEVELS, dtype=torch.float64), levels / levels.abs().max(), rtol=0, atol=1e-6)


def hashed(t):
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_codes_are_bitsandbytes():
    """Hashes of what `quantize_4bit(x, blocksize=64, compress_statistics=..., quant_type="nf4")` and `dequantize_4bit` returned, of
    numbers that float32 represents."""
    i = torch.arange(48 * 192)
    x = (((i * 7919) % 1009 - 504).float() / 256).reshape(48, 192) * (2.0 ** -(torch.arange(48) % 5))[:, None]
    codes, absmax = nf4.nf4_quantize(x)
    small, largest, mean = nf4.nested(absmax)
    once = nf4.nf4_dequantize(codes, absmax, 192, torch.float32)
    twice = nf4.nf4_dequantize(codes, nf4.unnested(small, largest, mean), 192, torch.float32)
    assert [hashed(t) for t in (codes, absmax, small, largest, twice, once)] == [
        "4b1729a222d5471a",
        "9d40d41d40ae6906",
        "26381cfbe6fb48d1",
        "1145f67884c7b79c",
        "cfcc0596f422e705",
        "9a83de330d9fd208",
    ]
    assert mean.item() == 0.7784745693206787


def made(seed):
    d = draws.Random(seed)
    torch.manual_seed(seed)
    lead = d.choice(((3,), (1,), (2, 5), (0,), (33,), (2, 0, 3)))
    width = d.choice((0, 1, 2, 63, 64, 65, 128, 190, 1023, 1024, 1025, 2050))
    x = torch.randn(*lead, width) * 10.0 ** d.uniform(-6, 3)
    if d.random() < 0.3:
        x = x * (torch.rand_like(x) < 0.02)  # blocks of zeros
    return x.to(d.choice(DTYPES))


@pytest.mark.parametrize("seed", range(40))
def test_every_element_goes_to_its_level(seed):
    x = made(seed)
    width = x.shape[-1]
    codes, absmax = nf4.nf4_quantize(x)
    assert codes.shape == (*x.shape[:-1], -(-width // 2)) and absmax.shape == (*x.shape[:-1], -(-width // 64))
    split = torch.stack((codes >> 4, codes & 15), -1).flatten(-2)[..., :width].long()
    wide = x.float()
    largest = torch.stack([part.abs().amax(-1) for part in wide.split(64, -1)], -1) if width else wide
    assert absmax.equal(largest), "the largest of a block"
    each = largest.repeat_interleave(64, -1)[..., :width]
    share = wide * (1.0 / each.clamp(min=1e-38))
    assert split.equal((share.unsqueeze(-1) > torch.tensor(THRESHOLDS)).sum(-1)), "the thresholds of bitsandbytes"
    wanted = torch.tensor(nf4.LEVELS)[split] * each
    for out in DTYPES:
        args = codes, absmax, width, out
        for found in (nf4.nf4_dequantize.kernel.torch_impl(*args), by_triton.nf4_dequantize(*args)):
            assert found.is_contiguous() and found.dtype is out and found.shape == x.shape and found.equal(wanted.to(out))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_alone(value):
    x = torch.ones(2, 192)
    x[1, 70] = value
    codes, absmax = nf4.nf4_quantize(x)
    for decode in (nf4.nf4_dequantize.kernel.torch_impl, by_triton.nf4_dequantize):
        found = decode(codes, absmax, 192, torch.float32)
        assert (
            not found[1, 64:128].isfinite().any()
            and found[0].eq(1).all()
            and found[1, :64].eq(1).all()
            and found[1, 128:].eq(1).all()
        )


def test_codes_may_have_any_strides():
    x = torch.randn(6, 130)
    codes, absmax = nf4.nf4_quantize(x)
    wanted = nf4.nf4_dequantize(codes, absmax, 130, torch.float32)
    for decode in (nf4.nf4_dequantize.kernel.torch_impl, by_triton.nf4_dequantize):
        assert decode(codes.mT.contiguous().mT, absmax.repeat(1, 2)[:, :3], 130, torch.float32).equal(wanted)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (16, 16), (100, 7), (2, 40, 13)])
def test_double_quantisation_is_near(shape):
    """Each matrix has scales of its own. The widest step of the map, from 0.986 to 1, is 0.014: errors are at most half of it."""
    absmax = torch.rand(shape) + 0.5
    codes, largest, mean = nf4.nested(absmax)
    assert codes.dtype is torch.uint8 and mean.shape == (*shape[:-2], 1)
    found = nf4.unnested(codes, largest, mean)
    assert_close(mean, absmax.flatten(-2).double().mean(-1, keepdim=True), dtype=torch.float32)
    assert (found - absmax).abs().max() <= 0.0075 * largest.max()
    if len(shape) == 3:
        alone = nf4.nested(absmax[1])
        assert codes[1].equal(alone[0]) and largest[1].equal(alone[1]) and mean[1].equal(alone[2])
