"""Attention by cuDNN, with stand-ins for its kernels that see no more of a call than cuDNN does, and for torch's chooser."""

import threading
from types import SimpleNamespace

import pytest
import torch
from attention_calls import drawn, made, on_cuda
from committed import COMMITTED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rows import device_of, rows_of
from funcops.library.kernels import attention, attention_ways, cudnn_attention
from funcops.library.kernels.attention import attention_bwd, attention_fwd, cuda_bwd, cuda_fwd, merge
from funcops.testing.laws import LAYOUTS
from funcops.testing.tolerances import assert_close

aten = torch.ops.aten
FORWARD, BACKWARD = aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default
NEWER = 91501


def by_heads(t):
    """[B, T, H, D] of which a head's rows lie together."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


ODD = by_heads, *LAYOUTS.values()


def as_laid(t):
    """Strides of the dims that have more than one place: others are never used."""
    return [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]


class Plans(TorchDispatchMode):
    """Notes what is wrong with a call of cuDNN: a plan is found by q, k and v, and reads the others as torch's forward lays out."""

    def __init__(self):
        super().__init__()
        self.seen, self.wrong = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is FORWARD:
            self.seen.append("forward")
            bias, logsumexp, dropout, _, debug = (*args[3:], *(0.0, False, False)[len(args) - 5 :])  # the rest are defaults
            self.wrong += ["options"] * ((bias, logsumexp, dropout, debug) != (None, True, 0.0, False))
        if func is BACKWARD:
            self.seen.append("backward")
            dy, q, k, v, y, lse, seed, offset, bias, ends, other, rows, keys, dropout, _ = args
            self.wrong += ["options"] * ((bias, ends, other, dropout) != (None, None, None, 0.0))
            self.wrong += ["lengths"] * ((rows, keys) != (q.shape[2], k.shape[2]))
            laid = as_laid(FORWARD(q, k, v, None, True)[0])
            self.wrong += ["layout"] * (as_laid(y) != laid or as_laid(dy) != laid)
            right = lse.is_contiguous() and lse.dtype is torch.float32 and tuple(lse.shape) == (*q.shape[:3], 1)
            self.wrong += [f"logsumexp {lse.shape} {lse.stride()}"] * (not right)
            self.wrong += ["state"] * ({(t.dtype, t.dim(), t.device) for t in (seed, offset)} != {(torch.int64, 0, q.device)})
        return func(*args, **(kwargs or {}))


def taken(q, k, v, causal):
    """Wherever cuDNN's results are ours."""
    return cudnn_attention._takes(q, k, causal)


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: NEWER)


def test_calls_have_what_a_plan_takes_them_to_have(newer, monkeypatch):
    monkeypatch.setattr(attention, "cudnn_serves", taken)
    seen = []
    for i, (b, t, heads, kv_heads, size, layout, causal) in enumerate(drawn(3, 40)):
        like, size = made(torch.zeros, torch.bfloat16, b, t, heads, kv_heads, min(size, 256), layout), min(size, 256)
        odd = ODD[i % len(ODD)](torch.zeros(b, t, heads, size, dtype=torch.bfloat16))
        with FakeTensorMode(), Plans() as plans:
            q, k, v, dy = (on_cuda(x) for x in (*like, odd))
            y, lse = cuda_fwd(q, k, v, causal, 0.5)
            grads = cuda_bwd(dy, q, k, v, y, lse, causal, 0.5)
        assert not plans.wrong, (size, layout, plans.wrong)
        assert y.shape == q.shape and lse.shape == (b, heads, t) and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        seen += plans.seen
    assert seen.count("forward") == seen.count("backward") >= 8


