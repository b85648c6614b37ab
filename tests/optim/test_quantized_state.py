"""The state of optimisers in 8 bits: codes against the published formula, updates against decode, update, encode as a whole."""

import copy
import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
import torch

from funcops import checkpoint, trees
from funcops.graphs import graphed
from funcops.optim import (
    AdamWConfig,
    BlockTensor,
    MuonConfig,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_factor,
    code_book,
    dequantize_state,
    global_norm,
    muon_init,
    muon_update,
    quantize_state,
    sgd_init,
    sgd_update,
    with_quantized_state,
)
from funcops.optim import quantized_state as module

OPTIMISERS = {
    "adamw": (adamw_init, adamw_update, AdamWConfig(lr=0.01)),
    "sgd": (sgd_init, sgd_update, SGDConfig(momentum=0.9)),
    "sgd, nesterov": (sgd_init, sgd_update, SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "muon": (muon_init, muon_update, MuonConfig(lr=0.01)),
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def published(signed):
    """Dynamic tree quantisation in exact numbers: exponents of ten from -6 to 0, each with twice as many fractions as the last."""
    found = {Fraction(0), Fraction(1)}
    for i in range(7):
        parts = 2**i if signed else 2 ** (i + 1)
        width = Fraction(9, 10) / parts
        for k in range(parts):
            value = Fraction(10) ** (i - 6) * (Fraction(1, 10) + width * k + width / 2)
            found |= {value, -value} if signed else {value}
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_book_is_the_published_one(signed):
    book = code_book(signed)
    want = torch.tensor([float(value) for value in published(signed)], dtype=torch.float64)
    assert book.shape == (256,) and book.dtype is torch.float32 and len(want) == 256
    torch.testing.assert_close(book.double(), want, rtol=1e-6, atol=0)
    assert bool((book.diff() > 0).all()) and 0.0 in book and book[-1] == 1


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (5000,), (3, 17, 111), (4097,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_codes_are_the_nearest_and_decode_to_themselves(signed, shape, dtype):
    t = normal(*shape, dtype=dtype)
    t = t if signed else t.square()
    t.view(-1)[256:512] = 0
    made = module._quantized(t, signed)
    assert made.codes.dtype is torch.uint8 and made.shape == t.shape and made.absmax.shape == (-(-t.numel() // 256),)
    blocks = torch.nn.functional.pad(t.to(made.absmax.dtype).view(-1), (0, -t.numel() % 256)).view(-1, 256)
    assert made.absmax.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.equal(made.absmax, blocks.abs().amax(1))
    book, scaled = code_book(signed), blocks / made.absmax.clamp(min=1e-38)[:, None]
    best = (scaled[..., None].double() - book.double()).abs().amin(-1).view(-1)[: t.numel()]
    got = (scaled.view(-1)[: t.numel()].double() - book.double()[made.codes.view(-1).int()]).abs()
    torch.testing.assert_close(got, best, rtol=1e-4, atol=1e-9)
    back = made.dequantize()
    assert back.dtype is dtype and not back.view(-1)[256:512].any()
    again = module._quantized(back, signed)
    if not signed:  # with a sign the largest code is 1, the smallest -0.993
        assert torch.equal(again.codes, made.codes), "a value that was rounded is rounded to itself"
    largest = 1.001 * max(book.diff().max() / 2, 1 + book[0] if signed else 0) + 2**-8 * (dtype is torch.bfloat16)
    assert (back.float() - t.float()).abs().max() <= largest * made.absmax.max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_becomes_nan(bad, dtype):
    for signed, size in itertools.product((True, False), (1, 256)):
        t = normal(4, 256).to(dtype)
        t[1, :size] = bad
        back = module._quantized(t, signed).dequantize()
        assert back[1].isnan().all() and back[[0, 2, 3]].isfinite().all()


def test_what_is_in_8_bits_and_what_it_takes():
    params = {"w": normal(256, 64), "b": normal(64), "frozen": None}
    state = adamw_init(params, AdamWConfig())
    small = quantize_state(state)
    assert type(small.exp_avg["w"]) is type(small.exp_avg_sq["w"]) is BlockTensor and small.exp_avg["frozen"] is None
    assert small.exp_avg["w"].signed and not small.exp_avg_sq["w"].signed
    assert isinstance(small.exp_avg["b"], torch.Tensor) and torch.equal(small.step, state.step)
    assert trees.nbytes(small.exp_avg["w"]) == 256 * 64 + 64 * 4, "1.016 bytes for 4"
    assert type(quantize_state(state, min_size=1).exp_avg["b"]) is BlockTensor
    again = dequantize_state(small)
    assert trees.structure(again) == trees.structure(state)
    many = adamw_init([normal(1, seed=i) for i in range(5000)], AdamWConfig())
    assert quantize_state(many).step.shape == (5000,), "counts of steps stay"


def trees_of(seed):
    shapes = {"a": (80, 64), "b": (7, 5), "c": (64, 70), "frozen": None, "d": (64, 64)}
    return {name: None if shape is None else normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def equal(a, b):
    left, right = trees.tensors(a), trees.tensors(b)
    return len(left) == len(right) and all(torch.equal(s, t) for s, t in zip(left, right, strict=True))


@pytest.mark.parametrize("chunk", [1, 5000, 1 << 24])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_update_is_decode_update_encode(name, in_place, chunk, monkeypatch):
    """The bits of doing so for the whole state at once, however leaves are grouped, with frozen leaves and absent gradients."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    init, update, cfg = OPTIMISERS[name]
    quantized = with_quantized_state(update)
    params, decay = trees_of(0), {"a": True, "b": False, "c": True, "frozen": True, "d": False}
    state = quantize_state(init(params, cfg))
    want_params, want = trees.tree_map(lambda t: t if t is None else t.clone(), params), dequantize_state(state)
    for i in range(3):
        grads = trees_of(10 * i + 1) | ({"c": None} if i == 1 else {})
        before = copy.deepcopy((params, state))
        new_params, new = quantized(params, grads, state, cfg, decay=decay, lr=0.02, in_place=in_place)
        if in_place:
            assert new_params is params and new is state
        else:
            assert equal((params, state), before), "the arguments do not change"
        skipped = {name: own["c"] for name, own in module._fields("", want).items()}
        want_params, want = update(want_params, grads, want, cfg, decay=decay, lr=0.02)
        want = dequantize_state(quantize_state(want))
        for name, own in skipped.items() if i == 1 else ():
            getattr(want, name)["c"] = own
        params, state = new_params, new
        assert equal(params, want_params) and equal(dequantize_state(state), want)
    assert type(next(iter(module._fields("", state).values()))["a"]) is BlockTensor


ORDERS = {  # trees in another order than their sorted paths
    "list": lambda t: [t() for _ in range(12)],
    "keys of numbers": lambda t: {i: t() for i in range(12)},
    "nested": lambda t: {"layers": tuple({"w": t(), "b": t()} for _ in range(11)), "layers-2": t(), "layers ": [t()]},
    "frozen": lambda t: [None if i in (1, 3, 10) else t() for i in range(12)],
}


@pytest.mark.parametrize("chunk", [1, 64, 1 << 24])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_counts_of_steps_are_in_the_order_of_the_tree(order, in_place, chunk, monkeypatch):
    """Leaves that lacked a gradient have counts of their own, before the state is quantised and after: the numbers equal the
    update's without 8 bits."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(0)
    make = lambda: ORDERS[order](lambda: torch.randn(7, generator=draw))  # noqa: E731
    cfg, params = AdamWConfig(lr=0.1), make()
    state = adamw_init(params, cfg)
    gradients = lambda: trees.tree_map_tensors(lambda g: g if torch.rand((), generator=draw) < 0.6 else None, make())  # noqa: E731
    for _ in range(3):
        params, state = adamw_update(params, gradients(), state, cfg)
    found = trees.tree_map_tensors(torch.clone, params), quantize_state(state)
    for _ in range(3):
        grads = gradients()
        params, state = adamw_update(params, grads, state, cfg)
        found = with_quantized_state(adamw_update)(found[0], grads, found[1], cfg, in_place=in_place)
    assert len(set(state.step.tolist())) > 2 and equal(found, (params, state))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_leaf_without_a_gradient_keeps_its_codes(name, in_place):
    """Rounding them again would change them, where the largest of a block is negative."""
    init, update, cfg = OPTIMISERS[name]
    quantized, params = with_quantized_state(update), trees_of(0)
    params, state = quantized(params, trees_of(1), quantize_state(init(params, cfg)), cfg)
    before = copy.deepcopy(state)
    _, after = quantized(params, trees_of(2) | {"c": None, "b": None}, state, cfg, in_place=in_place)
    for field, own in module._fields("", after).items():
        assert equal(own["c"], getattr(before, field)["c"]) and equal(own["b"], getattr(before, field)["b"])
        assert not equal(own["a"], getattr(before, field)["a"])


def test_factor_and_into_reach_the_update():
    cfg, params, grads = AdamWConfig(), trees_of(0), trees_of(1)
    state, into = quantize_state(adamw_init(params, cfg)), trees.cast(trees_of(2), torch.bfloat16)
    factor = clip_factor(global_norm(grads), 0.1)
    got, after = with_quantized_state(adamw_update)(params, grads, state, cfg, factor=factor, into=into)
    want, wide = adamw_update(params, grads, dequantize_state(state), cfg, factor=factor)
    assert equal(got, want) and equal(into, trees.cast(want, torch.bfloat16)) and equal(after, quantize_state(wide))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_reaches_what_32_bits_reach(name):
    """A regression: after 60 steps the losses differ by less than a hundredth of what was gained."""
    init, update, cfg = OPTIMISERS[name]
    x, target = normal(256, 64), normal(64, 80, seed=5)
    first, losses = float((x @ target).square().mean()), []
    for bits in (32, 8):
        params = {"w": torch.zeros(64, 80)}
        state = init(params, cfg)
        step, state = (update, state) if bits == 32 else (with_quantized_state(update), quantize_state(state))
        for _ in range(60):
            error = x @ params["w"] - x @ target
            params, state = step(params, {"w": x.T @ error / len(x)}, state, dataclasses.replace(cfg, lr=0.1))
        losses.append(float((x @ params["w"] - x @ target).square().mean()))
    gained = first - losses[0]
    assert gained > first / 2 and abs(losses[1] - losses[0]) < gained / 100


def wrong(change):
    cfg, params, grads = AdamWConfig(), trees_of(0), trees_of(1)
    state = quantize_state(adamw_init(params, cfg))
    given = {"params": params, "grads": grads, "state": state, "cfg": cfg, "in_place": True} | change(params, grads, state)
    before = copy.deepcopy((params, state))
    try:
        with_quantized_state(adamw_update)(**given)
    finally:
        assert equal((params, state), before), "nothing was changed"


@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize(
    "change, match",
    [
        (lambda p, g, s: {"grads": g | {"d": normal(3)}}, r"adamw_update: grads.d must be"),
        (lambda p, g, s: {"grads": {"a": g["a"]}}, r"adamw_update: grads must be a tree like params"),
        (lambda p, g, s: {"state": dataclasses.replace(s, exp_avg=s.exp_avg | {"d": normal(2)})}, r"state.exp_avg.d must be"),
        (lambda p, g, s: {"state": dataclasses.replace(s, step=torch.zeros(2))}, r"adamw_update: state.step must be"),
        (lambda p, g, s: {"state": None}, r"adamw_update: state must be the state of an optimiser"),
        (lambda p, g, s: {"decay": {"a": True}}, r"adamw_update: decay must be a tree like params"),
        (lambda p, g, s: {"decay": dict.fromkeys(p, 1)}, r"adamw_update: decay.a must be a bool"),
        (lambda p, g, s: {"into": trees.cast(p, torch.bfloat16) | {"d": p["d"].int()}}, r"adamw_update: into.d must be"),
        (lambda p, g, s: {"lr": "fast"}, r"adamw_update: lr must be"),
        (lambda p, g, s: {"cfg": None}, r"adamw_update: cfg must be"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_changes(change, match, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    with pytest.raises((TypeError, ValueError), match=match):
        wrong(change)


@pytest.mark.parametrize("call", [lambda: quantize_state({"w": normal(64, 64)}), lambda: dequantize_state(None)])
def test_only_a_state_is_taken(call):
    with pytest.raises(TypeError, match="quantize_state: state must be the state of an optimiser"):
        call()


@pytest.mark.slow
def test_it_is_saved_copied_captured_and_compiled(tmp_path):
    cfg, params, grads = AdamWConfig(), {"w": normal(64, 64)}, {"w": normal(64, 64, seed=1)}
    update = with_quantized_state(adamw_update)
    params, state = update(params, grads, quantize_state(adamw_init(params, cfg)), cfg)
    checkpoint.save(state, tmp_path / "state.safetensors")
    loaded = checkpoint.load(tmp_path / "state.safetensors", like=state)
    assert equal(loaded, state) and type(loaded.exp_avg["w"]) is BlockTensor and loaded.exp_avg["w"].dtype is torch.float32
    assert equal(copy.deepcopy(state), state)
    want = update(params, grads, state, cfg)
    captured = graphed(lambda p, g, s: update(p, g, s, cfg), params, grads, state)
    assert equal(captured(params, grads, state), want)
    compiled = torch.compile(lambda p, g, s: update(p, g, s, cfg), backend="aot_eager", fullgraph=True)
    got = compiled(params, grads, state)
    for a, b in zip(trees.tensors(got[0]), trees.tensors(want[0]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_every_magnitude_keep_their_digits(dtype, signed):
    """From the smallest subnormal number to the largest of the dtype: an element is off by half of the widest distance in the book
    at most, and by its dtype's own rounding; a block of zeros stays one."""
    info = torch.finfo(dtype)
    lowest, highest = math.log2(info.smallest_normal * info.eps), math.log2(info.max)
    book = code_book(signed).double()
    widest = max(float((book[1:] - book[:-1]).max()), 1 + float(book[0]) if signed else 0.0) / 2
    powers = torch.linspace(lowest, highest, 300, dtype=torch.float64)
    values = torch.rand(len(powers) + 1, module.BLOCK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if signed:
        values = values * 2 - 1
    values[:, :1] = 1.0
    values[:-1] *= 2.0 ** powers.clamp(max=highest - 1e-9)[:, None]
    values[-1] = 0.0
    x = values.clamp(-info.max, info.max).to(dtype)
    found = module._quantized(x, signed).dequantize()
    largest = x.double().abs().amax(1, keepdim=True)
    own = info.eps * x.double().abs() + 2 * info.smallest_normal * info.eps
    far = (found.double() - x.double()).abs() > widest * 1.01 * largest + own + 2e-7 * largest
    assert found.dtype is dtype and not far.any(), (far.sum(), x[far][:3], found[far][:3])
    assert torch.equal(found[-1], x[-1])
    again = module._restored(found, signed).dequantize()
    assert torch.equal(again[largest[:, 0] > 1e3 * info.smallest_normal], found[largest[:, 0] > 1e3 * info.smallest_normal])


@pytest.mark.parametrize("in_place", [False, True])
def test_an_update_sees_no_more_numbers_at_once_than_a_chunk_has(in_place, monkeypatch):
    """Or one leaf of more: its state is decoded, which takes four times the bytes."""
    monkeypatch.setattr(module, "CHUNK", 5000)
    seen = []

    def counted(params, *given, **options):
        seen.append([t.numel() for t in trees.tensors(params)])
        return adamw_update(params, *given, **options)

    params = [normal(n, seed=n) for n in (2000, 3000, 1, 4999, 9000, 100, 100)]
    cfg = AdamWConfig()
    with_quantized_state(counted)(params, params, quantize_state(adamw_init(params, cfg)), cfg, in_place=in_place)
    assert seen == [[2000, 3000], [1, 4999], [9000], [100, 100]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_block_without_signs_is_read_with_the_scale_of_its_largest(dtype):
    """Also where another scale would give the largest by the second code: the state is the one that `quantize_state` makes."""
    draw = torch.Generator().manual_seed(0)
    at = torch.randint(0, 255, (64, module.BLOCK), generator=draw)
    at[:, 0] = 254
    t = (code_book(False)[at] * (1 + torch.rand(64, 1, generator=draw)).to(dtype).float()).to(dtype)
    want = module._quantized(t, False)
    found = module.encoded_like({"w": t}, {"w": want}, "cpu")["w"]
    assert equal(found, want) and torch.equal(found.absmax, t.float().amax(1))


def test_a_cast_leaves_codes_alone_and_zeros_are_dense():
    small = quantize_state(adamw_init({"w": normal(64, 64)}, AdamWConfig()))
    codes = small.exp_avg["w"]
    assert trees.cast(small, torch.bfloat16).exp_avg["w"] is codes
    for asked, dtype in ((None, torch.float32), (torch.float64, torch.float64)):
        zeros = codes.zero_gradient(asked)
        assert torch.equal(zeros, torch.zeros(64, 64, dtype=dtype)) and zeros.dtype is dtype
