"""Kernels' torch bodies, which are fast, against the formulas beside them, in float64: over drawn shapes, strides, options, dtypes
and chunk sizes."""

import importlib
import pkgutil
import random as draws

import pytest
import torch
from tiers import drawn

import funcops.library.kernels
from funcops.engine.backend import wide
from funcops.engine.errors import describe
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.library.kernels import activation, glu, norm
from funcops.testing.laws import LAYOUTS, expanded, poisoned_empties
from funcops.testing.tolerances import assert_close

ELSEWHERE = {  # what holds the kernels that have no formula beside them: obvious bodies, and formulas that a test has already
    "test_extremes.FORMULAS": ("activation_fwd", "activation_bwd"),
    "test_attention_cuda, by WAYS['math']": ("attention_fwd", "attention_bwd"),
    "rotation.turned, by the law Right": ("rope_table", "rope_apply", "rope_apply_pair", "qkv_split_fwd", "qkv_split_bwd"),
    "test_fused_kernels, by the formulas of the norms": (
        "add_rms_norm_fwd",
        "add_rms_norm_bwd",
        "add_layer_norm_fwd",
        "add_layer_norm_bwd",
        "add_rms_norm_bwd_recompute",
        "add_layer_norm_bwd_recompute",
        "dropout_add_rms_norm_fwd",
        "dropout_add_layer_norm_fwd",
    ),
    "the law Right, by softmax written out": ("scored_attention_fwd", "scored_attention_bwd"),
    "test_qattention, by torch's attention of decoded operands": ("quantize_heads", "scaled_attention_fwd", "scaled_attention_bwd"),
    "test_nf4, by bitsandbytes' thresholds": ("nf4_dequantize",),
    "test_slot_attention, by softmax over the whole sequence": ("slot_attention_fwd",),
    "test_gated_delta_rule, by Hugging Face's recurrence": ("gated_delta_rule_fwd", "gated_delta_rule_bwd"),
    "the math as it is, by the law Right": ("log_decay_fwd", "log_decay_bwd", "causal_conv1d_fwd", "causal_conv1d_bwd"),
    "a line each": (
        "add",
        "scale",
        "dropout",
        "dropout_add",
        "dropout_bwd_sums",
        "row_sums",
        "sum_parts",
        "sum_two_parts",
        "activation_bwd_recompute",
        "embedding_fwd",
        "glu_fwd",
        "glu_pair_fwd",
        "glu_pair_bwd",
        "softcap_fwd",
        "softcap_bwd",
        "row_scale_fwd",
        "row_scale_bwd",
        "modulate_fwd",
        "modulate_bwd",
        "bias_activation_fwd",
        "bias_activation_bwd",
        "join_heads",
        "join_values",
        "sum_heads",
    ),
    "test_formats, by ml_dtypes, a search of the grid and published formulas": (
        "quantize_row",
        "quantize_col",
        "quantize_both",
        "quantize_scaled",
        "amax",
        "retile",
        "transpose",
        "dequantize",
    ),
    "test_scaled_mm, by decoded operands in float64": ("scaled_mm",),
    "test_quantized_rules, by the kernels one after the other": (
        "rms_norm_quantize",
        "layer_norm_quantize",
        "glu_quantize",
        "activation_quantize",
    ),
    "the law Right, by walks over rows and autograd": (
        "route_fwd",
        "route_bwd",
        "weights_at",
        "sort_by_expert",
        "scatter_rows",
        "gather_rows",
    ),
    "test_low_residuals, by the kernels of the decoded x": ("coded_glu_fwd", "coded_glu_bwd"),
    "test_experts and the law Right, by a loop over experts": (
        "grouped_product",
        "grouped_wgrad",
        "grouped_wgrad_into",
        "experts_up",
        "experts_dgrad",
    ),
    "test_grouped_qlinear, by qlinear of each group": (
        "aligned_starts",
        "aligned_source",
        "taken",
        "group_amax",
        "quantize_groups",
        "quantize_groups_scaled",
        "random_words",
        "grouped_scaled_mm",
        "grouped_scaled_wgrad",
    ),
    "products as in the math": (
        "bmm_fwd",
        "bmm_bwd_left",
        "bmm_bwd_right",
        "linear_fwd",
        "linear_dgrad",
        "linear_wgrad",
        "linear_bwd",
        "sibling_linear_fwd",
        "sibling_linear_dgrad",
        "joined_linear_dgrad",
        "fused_linear_fwd",
        "fused_linear_dgrad",
        "fused_linear_dgrad_add",
        "fused_linear_dgrad_into",
        "fused_linear_wgrad",
        "fused_linear_wgrad_into",
    ),
}
FLAGS = ("dx", "dw", "db", "dscales")  # arguments that ask for a result each, in order
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWN = 40
BODIES = {
    f.kernel.name: f
    for module in pkgutil.iter_modules(funcops.library.kernels.__path__)
    if not module.ispkg
    for f in vars(importlib.import_module(f"funcops.library.kernels.{module.name}")).values()
    if hasattr(f, "plain")
}