class Cudnn:
    """cuDNN as torch calls it, by the CPU's kernel: a plan is kept for the strides of q, k and v, and reads out, its gradient and
    logsumexp by the strides that they had when it was made; a causal mask begins at the first key."""

    def __init__(self):
        self.laid, self.calls = {}, []
        self._scaled_dot_product_cudnn_attention = SimpleNamespace(default=self.forward)
        self._scaled_dot_product_cudnn_attention_backward = SimpleNamespace(default=self.backward)

    def forward(self, q, k, v, bias, logsumexp, dropout, causal, debug, *, scale):
        self.calls.append("forward")
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        laid = torch.empty_like(q)  # torch's `alloc_with_matching_layout`
        self.laid.setdefault(self.key(q, k, v), laid.stride())
        return laid.copy_(out), lse.unsqueeze(-1), *[None] * 7

    def backward(self, dy, q, k, v, y, lse, *rest, scale):
        self.calls.append("backward")
        strides = self.laid.setdefault(self.key(q, k, v), torch.empty_like(q).stride())
        dy, y = (t.as_strided(t.shape, strides) for t in (dy, y))
        b, heads, rows = q.shape[:3]
        lse = lse.as_strided((b, heads, rows), (heads * rows, rows, 1))
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, rest[-1], scale=scale)

    def key(self, *qkv):
        return tuple((t.shape, t.stride()) for t in qkv)


@pytest.fixture
def cudnn(newer, monkeypatch):
    """cuDNN, taken wherever its results are ours; flash attention is the CPU's kernel, which has no causal mask for fewer rows."""
    one = Cudnn()
    monkeypatch.setattr(attention_ways, "_aten", one)
    monkeypatch.setattr(attention, "cudnn_serves", taken)

    def forward(q, k, v, causal, scale):
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(dy, q, k, v, y, lse, causal, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, causal, scale=scale)

    monkeypatch.setitem(attention.WAYS, "flash", attention_ways.Pair(forward, backward))
    return one


