"""softcap, softmax, group_norm, modulate, causal_conv1d and patchify beyond their laws: rows and groups larger than a program,
sequences that continue, and uses in models."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import funcops as fo
from funcops import (
    CausalConv1dConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    LinearParams,
    Needs,
    PatchifyConfig,
    RowScaleConfig,
    UnpatchifyConfig,
    causal_conv1d,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    linear_fwd,
    patchify_fwd,
    random,
    row_scale_fwd,
    unpatchify_fwd,
)
from funcops.engine.backend import backend
from funcops.engine.trees import leaves, nbytes, replace
from funcops.library.kernels import causal_conv1d as conv_kernels
from funcops.library.kernels import embedding, group_norm, modulate, norm, softmax
from funcops.testing.tolerances import assert_close

triton = pytest.importorskip("triton")
warnings = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's, of the interpreter


def both(kernel, *args):
    want = kernel(*args)
    with backend("triton"):
        return kernel(*args), want


@warnings
@pytest.mark.parametrize("width", [5, 700, 16400, 32800])
def test_rows_of_which_some_are_masked(width):
    """Masked from the front, so that the first block of a long row is only -inf; and whole rows, which have no softmax."""
    x, dy = 3 * torch.randn(3, width), torch.randn(3, width)
    x[0, : max(1, width // 2)], x[2] = -torch.inf, -torch.inf
    got, want = both(softmax.softmax_fwd, x)
    assert got[2].isnan().all() and want[2].isnan().all() and (got[0, : max(1, width // 2)] == 0).all()
    assert_close(got[:2], want[:2], dtype=torch.float32)
    assert_close(*both(softmax.softmax_bwd, dy[:2], want[:2]), dtype=torch.float32, length=width)


@warnings
@pytest.mark.parametrize("width", [9, 32800])
def test_a_row_with_infinity_or_nan_gives_nan(width):
    x = torch.randn(3, width)
    x[0, 4], x[1, -1] = torch.inf, torch.nan
    got, want = both(softmax.softmax_fwd, x)
    assert torch.equal(got.isnan(), want.isnan()) and got[:2].isnan().any(-1).all()


@pytest.mark.parametrize(("channels", "groups", "size"), [(4, 2, 4200), (6, 6, 1030), (70, 2, 3), (4, 2, 17000)])
def test_groups_of_every_size(channels, groups, size):
    x, dy, w, b = torch.randn(2, channels, size) + 2, torch.randn(2, channels, size), torch.randn(channels), torch.randn(channels)
    got, want = both(group_norm.group_norm_fwd, x, w, b, groups, 1e-5)
    length = size * channels // groups
    assert_close(got, want, dtype=torch.float32, length=length)
    given = dy, x, w, *want[1:], groups, True, True, True
    (dx, *sums), (want_dx, *want_sums) = both(group_norm.group_norm_bwd, *given)
    assert_close(dx, want_dx, dtype=torch.float32, length=length)
    assert_close([s.sum(0) for s in sums], [s.sum(0) for s in want_sums], dtype=torch.float32, length=2 * size)


def test_sequences_of_several_parts():
    """Two kernels split their sums over time differently."""
    x, dy, scale = torch.randn(2, 70, 1030), torch.randn(2, 70, 1030), torch.randn(2, 1030)
    assert_close(*both(modulate.modulate_fwd, x, scale, dy[:, 0]), dtype=torch.float32)
    got, want = both(modulate.modulate_bwd, dy, x, scale, True, True, True)
    assert len(got[1]) > 1 and torch.equal(got[0], want[0])
    assert_close([s.sum(0) for s in got[1:]], [s.sum(0) for s in want[1:]], dtype=torch.float32, length=70)
    for channels, width in ((130, 4), (40, 11)):
        x, dy, w, b = (torch.randn(s) for s in ((2, 70, channels), (2, 70, channels), (channels, width), (channels,)))
        got, want = both(conv_kernels.causal_conv1d_bwd, dy, x, w, b, True, True, True, True)
        assert len(got[1]) > 2
        assert_close(got[0], want[0], dtype=torch.float32)
        assert_close([s.sum(0) for s in got[1:]], [s.sum(0) for s in want[1:]], dtype=torch.float32, length=140)


@pytest.mark.parametrize("ends", [(5, 6, 12), (1, 2, 3, 12), (12,)])
def test_a_convolution_goes_on(ends):
    """In parts, each after the W - 1 inputs before it."""
    cfg = CausalConv1dConfig(3)
    params, x = causal_conv1d.init(cfg, key=random.key(1), dtype=torch.float64), torch.randn(2, 12, 3).double()
    whole, _ = causal_conv1d.fwd(params, x, cfg)
    past, ys, first = x.new_zeros(2, 3, 3), [], 0
    for end in ends:
        given = torch.cat((past, x[:, first:end]), 1)
        ys.append(causal_conv1d.fwd(params, given, cfg)[0][:, 3:])
        past, first = given[:, -3:], end
    assert_close(torch.cat(ys, 1), whole, dtype=torch.float64)


def test_a_patch_embedding_is_torchs_convolution():
    x, conv = torch.randn(2, 3, 8, 12), torch.nn.Conv2d(3, 5, 4, 4)
    params = LinearParams(conv.weight.detach().flatten(1), conv.bias.detach())
    patches, _ = patchify_fwd(None, x, PatchifyConfig((4, 4)))
    y, _ = linear_fwd(params, patches, LinearConfig(48, 5))
    assert_close(y, conv(x).flatten(2).mT.detach(), dtype=torch.float32, length=48)
    again, _ = unpatchify_fwd(None, patches, UnpatchifyConfig((4, 4), (2, 3)))
    assert torch.equal(again, x) and again.data_ptr() != patches.data_ptr()


def test_capped_logits_keep_as_much_as_others():
    """Eight bytes a row, and the loss of Gemma 2's logits."""
    rows, labels, weight = torch.randn(7, 3), torch.randint(0, 11, (7,)), 5 * torch.randn(11, 3)
    kept = {}
    for cap in (None, 2.0):
        cfg = LinearCrossEntropyConfig(3, 11, softcap=cap, chunk_bytes=300)
        y, residuals = linear_cross_entropy_fwd(LinearCrossEntropyParams(weight), (rows, labels), cfg)
        kept[cap] = nbytes([residuals.logsumexp, residuals.count])
    assert kept[None] == kept[2.0] == 7 * 8 + 4
    logits = torch.tanh(rows @ weight.T / 2.0) * 2.0
    assert_close(y, F.cross_entropy(logits, labels), dtype=torch.float32, length=11)


