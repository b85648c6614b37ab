"""Results depend only on values: every kernel on arguments with any strides, against its torch body on contiguous ones."""

import dataclasses
import functools
import importlib
import itertools
import pkgutil
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import funcops.library.kernels
from benchmarks.kernel_calls import KernelCall, Maker, kernel_calls
from funcops.engine import random
from funcops.engine.backend import backend
from funcops.engine.trees import tensors, tree_map, tree_map_tensors
from funcops.library.kernels import (
    attention,
    bias_activation,
    bmm,
    embedding,
    entropy,
    gated_delta_rule,
    grouped_quantize,
    latent_split,
    linear,
    log_decay,
    norm,
    rope,
    route,
    routing,
)
from funcops.library.kernels.grouped import group_of
from funcops.testing.laws import LAYOUTS, expanded, poisoned_empties
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
EXPANSIONS = {"expanded_rows": functools.partial(expanded, dim=0), "expanded_columns": functools.partial(expanded, dim=-1)}
WAYS = LAYOUTS | EXPANSIONS
FEW_TENSORS = 4  # of an optimiser's tensors


class Single(Maker):
    """The first size is 1."""

    def sizes(self, first, *others):
        return (1, *super().sizes(*others))


class Narrow(Maker):
    """All sizes but the first are 1."""

    def sizes(self, first, *others):
        return (3, *[1] * len(others))


def library_calls(make):
    """Calls of kernels that are torch's own on every device, and of kernels that another call's launch covers."""
    tokens = 5
    yield KernelCall(linear.linear_bwd, "", (make.floats(2, tokens, 8), make.floats(2, tokens, 4), make.floats(8, 4), True))
    q, k, v, dy = (make.floats(2, tokens, heads, 8) for heads in (4, 2, 2, 4))
    for causal in (True, False):
        out, lse = attention.attention_fwd(q, k, v, causal, 0.3)
        yield KernelCall(attention.attention_fwd, "", (q, k, v, causal, 0.3))
        yield KernelCall(attention.attention_bwd, "", (dy, q, k, v, out, lse, causal, 0.3))
    ids = make.ids(3, tokens, below=16)
    yield KernelCall(embedding.embedding_fwd, "", (make.floats(16, 8), ids))
    yield KernelCall(routing.sort_by_expert, "", (ids.to(torch.int32), 16))
    own = make.floats(2, tokens, 3, 4)
    yield KernelCall(latent_split.join_heads, "", (make.floats(2, tokens, 1, 8), own))
    yield KernelCall(latent_split.join_values, "", (own, make.floats(2, tokens, 3, 8)))
    yield KernelCall(latent_split.sum_heads, "", (own,))
    yield from calls_of_linear_attention(make)
    logits, labels, options = make.floats(3, tokens), make.ids(3, below=tokens), (0.1, -100, 1e-4)
    lse, entropies = entropy.entropy_fwd(logits, labels, *options)[1:]
    yield KernelCall(entropy.entropy_fwd, "", (logits, labels, *options))
    for vocab, backward in ((tokens, entropy.entropy_bwd), (2 * tokens, entropy.entropy_bwd_owned)):
        rows = make.wide(3), make.wide(3), logits, labels, lse, entropies
        yield KernelCall(backward, "", (*rows, *options, vocab - tokens, vocab))
    chosen = torch.stack((ids, (ids + 1) % 16), -1).to(torch.int32)
    for score in ("softmax", "sigmoid"):
        yield KernelCall(route.weights_at, "", (make.floats(3, tokens, 16), chosen, score, score == "sigmoid", 2.5))
    a, b = make.floats(2, 3, 4), make.floats(2, 4, 5)
    y = make.floats(2, 3, 5)
    for transposed in (False, True):
        right = make.floats(2, 5, 4) if transposed else b
        yield KernelCall(bmm.bmm_fwd, "", (a, right, transposed))
        yield KernelCall(bmm.bmm_bwd_left, "", (y, right, transposed))
        yield KernelCall(bmm.bmm_bwd_right, "", (y, a, transposed))
    yield from calls_of_groups(make)
    yield KernelCall(rope.rope_table, "", (make.floats(3, tokens, 2, dtype=torch.float32), 1.5, True))