def test_numbers_do_not_depend_on_the_layout_of_heads_or_of_gradients(cudnn):
    """Also of a v whose heads are shorter, which are padded."""
    torch.manual_seed(0)
    for i, (b, t, heads, kv_heads, size, layout, causal) in enumerate(drawn(4, 25)):
        size, value = min(size, 256), max(1, size // 3) if i % 3 == 0 else min(size, 256)
        q, k, _ = made(torch.randn, torch.bfloat16, b, t, heads, kv_heads, size, layout)
        v = made(torch.randn, torch.bfloat16, b, t, heads, kv_heads, value, layout)[2]
        y, lse = cuda_fwd(q, k, v, causal, size**-0.5)
        dy = ODD[i % len(ODD)](torch.randn(y.shape).bfloat16())
        got = y, cuda_bwd(dy, q, k, v, y, lse, causal, size**-0.5)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        want = formula(*exact, causal, size**-0.5)[0]
        assert_close(got, (want.detach(), torch.autograd.grad(want, exact, dy.double())), dtype=torch.bfloat16, length=t)
    assert cudnn.calls.count("forward") == cudnn.calls.count("backward") >= 8


def formula(q, k, v, causal, scale):
    """y and logsumexp, with all scores."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    hidden = torch.ones(scores.shape[2:]).tril() == 0
    scores = scores.masked_fill(hidden & causal, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("length", [64, pytest.param(192, marks=pytest.mark.slow), pytest.param(704, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_very_small_sum_have_their_gradients(length, causal, cudnn):
    """Rows whose logsumexp is below -88.7, where the exponential is zero in float32: cuDNN has gone wrong there under a mask, which
    it never gets from here."""
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, length, h, 64).bfloat16() for h in (4, 2, 2, 4))
    q[:, ::3], k = 4.0, -4.0 + 0.1 * k
    y, lse = cuda_fwd(q, k, v, causal, 0.125)
    assert (lse < -88.7).any() and (lse > -88.7).any()
    got = y, *cuda_bwd(dy, q, k, v, y, lse, causal, 0.125)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = formula(*exact, causal, 0.125)[0]
    assert_close(got, (want.detach(), *torch.autograd.grad(want, exact, dy.double())), dtype=torch.bfloat16, length=length)
    assert cudnn.calls == ["forward", "backward"]


@pytest.mark.parametrize("first", ["flash", "cudnn"])
def test_the_backward_of_one_takes_what_the_forward_of_the_other_kept(first, cudnn, monkeypatch):
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(2, 40, h, 32).bfloat16() for h in (4, 2, 2, 4))
    want, lse = attention_fwd(q, k, v, True, 0.2)
    monkeypatch.setattr(attention, "cudnn_serves", lambda *_: first == "cudnn")
    y, found = cuda_fwd(q, k, v, True, 0.2)
    monkeypatch.setattr(attention, "cudnn_serves", lambda *_: first != "cudnn")
    got = y, found, cuda_bwd(dy, q, k, v, y, found, True, 0.2)
    assert_close(got, (want, lse, attention_bwd(dy, q, k, v, want, lse, True, 0.2)), dtype=torch.bfloat16)
    assert cudnn.calls == ["forward" if first == "cudnn" else "backward"]


@pytest.mark.parametrize("layout", ["contiguous", "packed", "by heads"])
def test_parts_of_the_keys_are_merged(layout, cudnn):
    """Ranks of a context give rows from one on, and to each part the out and the logsumexp of all keys, or pieces of both."""
    torch.manual_seed(0)
    q, k, v = made(torch.randn, torch.bfloat16, 2, 24, 4, 2, 32, layout)
    q = by_heads(q) if layout == "by heads" else q
    dy, half = torch.randn(2, 24, 4, 32).bfloat16(), slice(12, None)
    out, lse = cuda_fwd(q, k, v, True, 0.2)
    total = out.float(), lse.contiguous()
    more = [torch.randn(2, 24, 2, 32).bfloat16() for _ in range(2)]  # keys that only the second half of the rows sees
    merge(total, *cuda_fwd(q[:, half], *more, False, 0.2), 12)
    y, lse = total[0].bfloat16(), total[1]
    own = cuda_bwd(dy, q, k, v, y, lse, True, 0.2)
    other = cuda_bwd(dy[:, half], q[:, half], *more, y[:, half], lse[..., half].contiguous(), False, 0.2)
    exact = [t.double().requires_grad_() for t in (q, k, v, *more)]
    parts = [formula(*exact[:3], True, 0.2), formula(exact[0][:, half], *exact[3:], False, 0.2)]
    weight = torch.nn.functional.pad(torch.sigmoid(parts[1][1] - parts[0][1][..., half]), (12, 0)).mT.unsqueeze(-1)
    want = parts[0][0] * (1 - weight) + torch.nn.functional.pad(parts[1][0], (0, 0, 0, 0, 12, 0)) * weight
    dq = own[0].float()
    dq[:, half] += other[0]
    wanted = want.detach(), *torch.autograd.grad(want, exact, dy.double())
    assert_close((y, dq.bfloat16(), *own[1:], *other[1:]), wanted, dtype=torch.bfloat16, length=48)
    assert cudnn.calls == ([] if layout == "by heads" else ["forward", "forward", "backward", "backward"])


class Chooser:
    """torch's chooser on a device that prefers cuDNN, as a stand-in: it counts its questions."""

    def __init__(self, monkeypatch, answer=True):
        self.answer, self.asked = answer, []
        monkeypatch.setattr(cudnn_attention, "_here", cudnn_attention._Here())
        monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", self.can)
        monkeypatch.setattr(torch, "_fused_sdp_choice", self.choice)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: NEWER)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def can(self, given):
        *qkv, bias, dropout, causal, grouped = given
        assert bias is None and dropout == 0.0 and grouped and torch.is_grad_enabled() and all(t.requires_grad for t in qkv)
        self.asked.append((qkv, causal))
        deterministic = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        return self.answer and torch.backends.cuda.cudnn_sdp_enabled() and not deterministic

    def choice(self, q, k, v, *, is_causal, enable_gqa):
        assert q.requires_grad and enable_gqa and (is_causal is self.asked[-1][1])
        return SDPBackend.CUDNN_ATTENTION.value if self.answer is True else self.answer.value


@pytest.fixture
def chooser(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "CONFIRMED", ((9, 0),))
    return Chooser(monkeypatch)


def heads(t=256, s=None, size=64, dtype=torch.bfloat16, heads=4):
    return [torch.zeros(2, n, h, size, dtype=dtype).transpose(1, 2) for n, h in ((t, heads), (s or t, 2), (s or t, 2))]


