"""On a real device: `python -m pytest -m gpu`, and `make gpu` for these and the kernel benchmark."""

import contextlib
import dataclasses
import gc
import itertools
import os

import pytest
import torch
from law_cases import CASES, sums_codes
from train_runs import TINY, losses, run

from benchmarks import kernels
from benchmarks.kernel_calls import Maker, families
from funcops import WithExtras, chain, random, with_policy
from funcops.engine.backend import backend, gemm
from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.library.formats import FORMATS, Format, quantize_tensor, turned
from funcops.library.kernels import cross_entropy, norm, pointwise, quantize
from funcops.library.kernels.scaled_mm import scaled_mm
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyConfig, linear_cross_entropy
from funcops.models.blocks import gpt2_block_config
from funcops.testing import LAWS
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close, relative

pytest.importorskip("triton")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it, before CUDA is used
pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HELD = [name for name in LAWS if name not in ("compiles", "loud", "finite_differences")]


@pytest.mark.parametrize("implementation", ["triton", "torch", None])
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_laws(case, dtype, implementation):
    case = dataclasses.replace(case, device="cuda", bits=13 if sums_codes(case) and implementation != "torch" else None)
    with (
        deterministic(case.op.name == "attention"),
        contextlib.nullcontext() if implementation is None else backend(implementation),
    ):
        for law in HELD:
            if law not in case.exempt:
                LAWS[law](case, dtype)


@contextlib.contextmanager
def deterministic(asked):
    """torch's attention kernels add in the order in which they finish, unless torch is in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", sorted({case.op.name for case, _ in CASES}))
def test_compiles(name):
    case = next(case for case, _ in CASES if case.op.name == name)
    if "compiles" not in case.exempt:
        LAWS["compiles"](dataclasses.replace(case, device="cuda"), torch.float32)


# a call's family, its place in it, and its name
CALLS = [
    (number, place, f"{call.name} {call.shape}")
    for number, family in enumerate(families())
    for place, call in enumerate(family(Maker("meta", torch.float32)))
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "place"), [one[:2] for one in CALLS], ids=[name for _, _, name in CALLS])
def test_real_sizes(family, place, dtype):
    """Every benchmarked call against the torch body in float64, at a quarter of its sizes."""
    call = next(itertools.islice(families()[family](Maker("cuda", dtype, shrink=4)), place, None))
    with backend("triton"):
        # of codes: where y differs in its last bit, an element may be rounded to the next one
        close = torch.bfloat16 if call.values is not None else call.dtype or dtype
        assert kernels.relative_error(call) < relative(close, call.length, call.bits)
    del call
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_quantisers_give_the_bits_of_torch(format, dtype):
    """The device's instructions convert every bfloat16 number, in a drawn order, and numbers of many sizes."""
    g = torch.Generator().manual_seed(0)
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)[torch.randperm(2**16, generator=g)].view(512, 128)[:, :120]
    wide = torch.randn(300, 260, generator=g) * torch.exp2(torch.randint(-40, 40, (300, 1), generator=g))
    for x in (every, wide):
        x = x.to(dtype).cuda()
        whole = quantize.amax(x, False) if format.whole else None
        calls = [(quantize.quantize_row, whole, None), (quantize.quantize_col, whole, None, False), (quantize.quantize_both, whole)]
        for kernel, *rest in calls:
            with backend("triton"):
                got = kernel(x, *format.args(), *rest)
            same_bits(tuple(got), kernel.kernel.torch_impl(x, *format.args(), *rest), kernel.kernel.name)
        row = quantize_tensor(x, format)
        with backend("triton"):
            same_bits(quantize.transpose(row.codes), quantize.matrix(row.codes).mT, "transpose")
            if format.turns:
                got = turned(row)
        if format.turns:
            with backend("torch"):
                same_bits(got, turned(row), "turned")


@pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 128, 512), (260, 48, 144), (130, 64, 272), (64, 72, 256), (16, 16, 16), (4, 400, 2176)]
)
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_products_of_codes_by_the_library_and_by_ours(m, n, k, out):
    """Compared with decoded operands in float64; sums keep some 14 bits."""
    x, w = torch.randn(m, k).cuda(), torch.randn(n, k).cuda()
    tiles = (((0, 0), (0, 0)), ((1, 0), (1, 0)), ((1, 128), (128, 128)), ((1, 128), (1, 128)))
    for (a, b), left, right in itertools.product(tiles, ("e4m3", "e5m2"), ("e4m3", "e5m2")):
        p, q = quantize_tensor(x, Format(left, a, "float32")), quantize_tensor(w, Format(right, b, "float32"))
        args = *p.args, *q.args, left, *a, right, *b, "float32", k, out
        want = p.dequantize(torch.float64) @ q.dequantize(torch.float64).mT
        for provider in ("auto", "triton"):
            with gemm(provider):
                assert_close(scaled_mm(*args), want, dtype=out, bits=13, what=f"{provider} {a} {b} {left} {right}")