class Draws(draws.Random):
    """Draws arguments in a dtype: tensors with any strides."""

    def __init__(self, seed, dtype):
        super().__init__(seed)
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(len(seed))

    def floats(self, *shape, dtype=None, least=None):
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)
        t = t if least is None else t.abs() + least
        return self.choice([*LAYOUTS.values(), lambda t: expanded(t, self.choice((0, -1)))])(t) if self.flag() else t

    def positive(self, *shape):
        return self.floats(*shape, dtype=wide(self.dtype), least=0.3)

    def owned(self, *shape, dtype=None):
        return self.floats(*shape, dtype=dtype).clone(memory_format=torch.contiguous_format)

    def ids(self, *shape, below, ignored):
        t = torch.randint(below, shape, generator=self.generator)
        return t.masked_fill_(torch.rand(shape, generator=self.generator) < 0.2, ignored)

    def flag(self):
        return self.random() < 0.5

    def rows(self):
        return [self.choice((0, 1, 2, 5, 9)) for _ in range(self.randint(0, 2))]

    def some(self, value):
        return value if self.flag() else None


def rows_and_weight(d):
    rows, width = d.rows(), d.randint(1, 40)
    return rows, d.floats(*rows, width), d.floats(width)


def rms_norm_fwd(d):
    _, x, w = rows_and_weight(d)
    return x, w, d.choice((1e-6, 0.5)), d.flag()


def rms_norm_bwd(d):
    rows, x, w = rows_and_weight(d)
    return d.floats(*x.shape), x, w, d.positive(*rows, 1), d.flag(), d.flag(), d.flag()


def layer_norm_fwd(d):
    rows, x, w = rows_and_weight(d)
    return x, w, d.some(d.floats(*w.shape)), d.choice((1e-2, 0.5)), d.flag()


def layer_norm_bwd(d):
    rows, x, w = rows_and_weight(d)
    mean = d.floats(*rows, 1, dtype=wide(d.dtype))
    return d.floats(*x.shape), x, w, mean, d.positive(*rows, 1), d.flag(), d.flag(), d.flag(), d.flag()


def group_norm_fwd(d):
    groups, each = d.randint(1, 3), d.randint(1, 4)
    x = d.floats(d.choice((0, 1, 3)), groups * each, *[d.randint(1, 5) for _ in range(d.randint(0, 3))])
    if x.dim() in (4, 5) and d.flag():
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    w, b = (d.floats(x.shape[1], dtype=wide(d.dtype) if d.flag() else None) for _ in range(2))
    return x, w, b, groups, d.choice((1e-2, 0.5))


def group_norm_bwd(d):
    x, w, _, groups, _ = group_norm_fwd(d)
    mean = d.floats(x.shape[0], groups, dtype=wide(d.dtype))
    return d.floats(*x.shape), x, w, mean, d.positive(x.shape[0], groups), groups, d.flag(), d.flag(), d.flag()


def l2_norm_fwd(d):
    return rows_and_weight(d)[1], d.choice((1e-6, 0.5))


def l2_norm_bwd(d):
    rows, x, _ = rows_and_weight(d)
    return d.floats(*x.shape), x, d.positive(*rows, 1)


def softmax_fwd(d):
    return (d.floats(*d.rows(), d.randint(1, 40)),)


def softmax_bwd(d):
    (dy,) = softmax_fwd(d)
    return dy, d.floats(*dy.shape)


def loss_options(d):
    return d.choice((0.0, 0.1, 1.0)), d.choice((-100, 0)), d.choice((0.0, 0.01))