@pytest.mark.parametrize("gradient", ["backward", "forward"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_scale_keeps_small_gradients_in_float16(reduction, gradient):
    """Most of a mean's gradient over these rows and classes is below what float16 can hold; times dy it is not."""
    generator, rows, vocab = torch.Generator().manual_seed(0), 16384, 256
    x, weight = (torch.randn(n, 8, generator=generator).half() for n in (rows, vocab))
    labels, dy = torch.randint(vocab, (rows,), generator=generator), torch.tensor(2.0**14 if reduction == "mean" else 1.0)
    cfg = LinearCrossEntropyConfig(8, vocab, chunk_bytes=2**22, reduction=reduction, gradient=gradient)
    _, residuals = linear_cross_entropy_fwd(LinearCrossEntropyParams(0.1 * weight), (x, labels), cfg)
    dparams, (dx, _) = linear_cross_entropy_bwd(residuals, dy, cfg)
    leaves = (0.1 * weight).double().requires_grad_(), x.double().requires_grad_()
    want = torch.autograd.grad(F.cross_entropy(leaves[1] @ leaves[0].T, labels, reduction=reduction), leaves, dy.double())
    for got, exact in zip((dparams.weight, dx), want, strict=True):
        assert got.dtype is torch.float16 and (got.double() - exact).norm() < 2e-3 * exact.norm()


def test_gradients_made_in_the_forward_take_three_products_for_four(monkeypatch):
    """And none without needs, nor a gradient of logits; y has the same bits, and gradients for any dy are torch's."""
    weight, rows, labels, dy = torch.randn(11, 3), torch.randn(7, 3), torch.tensor([0, -100, 4, 10, 3, 3, 9]), torch.tensor(0.3)
    params, x, product = LinearCrossEntropyParams(weight), (rows, labels), 2 * 7 * weight.numel()
    leaves = weight.double().requires_grad_(), rows.double().requires_grad_()
    want = torch.autograd.grad(F.cross_entropy(leaves[1] @ leaves[0].T, labels), leaves, dy.double())
    for gradient, products in (("backward", (1, 3)), ("forward", (3, 0))):
        for chunk_bytes in (2**20, 4 * 11 * 3):
            cfg = LinearCrossEntropyConfig(3, 11, chunk_bytes=chunk_bytes, gradient=gradient)
            with FlopCounterMode(display=False) as forward:
                y, residuals = linear_cross_entropy_fwd(params, x, cfg)
            with FlopCounterMode(display=False) as backward:
                dparams, (dx, _) = linear_cross_entropy_bwd(residuals, dy, cfg)
            assert_close((dparams.weight, dx), tuple([g.float() for g in want]), dtype=torch.float32, length=11)
            with FlopCounterMode(display=False) as without, monkeypatch.context() as patch:
                for kernel in ("with_gradient", "bwd_owned"):
                    patch.delattr(f"funcops.library.kernels.cross_entropy.cross_entropy_{kernel}")
                alone, nothing = linear_cross_entropy_fwd(params, x, cfg, needs=Needs.NONE)
            assert nothing is None and torch.equal(y, alone) and without.get_total_flops() == product
            counted = forward.get_total_flops(), backward.get_total_flops()
            if chunk_bytes == 2**20:  # torch does not count the sums of chunks
                assert counted == tuple([n * product for n in products])


def test_a_shared_experts_gate_is_qwens():
    """shared_expert_output * sigmoid(shared_expert_gate(x)), from transformers' Qwen2-MoE block."""
    expert, x, gate = torch.randn(4, 6), torch.randn(4, 3), torch.nn.Linear(3, 1, bias=False)
    logits, _ = linear_fwd(LinearParams(gate.weight.detach(), None), x, LinearConfig(3, 1, bias=False))
    y, _ = row_scale_fwd(None, (expert, logits), RowScaleConfig(sigmoid=True))
    assert_close(y, (F.sigmoid(gate(x)) * expert).detach(), dtype=torch.float32, length=3)


@pytest.fixture
def unset_is_nan():
    """Memory that nobody set holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (modulate.modulate_bwd, (torch.ones(2, 0, 4), torch.ones(2, 0, 4), torch.ones(2, 4), True, True, True)),
        (modulate.modulate_bwd, (torch.ones(2, 0, 4), torch.ones(2, 0, 4), torch.ones(2, 4), False, True, False)),
        (norm.row_sums, (torch.ones(0, 4),)),
        (embedding.embedding_wgrad, (torch.ones(0, 4), torch.ones(0, dtype=torch.int64), 3, -1)),
        (embedding.embedding_wgrad, (torch.ones(2, 0), torch.ones(2, dtype=torch.int64), 3, -1)),
    ],
)
def test_sums_of_no_rows_are_zero(kernel, given, unset_is_nan):
    for got, want in zip(leaves(both(kernel, *given)[0]), leaves(both(kernel, *given)[1]), strict=True):
        assert (got is want is None) or (torch.equal(got, want) and not got.any())


def test_an_embedding_draws_normal_rows_and_a_zero_one_for_padding():
    weight = fo.embedding.init(fo.EmbeddingConfig(200, 8, padding_idx=3), key=random.key(0)).weight
    assert not weight[3].any() and (weight != 0).all(1).sum() == 199
    assert torch.equal(weight[4:], fo.embedding.init(fo.EmbeddingConfig(200, 8), key=random.key(0)).weight[4:])


@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_a_loss_of_no_rows_has_a_gradient_of_zeros(gradient):
    cfg, params = LinearCrossEntropyConfig(4, 5, reduction="sum", gradient=gradient), LinearCrossEntropyParams(torch.randn(5, 4))
    y, kept = linear_cross_entropy_fwd(params, (torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), cfg)
    dparams, (dx, _) = linear_cross_entropy_bwd(kept, torch.ones_like(y), cfg)
    assert y == 0 and torch.equal(dparams.weight, torch.zeros(5, 4)) and dx.shape == (0, 4)


def test_a_reshape_of_dimensions_behind_a_sharded_one_stays():
    """The sharded dimension of y is counted from the end, and y has as many dimensions as are reshaped to."""
    for cfg, dim in ((fo.ReshapeConfig((6,), (2, 3)), 3), (fo.ReshapeConfig((2, 3), (6,)), 2)):
        assert cfg.sharded(3 - (dim == 3), 2) == (cfg, dim)
    assert fo.ReshapeConfig((6,), (2, 3)).sharded(1, 2) == (fo.ReshapeConfig((3,), (1, 3)), 2)


def test_the_sinks_of_heads_over_an_axis_are_sharded_by_it():
    assert fo.SinkAttentionConfig(4, over="tp").specs == {"sinks": ("tp", 0)}
    assert fo.SinkAttentionConfig(4).specs == {}


def test_experts_without_biases_refuse_one():
    cfg = fo.ExpertsConfig(2, 4, 3)
    params, x = fo.experts.init(cfg, key=random.key(0)), (torch.ones(2, 1), torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32))
    for name in ("up", "down"):
        layer = replace(getattr(params, name), bias=torch.ones(2, 4))
        with pytest.raises(ValueError, match=rf"^experts_fwd: params.{name}.bias must be None \(cfg.bias is False\), got a tensor"):
            fo.experts.fwd(replace(params, **{name: layer}), x, cfg)