@pytest.mark.parametrize("by", [1, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_addresses(by, dtype):
    flat = torch.randn(by + 512 * 1024, device="cuda").to(dtype)
    w = torch.randn(by + 1024, device="cuda").to(dtype)[by:]
    x = flat[by:].view(512, 1024)
    with backend("torch"):
        want = norm.rms_norm_fwd(x, w, 1e-6, False)
    with backend("triton"):
        assert_close(norm.rms_norm_fwd(x, w, 1e-6, False), want, dtype=dtype)
        assert_close(norm.rms_norm_fwd(x.clone(), w.clone(), 1e-6, False), want, dtype=dtype)


def gpt2_run(policy, fuse=True, dtype=torch.float32):
    cfg = gpt2_block_config(256, 4, 1024, 0.1)
    op, params = with_policy(chain, policy), chain.init(cfg, key=random.key(0), dtype=dtype)
    x, dy = (random.uniform(random.key(i), (4, 128, 256), low=-1, high=1, dtype=dtype).cuda() for i in (1, 2))
    params, given = tree_map_tensors(lambda t: t.cuda(), params), WithExtras(x, {"key": random.key(3).cuda()})
    with backend("triton" if fuse else "torch"):
        y, kept = op.fwd(params, given, cfg)
        return y, op.bwd(kept, dy, cfg), kept, params


@pytest.mark.parametrize("policy", ["save_all", "recompute_norms", "minimal", "offload_block_inputs"])
def test_policies_give_the_same_bits(policy):
    y, gradients, kept, params = gpt2_run(policy)
    want_y, want, _, _ = gpt2_run("recompute_elementwise")
    assert torch.equal(y, want_y)
    assert all(g is w is None or torch.equal(g, w) for g, w in zip(leaves(gradients), leaves(want), strict=True))
    if policy == "offload_block_inputs":
        owned = {t.untyped_storage()._cdata for t in tensors(params)}
        assert not [t for t in tensors(kept) if t.is_cuda and t.untyped_storage()._cdata not in owned]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planned_blocks_are_unplanned_ones(dtype):
    got, want = (gpt2_run("recompute_elementwise", fuse, dtype)[:2] for fuse in (True, False))
    assert_close(got, want, dtype=dtype, length=4096)


def test_dropout_draws_the_bits_of_the_cpu():
    x, key = torch.ones(100_003), random.fold_in(random.key(3), 2**40 + 7)
    want = pointwise.dropout(x, key, 0.3)
    with backend("triton"):
        assert torch.equal(pointwise.dropout(x.cuda(), key.cuda(), 0.3).cpu(), want)


def test_more_than_two_billion_elements():
    n = 2**31 + 1024 * 3
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1.0
    with backend("triton"):
        y = pointwise.add(x, x)
        assert float(y[-1]) == 2.0 and int(torch.count_nonzero(y)) == 1
        z, rstd = norm.rms_norm_fwd(x.view(-1, 1024), x.new_ones(1024), 1e-6, False)
    assert float(z[-1, -1]) > 30 and int(torch.count_nonzero(z)) == 1 and rstd.shape == (n // 1024, 1)


def test_a_long_row_of_logits():
    logits, labels = torch.randn(4, 128256, device="cuda"), torch.tensor([128255, -100, 7, 0], device="cuda")

    def both():
        losses, lse = cross_entropy.cross_entropy_fwd(logits, labels, 0.1, -100, 1e-3)
        return losses, lse, cross_entropy.cross_entropy_bwd(losses, logits, labels, lse, 0.1, -100, 1e-3)

    with backend("torch"):
        want = both()
    with backend("triton"):
        assert_close(both(), want, dtype=torch.float32, length=128256)


def test_linear_cross_entropy_keeps_to_a_tenth_of_the_logits():
    cfg = LinearCrossEntropyConfig(1024, 128256)
    params = linear_cross_entropy.init(cfg, key=random.key(0), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16), torch.randint(128256, (8192,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, residuals = linear_cross_entropy.fwd(params, x, cfg)
    dparams, dx = linear_cross_entropy.bwd(residuals, torch.ones_like(y), cfg)
    gradients = sum(t.nbytes for t in (dparams.weight, dx[0]))
    assert torch.cuda.max_memory_allocated() - before - gradients <= 0.1 * 8192 * 128256 * 2


def test_the_example_trains_as_on_the_cpu(tmp_path):
    flags = [*TINY, "--text", "LICENSE", "--steps", 10]
    run(*flags, "--out", tmp_path / "a")
    run(*flags, "--out", tmp_path / "b", "--device", "cuda")
    for a, b in zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True):
        assert float(b[1]) == pytest.approx(float(a[1]), rel=1e-3)