def calls_of_linear_attention(make):
    tokens, numbers = 5, make.floats(2, 5, 4)
    q, k, v = make.floats(2, tokens, 2, 8), 0.3 * make.floats(2, tokens, 2, 8), make.floats(2, tokens, 4, 6)
    g, state = -numbers.float().abs(), make.floats(2, 4, 8, 6, dtype=torch.float32)
    x = q, k, v, g, numbers.sigmoid()
    for first in (None, state):
        yield KernelCall(gated_delta_rule.gated_delta_rule_fwd, "", (*x, first, 0.3, 2))
        yield KernelCall(gated_delta_rule.gated_delta_rule_bwd, "", (*x, first, v, first, 0.3, 2))
    a, b = make.floats(4), make.floats(4)
    yield KernelCall(log_decay.log_decay_fwd, "", (numbers, a, b))
    yield KernelCall(log_decay.log_decay_bwd, "", (g, numbers, a, b, True, True, True))


def calls_of_groups(make):
    """Calls of quantisers of 3 groups, with 5, 0 and 16 of 23 rows, laid out in blocks of 16."""
    offsets, starts = torch.tensor([[0, 5, 5, 21], [0, 16, 16, 32]], dtype=torch.int32)
    rows, aligned = 23, grouped_quantize.aligned_count(23, 3, 16)
    yield KernelCall(grouped_quantize.aligned_starts, "", (offsets, 16))
    yield KernelCall(grouped_quantize.aligned_source, "", (offsets, starts, rows, aligned))
    x, group = make.floats(rows, 8), group_of(offsets, rows)
    yield KernelCall(grouped_quantize.taken, "", (x, grouped_quantize.aligned_source(offsets, starts, rows, aligned)))
    yield KernelCall(grouped_quantize.group_amax, "", (make.floats(aligned, 8), starts, None, 1, True))
    keys, across, down = torch.arange(6).view(3, 2) + 7, torch.ones(3, dtype=torch.int64), torch.full((3,), 8)
    yield KernelCall(grouped_quantize.random_words, "", (keys, group, offsets[:3].long(), across, down, 8))


def shape_class(call):
    """The call's kernel, shapes and other arguments: all that tells it from another call, except values."""
    return call.name, str(tree_map(lambda a: tuple(a.shape) if isinstance(a, Tensor) else a, call.args))


@functools.cache
def calls(maker, dtype):
    """The calls by kernel."""
    torch.manual_seed(0)
    make, found = maker("cpu", dtype, shrink=4096), {}
    for call in {shape_class(s): s for s in (*kernel_calls(make), *library_calls(make))}.values():
        few = tuple(a[:FEW_TENSORS] if isinstance(a, list) else a for a in call.args)
        call = dataclasses.replace(call, args=few)
        found.setdefault(call.name, []).append(call)
    return found


KERNELS = calls(Maker, torch.float32)


def laid_out(call, change):
    """The arguments, with `change(i, t)` for each tensor t that is only read. Labels, places, angles of a rotation and ends of
    sequences stay as they are: not any value is valid there."""
    kept, count = call.kernel.kernel.mutates, itertools.count()

    def one(t, name):
        way = change(next(count), t)
        return t if (t.dtype in (torch.int32, torch.int64) or name == "table") and way in EXPANSIONS.values() else way(t)

    return tuple(
        tree_map_tensors(torch.clone, a) if name in kept else tree_map_tensors(lambda t, name=name: one(t, name), a)
        for name, a in call.named.items()
    )


def contiguous(tree):
    return tree_map_tensors(lambda t: t.clone(memory_format=torch.contiguous_format), tree)