def cross_entropy_fwd(d):
    n, vocab, options = d.choice((0, 1, 7)), d.randint(1, 20), loss_options(d)
    return d.floats(n, vocab), d.ids(n, below=vocab, ignored=options[1]), *options


def cross_entropy_bwd(d):
    logits, labels, *options = cross_entropy_fwd(d)
    lse = d.floats(len(labels), 2, dtype=wide(d.dtype), least=1.0)
    dloss, first, more = d.choice((d.positive(len(labels)), d.positive())), d.randint(0, 5), d.randint(0, 5)
    some = d.choice(((), (first, first + logits.shape[-1] + more)))
    return dloss, logits, d.ids(len(labels), below=some[1], ignored=options[1]) if some else labels, lse, *options, *some


def cross_entropy_bwd_owned(d):
    dloss, logits, labels, lse, *options = cross_entropy_bwd(d)[:7]
    first, more = d.randint(0, 5), d.randint(0, 5)
    vocab = first + logits.shape[-1] + more
    labels = d.ids(len(labels), below=vocab, ignored=options[1])
    return dloss, d.owned(*logits.shape), labels, lse, *options, first, vocab


def cross_entropy_with_gradient(d):
    logits, labels, *options = cross_entropy_fwd(d)
    dloss = d.choice((d.positive(len(labels)), d.positive()))
    return dloss, d.owned(*logits.shape), labels, *options


def entropy_bwd(d):
    dloss, logits, labels, lse, *options = cross_entropy_bwd(d)
    wide_of_row = [d.floats(len(labels), dtype=lse.dtype) for _ in range(3)]
    return wide_of_row[0], wide_of_row[1], logits, labels, lse, wide_of_row[2], *options


def entropy_bwd_owned(d):
    _, logits, labels, lse, *options = cross_entropy_bwd_owned(d)
    wide_of_row = [d.floats(len(labels), dtype=lse.dtype) for _ in range(3)]
    return wide_of_row[0], wide_of_row[1], logits, labels, lse, wide_of_row[2], *options


def embedding_wgrad(d):
    rows, vocab = d.rows(), d.randint(1, 9)
    padding = d.choice((-1, d.randrange(vocab)))
    return d.floats(*rows, d.randint(1, 5)), d.ids(*rows, below=vocab, ignored=padding), vocab, padding


def embedding_wgrad_into(d):
    dy, ids, vocab, padding = embedding_wgrad(d)
    return dy, ids, padding, d.owned(vocab, dy.shape[-1], dtype=wide(d.dtype))


def glu_bwd(d):
    rows, width = d.rows(), d.randint(1, 40)
    scales = d.some(d.floats(*rows))
    return d.floats(*rows, width), d.floats(*rows, 2 * width), scales, d.choice(list(glu.GATES)), d.flag(), d.flag(), d.flag()


def glu_bwd_recompute(d):
    dy, x, _, kind, first, *_ = glu_bwd(d)
    return d.owned(*dy.shape), x, kind, first


def glu_pair_bwd_recompute(d):
    dy, x, _, kind, *_ = glu_bwd(d)
    return d.owned(*dy.shape), *[t.contiguous() for t in x.chunk(2, -1)], kind


def clamped_swiglu_fwd(d):
    _, x, scales, _, first, *_ = glu_bwd(d)
    return x, scales, first, d.choice((0.5, 7.0)), d.choice((1.0, 1.702)), d.choice((0.0, 1.0))