def serves(qkv, causal=True):
    return cudnn_attention.cudnn_serves(*qkv, causal)


def test_it_is_off_until_a_device_has_measured_it_or_flash_is_forbidden(monkeypatch):
    """The user's own switch is torch's: `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` forbids flash attention."""
    chooser = Chooser(monkeypatch)
    assert cudnn_attention.CONFIRMED == () and not serves(heads()) and not chooser.asked
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert serves(heads()) and len(chooser.asked) == 1
    with sdpa_kernel(SDPBackend.MATH):
        assert not serves(heads())
    assert not serves(heads()), "the switches are read at each call"
    monkeypatch.setattr(cudnn_attention, "CONFIRMED", ((10, 0),))
    assert not serves(heads()) and len(chooser.asked) == 2


DEVICES = {"NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0), "NVIDIA B200": (10, 0), "NVIDIA A100-SXM4-80GB": (8, 0)}


def test_what_is_confirmed_has_committed_rows():
    """The files of a device of that capability have both passes by cuDNN."""
    found = {}
    for file in COMMITTED.rglob("kernels.json"):
        ran = {
            row["kernel"] for row in rows_of(file) if row["provider"] == "funcops_cudnn" and not row["note"].startswith("failed")
        }
        found.setdefault(DEVICES[device_of(file)], set()).update(ran)
    both = {"attention_fwd", "attention_bwd"}
    assert set(cudnn_attention.CONFIRMED) == {capability for capability, ran in found.items() if both <= ran}


def test_the_chooser_is_asked_once_for_a_layout_and_its_switches(chooser):
    with torch.inference_mode():
        assert serves(heads()) and not torch.is_grad_enabled()
    assert all(serves(heads()) for _ in range(3)) and len(chooser.asked) == 1
    [(given, _)] = chooser.asked
    assert [(t.shape, t.stride()) for t in given] == [(t.shape, t.stride()) for t in heads()]
    others = [heads(128), heads(256, 512), heads(size=32), heads(dtype=torch.float16), heads(heads=2)]
    others += [[t[:, :, ::2] for t in heads(512)]]
    assert all(serves(one, causal=False) for one in others) and len(chooser.asked) == 7
    assert serves(heads(), causal=False) and len(chooser.asked) == 8
    assert all(serves(one, causal=False) for one in others) and len(chooser.asked) == 8


def test_the_switches_of_torch_hold(chooser):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not serves(heads())
    assert serves(heads())
    torch.use_deterministic_algorithms(True)
    try:
        assert not serves(heads())
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert serves(heads())
    finally:
        torch.use_deterministic_algorithms(False)
    chooser.answer, asked = SDPBackend.FLASH_ATTENTION, len(chooser.asked)
    assert serves(heads()) and len(chooser.asked) == asked
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert not serves(heads()) and len(chooser.asked) == asked + 1


def test_flash_is_kept_where_lengths_change(chooser):
    """After 64 layouts, in each thread, as each has plans of its own."""
    assert [serves(heads(t)) for t in range(1, 101)] == [True] * 64 + [False] * 36
    assert len(chooser.asked) == 64 and serves(heads(64)) and not serves(heads(65))
    found = []
    thread = threading.Thread(target=lambda: found.append(serves(heads(100))))
    thread.start()
    thread.join()
    assert found == [True]
    here = cudnn_attention._here
    chooser.answer = False
    here.planned.clear()
    for t in range(1, cudnn_attention.KNOWN + 2):
        here.answers[t] = False
    assert not serves(heads(5, 7)) and len(here.answers) == 1 and not here.planned, "what it refuses takes no place"


def test_a_capture_takes_the_plans_that_there_are(chooser, monkeypatch):
    assert serves(heads(128))
    monkeypatch.setattr(cudnn_attention, "capturing", lambda: True)
    assert serves(heads(128)) and not serves(heads(256))
    monkeypatch.setattr(cudnn_attention, "capturing", lambda: False)
    assert serves(heads(256))


def test_a_tracer_takes_flash_attention(chooser):
    with FakeTensorMode():
        assert not serves([torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)])
    assert not chooser.asked