def check(call, change, dtype, implementation):
    """The right values whatever fresh memory holds, and no write except declared ones. Partial sums, whose number depends on the
    implementation, are compared by their sum."""
    kernel, dtype = call.kernel.kernel, call.dtype or dtype
    args = laid_out(call, change)
    wanted_args, before = contiguous(args), contiguous(args)
    want = kernel.torch_impl(*wanted_args)
    if call.kernel.__wrapped__.__module__.endswith(".quantize_after"):  # where y differs in its last bit, so may a code or scale
        with backend(implementation):
            want = call.kernel(*contiguous(args))
    with poisoned_empties(), backend(implementation):
        got = call.kernel(*args)
    # differences, of nothing where all keys or all experts are alike: beside dv, and beside the gradients of the weights
    differences = {"scaled_attention_bwd": (), "route_bwd": wanted_args[1:2]}
    if call.name in differences:
        beside = differences[call.name]
        assert_close((got, beside), (want, beside), dtype=dtype, what=call.name)
        got = want = ()
    for g, w in zip(tensors(got), tensors(want), strict=True):
        g, w = (g, w) if g.shape == w.shape else (g.sum(0), w.sum(0))
        assert_close(g, w, dtype=dtype, what=call.name)
    for name, a, w, b in zip(call.named, args, wanted_args, before, strict=True):
        assert_close(tensors(a), tensors(w if name in kernel.mutates else b), dtype=dtype, what=f"{name} of {call.name}")


def same(way):
    return lambda i, t: way


def mixed(turn):
    """Every tensor with other strides than the one before."""
    every = list(WAYS.values())
    return lambda i, t: every[(i * 3 + turn) % len(every)]


def test_every_kernel_has_calls():
    declared = set()
    families = [
        f"funcops.library.kernels.{module.name}"
        for module in pkgutil.iter_modules(funcops.library.kernels.__path__)
        if not module.ispkg
    ]
    for family in ("funcops.random", *families):
        found = vars(importlib.import_module(family)).values()
        declared |= {f.kernel.name for f in found if hasattr(f, "kernel") and hasattr(f, "triton")}
    assert declared == set(KERNELS)


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", KERNELS)
def test_torch_kernels(name):
    ways = [(maker, same(way)) for maker in (Single, Narrow) for way in WAYS.values()] + [(Maker, mixed(turn)) for turn in (0, 3)]
    for maker, way in ways:
        for call in calls(maker, torch.float32)[name]:
            check(call, way, torch.float32, "torch")


def with_triton(of):
    return [name for name, found in of.items() if found[0].kernel.kernel.find_triton()]


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", with_triton(KERNELS))
def test_triton_kernels(name):
    for turn, call in itertools.product((0, 1), calls(Narrow, torch.float32)[name][:3]):
        check(call, mixed(turn), torch.float32, "triton")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["clamped_swiglu_fwd", "clamped_swiglu_bwd"])
def test_numbers_of_rows_may_lie_anyhow(name, way):
    """The scales have one dimension, and the other arguments more."""
    (call,) = calls(Narrow, torch.float32)[name]
    check(call, lambda i, t: WAYS[way] if t.dim() == 1 else torch.clone, torch.float32, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(with_triton(KERNELS))), ids=with_triton(KERNELS))
def test_every_call_in_every_way(i):
    name, dtype = with_triton(KERNELS)[i], (torch.float32, torch.bfloat16)[i % 2]
    for maker in (Maker, Single, Narrow):
        for call in calls(maker, dtype)[name]:
            for turn in range(len(WAYS)):
                check(call, mixed(turn), dtype, "torch")
            for turn in (0, 3):
                check(call, mixed(turn), dtype, "triton")
            check(call, same(WAYS["column_major"]), dtype, "triton")