def clamped_swiglu_bwd(d):
    x, *options = clamped_swiglu_fwd(d)
    return d.floats(*x.shape[:-1], x.shape[-1] // 2), x, *options, d.flag(), d.flag()


def optimiser_step(d):
    shapes = [d.rows() for _ in range(d.randint(1, 4))]
    params, m = ([d.owned(*shape) for shape in shapes] for _ in range(2))
    v = [d.owned(*shape).square() for shape in shapes]
    grads, steps = [d.floats(*shape) for shape in shapes], [torch.tensor(float(d.randint(1, 9))) for _ in shapes]
    rates = d.choice(((0.1, None), (0.0, torch.tensor(0.3))))
    into = [d.owned(*shape) for shape in shapes] if d.flag() else []
    rates = *rates, d.choice((None, torch.tensor(0.7)))
    return params, grads, m, v, steps, into, [d.flag() for _ in shapes], *rates, 0.9, 0.95, 1e-2, d.choice((0.0, 0.2))


DRAW = {
    f.__name__: f
    for f in (
        rms_norm_fwd,
        rms_norm_bwd,
        layer_norm_fwd,
        layer_norm_bwd,
        group_norm_fwd,
        group_norm_bwd,
        l2_norm_fwd,
        l2_norm_bwd,
        cross_entropy_fwd,
        cross_entropy_bwd,
        cross_entropy_bwd_owned,
        cross_entropy_with_gradient,
        entropy_bwd,
        entropy_bwd_owned,
        embedding_wgrad,
        embedding_wgrad_into,
        glu_bwd,
        glu_bwd_recompute,
        glu_pair_bwd_recompute,
        clamped_swiglu_fwd,
        clamped_swiglu_bwd,
        softmax_fwd,
        softmax_bwd,
    )
} | {"adamw": optimiser_step, "entropy_fwd": cross_entropy_fwd}


def test_every_kernel_is_held_to_a_formula():
    held = [*DRAW, *(name for names in ELSEWHERE.values() for name in names)]
    assert sorted(held) == sorted(BODIES), "give a kernel a formula (`@name.plain`) and a row of DRAW, or say what holds it"
    assert {name for name, f in BODIES.items() if f.kernel.formula} == set(DRAW)


def compare(kernel, args, dtype):
    names = kernel.torch_impl.__code__.co_varnames[: len(args)]
    given = dict(zip(names, args, strict=True))
    wanted = kernel.formula(*tree_map_tensors(lambda t: t.double() if t.is_floating_point() else t, args))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if given.get("dx") is False and "w" in given:  # then nothing reads it
        args = tuple(None if name == "w" else a for name, a in given.items())
    with poisoned_empties():
        got = kernel.torch_impl(*args)
    got = () if got is None else got if isinstance(got, tuple) else (got,)
    asked = [given[name] for name in FLAGS if name in given] or [True] * len(got)
    assert [g is not None for g in got] == asked[: len(got)], "what was asked for is there, and nothing else"
    got += tuple(given[name] for name in kernel.mutates)
    found = [(g, w) for g, w in zip(got, wanted, strict=True) if g is not None]
    length = max([t.numel() for t in tensors(args)] + [1])
    what = f"{kernel.name}({', '.join(map(describe, args))})"
    assert_close(*map(list, zip(*found, strict=True)) if found else ([], []), dtype=dtype, length=length, what=what)


def run(name, dtype, times, monkeypatch):
    d = Draws(f"{name}{dtype}", dtype)
    for _ in range(times):
        monkeypatch.setattr(norm, "FEW_FOR_MATMUL", d.choice((0, 50, 1 << 14)))
        monkeypatch.setattr(glu, "AT_ONCE", d.choice((1, 40, 1 << 15)))
        monkeypatch.setattr(glu, "VECTORS", d.choice((1, 4, 64)))
        compare(BODIES[name].kernel, DRAW[name](d), dtype)


@pytest.mark.parametrize("name", DRAW)
def test_a_body_is_its_formula(name, monkeypatch):
    run(name, torch.float64, DRAWN, monkeypatch)


@pytest.mark.parametrize(("name", "dtype"), drawn(DRAW, DTYPES))
def test_a_body_is_its_formula_but_for_roundings(name, dtype, monkeypatch):
    run(name, dtype, DRAWN // 4, monkeypatch)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the switch itself
@pytest.mark.parametrize("seed", range(20))
def test_gelu_of_few_elements_is_torchs_own_loop(seed):
    """oneDNN takes longer to start. Its bits differ, which shows whose they are. Results are contiguous in both cases."""
    draw, generator = draws.Random(seed), torch.Generator().manual_seed(seed)
    shape = [draw.randint(2, 6) for _ in range(draw.randint(1, 3))] + [draw.randint(8, 60)]
    x, dy = torch.randn(2, *shape, generator=generator) * 3
    with torch.backends.mkldnn.flags(enabled=False):
        y, dx = torch.nn.functional.gelu(x), torch.ops.aten.gelu_backward(dy, x)
    got = activation.activation_fwd(x, "gelu"), activation.activation_bwd(dy, x, "gelu")
    assert torch.equal(got[0], y) and torch.equal(got[1], dx) and got[0].is_contiguous() and got[1].is_contiguous()