def test_it_takes_no_causal_mask_that_begins_at_the_first_key(chooser):
    assert not serves(heads(64, 128)) and serves(heads(64, 128), causal=False) and len(chooser.asked) == 1


@pytest.mark.parametrize(("version", "odd"), [(None, False), (91400, False), (91500, False), (91501, True), (92000, True)])
def test_an_older_cudnn_takes_whole_parts_of_128_rows_and_keys(version, odd, chooser, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert serves(heads(128)) and serves(heads(256, 384), causal=False)
    assert serves(heads(192)) is serves(heads(256, 64), causal=False) is serves(heads(1, 128), causal=False) is odd


def test_it_takes_queries_that_lie_as_their_results_will(chooser):
    """torch's plans lay out the results as q: rows of one head after another are left to flash attention."""
    apart = [torch.zeros(2, h, 128, 64, dtype=torch.bfloat16) for h in (4, 2, 2)]
    assert not serves(apart) and not chooser.asked
    packed = torch.zeros(2, 128, 8 * 64, dtype=torch.bfloat16).split([256, 128, 128], -1)
    assert serves([t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in packed])
    assert serves([t[:, :1] for t in apart]), "of one head"


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_what_torch_puts_in_the_place_of_flash_attention_takes_our_arguments(name, monkeypatch):
    """`activate_flash_attention_impl`: torch's own functions, with stand-ins for the kernels that they call."""
    module = pytest.importorskip(f"torch.nn.attention._{name.lower()}")
    seen = []

    def forward(q, *_, **__):
        seen.append("forward")
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        out = torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)
        return out if name == "FA4" else (*out, None, None)

    def backward(*given, **_):
        seen.append("backward")
        return tuple(torch.empty_like(t) for t in (given[:3] if name == "FA4" else given[1:4]))

    if name == "FA4":
        monkeypatch.setattr(module, "_FA4_MODULE_PATH", "stands in")
        kernels = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
        monkeypatch.setattr(module, "_fa4_import_module", lambda path: kernels)
        dense = module._fa4_flash_attention_forward_impl
        plain = module._fa4_scaled_dot_product_flash_attention_forward_impl
    else:
        monkeypatch.setattr(module, "_FA3_CUDA_FWD", forward)
        monkeypatch.setattr(module, "_FA3_CUDA_BWD", backward)
        dense = module._fa3_flash_attention_forward_impl_default
        plain = module._fa3_scaled_dot_product_flash_attention_forward_impl_default
    prefix = f"_{name.lower()}"
    of = {
        "_flash_attention_forward": dense,
        "_flash_attention_backward": getattr(module, f"{prefix}_flash_attention_backward_impl"),
        "_scaled_dot_product_flash_attention": plain,
        "_scaled_dot_product_flash_attention_backward": getattr(
            module, f"{prefix}_scaled_dot_product_flash_attention_backward_impl"
        ),
    }
    theirs = SimpleNamespace(**{key: SimpleNamespace(default=f) for key, f in of.items()})
    monkeypatch.setattr(attention_ways, "_aten", theirs)
    monkeypatch.setattr(attention, "_aten", theirs)
    monkeypatch.setattr(module, "_get_device_major", lambda device: 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 64, h, 64, dtype=torch.bfloat16, device="cuda") for h in (4, 2, 2))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        y, lse = cuda_fwd(q, k, v, True, 0.5)
        assert y.shape == q.shape and lse.shape == (1, 4, 64)
        assert [g.shape for g in cuda_bwd(y, q, k, v, y, lse, True, 0.5)] == [q.shape, k.shape, v.shape]
        for cu_seqlens, window in ((None, 8), (ends, 0), (ends, 8)):
            y, lse = attention.flash_fwd(q, k, v, cu_seqlens, True, window, 0.5)
            grads = attention.flash_bwd(y, q, k, v, cu_seqlens, y, lse, True, window, 0.5)
            assert y.shape == q.shape and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert seen == ["forward", "backward"] * 4