@pytest.mark.turns("name", every=6)
@pytest.mark.parametrize("name", [name for name in with_triton(KERNELS) if not KERNELS[name][0].kernel.kernel.mutates])
def test_a_compiler_is_told_the_strides_of_results(name):
    """It lays out what follows by the fake. Strides of dimensions of size 1 mean nothing."""
    for call, turn in itertools.product((calls(m, torch.float32)[name][0] for m in (Single, Narrow)), (0, 3)):
        args = laid_out(call, mixed(turn))
        with FakeTensorMode() as mode:
            faked = call.kernel.kernel.operator()(*tree_map_tensors(mode.from_tensor, args))
        for fake, real in zip(tensors(faked), tensors(call.kernel.kernel.triton_impl(*args)), strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert fake.is_contiguous() and real.is_contiguous(), call.shape


REQUESTS = ("dx", "dw", "db", "dscale", "dshift", "dscales", "bias")


def outlines(found):
    """The dtype and dimensions of each result, and None for one that is not there."""
    found = found if isinstance(found, tuple) else (found,)
    return [None if t is None else (t.dtype, t.dim(), t.shape[-1:]) for t in found]


def with_requests(of):
    return [name for name in with_triton(of) if set(of[name][0].named) & set(REQUESTS) and of[name][0].kernel.kernel.fake_impl]


@pytest.mark.parametrize("name", [name for name in with_requests(KERNELS) if not KERNELS[name][0].kernel.kernel.mutates])
def test_a_compiler_is_told_of_the_results_that_are_asked_for(name):
    """Each result of the torch body is there, and no other."""
    call = calls(Narrow, torch.float32)[name][0]
    asked = [key for key, value in call.named.items() if key in REQUESTS and isinstance(value, bool)]
    for chosen in itertools.product((True, False), repeat=len(asked)):
        args = (call.named | dict(zip(asked, chosen, strict=True))).values()
        kernel = call.kernel.kernel
        assert outlines(kernel.fake_impl(*args)) == outlines(kernel.torch_impl(*args)), chosen


PARTIAL_SUMS = {
    "dropout_bwd_sums": lambda dy, key: (bias_activation.dropout_bwd_sums, dy, key, 0.4),
    "bias_activation_bwd": lambda dy, key: (bias_activation.bias_activation_bwd, dy, dy, dy.new_ones(dy.shape[1]), "gelu", True),
    "activation_bwd_recompute": lambda dy, key: (bias_activation.activation_bwd_recompute, dy, dy.clone(), "gelu", True),
    "row_sums": lambda dy, key: (norm.row_sums, dy),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (7, 1030), (9, 1028), (300, 6)], ids=str)
@pytest.mark.parametrize("name", PARTIAL_SUMS)
def test_a_compiler_is_told_how_many_partial_sums_there_are(name, shape, dtype):
    """Their number depends on the rows, the width and, for some, whether 4 divides it."""
    call, *args = PARTIAL_SUMS[name](torch.ones(shape, dtype=dtype), random.key(0))
    assert call.kernel.find_triton()
    told, found = (tensors(way(*args)) for way in (call.kernel.fake_impl, call.kernel.triton_impl))
    assert [(t.shape, t.dtype) for t in told] == [(t.shape, t.dtype) for t in found]


WITH_DTYPE = ("grouped_scaled_mm", "grouped_scaled_wgrad", "coded_glu_fwd", "scaled_attention_fwd", "scaled_attention_bwd")


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_results_in_float64_are_left_to_torch(name):
    """No kernel in Triton has sums of that width."""
    call = calls(Narrow, torch.float32)[name][0]
    args = (call.named | {"out": torch.float64}).values()
    kernel = call.kernel.kernel
    found, wanted = (tensors(way(*args)) for way in (kernel.triton_impl, kernel.torch_impl))
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(t.dtype is torch.float64 for t in found)


def test_poisoned_memory_allows_operators_without_a_fixed_order():
    """Warnings are errors here, and on CUDA attention and cuBLAS warn in deterministic mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with poisoned_empties():
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
            assert torch.empty(3).isnan().all()
            for said in ("Flash Attention defaults to a non-deterministic algorithm.", "Deterministic behavior was enabled with"):
                warnings.warn(said, UserWarning, stacklevel=1)
            with pytest.raises(UserWarning, match="another"):
                warnings.warn("another", UserWarning, stacklevel=1)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("warns", [False, True])
def test_poisoned_memory_leaves_a_fixed_order_fixed(warns):
    """With warn_only, torch's attention on CUDA may add in any order."""
    try:
        torch.use_deterministic_algorithms(True, warn_only=warns)
        with poisoned_empties():
            assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    finally:
        torch.use_deterministic_algorithms(False)
