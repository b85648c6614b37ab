"""The steps of drawn modules: each a function of (self, h, args) that keeps the shape [rows, length, D], and what it holds."""

import functools
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

D, V = 6, 5
ACTIVATIONS = "relu gelu silu softplus tanh sigmoid elu leaky_relu hardswish mish softsign logsigmoid selu celu hardtanh".split()


class Args(NamedTuple):
    """Inputs that a step may read beside the hidden state."""

    ids: torch.Tensor  # int64[rows, length]
    mask: torch.Tensor  # bool[rows, length]
    other: torch.Tensor  # float64[rows, length, D]


class Step(nn.Module):
    """A step of a function of (self, h, args). `make(self)` puts parameters and buffers into it."""

    def __init__(self, forward, make):
        super().__init__()
        self._run = forward
        if make is not None:
            make(self)

    def forward(self, h, args):
        return self._run(self, h, args)


def linear(out=D, of=D, **more):
    return lambda m: setattr(m, "a", nn.Linear(of, out, **more))


def holds(**parts):
    """Parts made anew for each module."""

    def make(m):
        for name, part in parts.items():
            setattr(m, name, part())

    return make


def buffers(**values):
    def make(m):
        m.a = nn.Linear(D, D)
        for name, value in values.items():
            m.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    return make


def parameter(*shape):
    return lambda m: setattr(m, "w", nn.Parameter(torch.randn(shape) / 2))


# functions of autograd whose backward is not the forward's


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return ctx.scale * dy * ctx.saved_tensors[0], None


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y = x * w
        ctx.save_for_backward(y, w)
        return y, x.sin()

    @staticmethod
    def backward(ctx, dy, dz):
        y, w = ctx.saved_tensors
        return dy * w - dz * y if ctx.needs_input_grad[0] else None, (dy * y).sum((0, 1)) if ctx.needs_input_grad[1] else None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp(), x.detach().round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, dy, none):
        return 0.5 * dy * ctx.saved_tensors[0]


# views and writes


def written(m, h, args):
    h = m.a(h)
    h[:, 0] = 0.5
    h[..., :2] *= 2
    h[..., 2].add_(h[..., 3].detach())
    return h


def into_empty(m, h, args):
    y = torch.empty_like(h)
    y[..., ::2] = h[..., 1::2].sin()
    y[..., 1::2] = h[..., ::2]
    return y


def in_a_loop(m, h, args):
    y = torch.zeros_like(h)
    for i in range(h.shape[1]):
        y[:, i] = torch.tanh(m.a(h[:, i]) + (y[:, i - 1].clone() if i else 0))
    return y


def through_a_view(m, h, args):
    h = m.a(h)
    rows = h.view(-1, D)
    rows[:, 1:3].mul_(3)
    h.transpose(1, 2)[:, 0].sub_(1)
    return rows.view_as(h)


def filled(m, h, args):
    h = m.a(h)
    return h.masked_fill_(args.mask[..., None], 0.1).clamp_(-2, 2).relu_()


def index_put(m, h, args):
    y = h.new_zeros(h.shape[0], V, D)
    y.index_put_((torch.arange(h.shape[0])[:, None], args.ids), h, accumulate=True)
    return h + y.gather(1, args.ids[..., None].expand(-1, -1, D))


def scattered(m, h, args):
    y = torch.zeros(h.shape[0], V, D, dtype=h.dtype).scatter_add_(1, args.ids[..., None].expand_as(h), h)
    return torch.take_along_dim(y, args.ids[..., None], 1)


def copied(m, h, args):
    y = h.clone()
    y[:, :1].copy_(args.other[:, :1])
    y.unsqueeze(0)[0].mul_(0.5)
    return y


def out_of(m, h, args):
    y = torch.empty_like(h.detach())
    torch.sin(h.detach(), out=y)
    return h * y


def swapped(m, h, args):
    a, b = h.chunk(2, -1)
    return torch.cat([b, a.flip(1)], -1)


def windows(m, h, args):
    return F.pad(h, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)


def strided(m, h, args):
    h = h.contiguous()
    return h + h.as_strided(h.shape, h.stride(), h.storage_offset()).cos()


def expanded(m, h, args):
    return (h.mean(1, keepdim=True).expand_as(h) * args.other.expand(2, *h.shape)).sum(0)


# buffers


def counted(m, h, args):
    m.steps += 1
    return m.a(h) * m.steps


def averaged(m, h, args):
    if m.training:
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return m.a(h) - m.mean


def replaced(m, h, args):
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean((0, 1))
    return m.a(h) * m.mean


def replaced_first(m, h, args):
    y = h * m.mean
    m.mean = h.detach()[0, 0].clone()
    return m.a(y)


def copied_into(m, h, args):
    before = m.mean.clone()
    m.mean.copy_(h.detach()[0, 0])
    return m.a(h) * before + m.mean


def only_a_view(m, h, args):
    m.mean[:2] += 1
    m.mean.view(2, 3)[1].zero_()
    return m.a(h) + m.mean


def read_only(m, h, args):
    return m.a(h) * m.mean + m.steps


def decided_by_a_buffer(m, h, args):
    return m.a(h) * (2 if m.steps > 0 else 3)


# what gradients do not reach, and regions


def rounded(m, h, args):
    return h + (m.a(h).round() - h).detach()


def unused(m, h, args):
    return h.sin() if m.w is not None else h


def without_gradients(m, h, args):
    with torch.no_grad():
        scale = m.a(h).abs().mean()
    with torch.set_grad_enabled(False):
        shift = m.a(h).amax()
    return h / (1 + scale) + shift


def in_autocast(m, h, args):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(h.float(), m.a.weight.float())
    return h + y.double()


def hooked(m, h, args):
    h = m.a(h)
    if h.requires_grad:
        h.register_hook(lambda dy: 2 * dy)
    return h


def own_gradient(m, h, args):
    with torch.enable_grad():
        x = h if h.requires_grad else h.detach().requires_grad_()
        (dx,) = torch.autograd.grad(m.a(x).square().sum(), x, create_graph=True)
    return h - 0.1 * dx


def checkpointed(m, h, args):
    return checkpoint(lambda x: m.a(x).tanh(), h, use_reentrant=False)


def mapped(m, h, args):
    return torch.func.vmap(lambda row: m.a(row).softmax(-1))(h)


# randomness


def noisy(m, h, args):
    return h + 0.1 * torch.randn_like(h) if m.training else h


def picked(m, h, args):
    keep = torch.bernoulli(torch.full((h.shape[0], 1, 1), 0.7, dtype=h.dtype)) if m.training else 1
    return m.a(h) * keep


def mixed(m, h, args):
    return torch.lerp(h, h[:, torch.randperm(h.shape[1])], torch.rand(h.shape[:1], dtype=h.dtype)[:, None, None])


def in_place_noise(m, h, args):
    return h * torch.empty_like(h).uniform_(0.5, 1.5) + torch.zeros_like(h).normal_()


def drawn_ids(m, h, args):
    return m.e(torch.randint(V, args.ids.shape)) + h


def by_a_generator(m, h, args):
    return h * torch.rand(h.shape, generator=torch.Generator().manual_seed(5), dtype=h.dtype)


# attention, recurrences, complex and integer values


def attended(m, h, args):
    q, k, v = m.a(h).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def by_hand(m, h, args):
    q, k, v = m.a(h).split(D, -1)
    scores = torch.einsum("bid,bjd->bij", q, k).masked_fill(args.mask[:, None], -1e4)
    return torch.einsum("bij,bjd->bid", scores.softmax(-1), v)


def rotated(m, h, args):
    z = torch.view_as_complex(h.reshape(*h.shape[:-1], D // 2, 2).contiguous())
    turn = torch.polar(torch.ones(h.shape[1], 1, dtype=h.dtype), torch.arange(h.shape[1], dtype=h.dtype)[:, None])
    return torch.view_as_real(z * turn).flatten(-2)


def spectral(m, h, args):
    return torch.fft.irfft(torch.fft.rfft(m.a(h), dim=1) * torch.complex(m.w, m.w), n=h.shape[1], dim=1)


def largest(m, h, args):
    at = h.argmax(-1, keepdim=True)
    return h + torch.zeros_like(h).scatter(-1, at, 1.0) * h.gather(-1, at)


def ranked(m, h, args):
    values, at = h.sort(-1, descending=True)
    best, first = h.topk(2, -1)
    return values.gather(-1, at.argsort(-1)) + best.sum(-1, keepdim=True) * (at == first[..., :1])


def one_hot(m, h, args):
    return m.a(torch.cat([h, F.one_hot(args.ids, V).to(h.dtype)], -1))


def counts(m, h, args):
    n = (h > 0).sum(-1, keepdim=True)
    return h / (n + 1) + args.ids.cumsum(1)[..., None] % 3


def stages(m, h, args):
    edges = torch.tensor([-1.0, 0.0, 1.0], dtype=h.dtype)
    return h * m.e(torch.bucketize(h.detach()[..., 0], edges))


def chosen(m, h, args):
    return torch.where(args.mask[..., None], m.a(h), torch.where(h > 0, h, 0.1 * h))


def told(m, h, args):
    loss = F.cross_entropy(m.a(h).flatten(0, 1), args.ids.flatten())
    return h * loss


# what is refused


def branches(m, h, args):
    return m.a(h) if h.sum() > 0 else h


def selected(m, h, args):
    return h + h[args.mask].sum(0)


def a_number(m, h, args):
    return h * float(h.detach().amax())


def left_out(m, h, args):
    return h if torch.rand(()) < 0.5 else m.a(h)


def counts_itself(m, h, args):
    m.calls = getattr(m, "calls", 0) + 1
    return m.a(h) / m.calls


def clamps_its_parameter(m, h, args):
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    return m.a(h)


def writes_to_an_input(m, h, args):
    args.ids.remainder_(3)
    return h + args.ids[..., None]


def by_python(m, h, args):
    return h * random.choice([1.0, 2.0])


def scales():
    factor = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
    return lambda m, h, args: h * factor


def keeps_a_table(m, h, args):
    """Made by the first call."""
    if h.shape[1] not in m.tables:
        m.tables[h.shape[1]] = torch.arange(h.shape[1], dtype=h.dtype)[:, None]
    return h + m.tables[h.shape[1]]


class Half(nn.Module):
    def forward(self, w):
        return w / 2 + w.detach().mean()


def normed_weight(m):
    m.a = parametrizations.weight_norm(nn.Linear(D, D))


def with_spectrum(m):
    m.a = parametrizations.spectral_norm(nn.Linear(D, D))


def parametrized(m):
    m.a = nn.Linear(D, D)
    parametrize.register_parametrization(m.a, "weight", Half())


def with_hooks(m):
    m.a, m.b = nn.Linear(D, D), nn.Tanh()
    m.a.register_forward_hook(lambda module, given, y: y * 2)
    m.b.register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],))
    m.b.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def tied(m):
    m.a, m.b = nn.Linear(D, D), nn.Linear(D, D)
    m.b.weight = m.a.weight


def whole(m, h, args):
    return m.a(h)


def across(m, h, args):
    return m.a(h.transpose(1, 2)).transpose(1, 2)


STEPS = {
    "linear": (whole, linear()),
    "no bias": (lambda m, h, args: F.linear(h, m.w), parameter(D, D)),
    "tied": (lambda m, h, args: m.b(m.a(h).tanh()) @ m.a.weight, tied),
    "bilinear": (lambda m, h, args: m.a(h, args.other), holds(a=lambda: nn.Bilinear(D, D, D))),
    "twice": (lambda m, h, args: m.a(m.a(h).relu()), linear()),
    "gated": (lambda m, h, args: F.glu(m.a(h), -1), linear(2 * D)),
    "prelu": (lambda m, h, args: m.a(h.transpose(1, 2)).transpose(1, 2), holds(a=lambda: nn.PReLU(D))),
    "conv": (across, holds(a=lambda: nn.Conv1d(D, D, 3, padding=1, groups=2))),
    "conv of images": (
        lambda m, h, args: m.a(h.unflatten(-1, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2),
        holds(a=lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")),
    ),
    "transposed conv": (across, holds(a=lambda: nn.ConvTranspose1d(D, D, 3, padding=1))),
    "pooled": (across, holds(a=lambda: nn.MaxPool1d(3, 1, 1))),
    "average": (across, holds(a=lambda: nn.AvgPool1d(3, 1, 1))),
    "resized": (lambda m, h, args: F.interpolate(F.interpolate(h, 3), D, mode="linear"), None),
    "layer norm": (whole, holds(a=lambda: nn.LayerNorm(D))),
    "rms norm": (whole, holds(a=lambda: nn.RMSNorm(D))),
    "group norm": (across, holds(a=lambda: nn.GroupNorm(2, D))),
    "batch norm": (across, holds(a=lambda: nn.BatchNorm1d(D))),
    "batch norm without affine": (across, holds(a=lambda: nn.BatchNorm1d(D, affine=False, track_running_stats=False))),
    "instance norm": (across, holds(a=lambda: nn.InstanceNorm1d(D, affine=True, track_running_stats=True))),
    "softmax": (lambda m, h, args: (m.a(h) / 2).softmax(-1) + h.log_softmax(1), linear()),
    "cosine": (lambda m, h, args: h * F.cosine_similarity(h, args.other, dim=-1)[..., None], None),
    "cumulative": (lambda m, h, args: h.cumsum(1) + h.flip(1).cummax(1).values + h.logcumsumexp(-1), None),
    "norms": (lambda m, h, args: F.normalize(h, dim=-1) * h.norm(dim=(0, 2), keepdim=True), None),
    "outer": (lambda m, h, args: torch.einsum("bid,de,bie->bie", h, m.w, args.other), parameter(D, D)),
    "chain": (lambda m, h, args: torch.einsum("bid,de,ef->bif", h, m.w, m.w), parameter(D, D)),
    "solved": (lambda m, h, args: torch.linalg.solve(m.w @ m.w.T + 3 * torch.eye(D, dtype=h.dtype), h.mT).mT, parameter(D, D)),
    "embedded": (lambda m, h, args: h + m.e(args.ids), holds(e=lambda: nn.Embedding(V, D, padding_idx=0))),
    "bags": (lambda m, h, args: h + m.e(args.ids)[:, None], holds(e=lambda: nn.EmbeddingBag(V, D))),
    "indexed": (lambda m, h, args: h[:, args.ids[0] % h.shape[1]] + h[..., [0, 2, 2, 1, 5, 4]], None),
    "index select": (lambda m, h, args: h.index_select(-1, torch.tensor([5, 4, 3, 2, 1, 0])), None),
    "index add": (lambda m, h, args: h.clone().index_add_(0, torch.zeros(1, dtype=torch.long), h[:1].sin()), None),
    "rolled": (lambda m, h, args: h.roll(1, 1) + h.roll((1, 2), (1, 2)).tril(1), None),
    "permuted": (
        lambda m, h, args: h.permute(2, 0, 1).reshape(-1, h.shape[1]).cos().view(D, -1, h.shape[1]).permute(1, 2, 0),
        None,
    ),
    "unbound": (lambda m, h, args: torch.stack([t * i for i, t in enumerate(h.unbind(1))], 1), None),
    "diagonal": (lambda m, h, args: h + torch.diag_embed(m.w).diagonal(dim1=-2, dim2=-1).squeeze(), parameter(D)),
    "repeated": (lambda m, h, args: h.repeat_interleave(2, 1).unflatten(1, (-1, 2)).mean(2) + h.repeat(1, 1, 2)[..., D:], None),
    "sliced": (lambda m, h, args: h + h[:, -1:, ::2].repeat(1, 1, 2) + h.narrow(-1, 2, 1), None),
    "a closure": (lambda m, h, args: m.scaled(m, h, args), lambda m: setattr(m, "scaled", scales())),
    "a partial": (lambda m, h, args: m.act(h), lambda m: setattr(m, "act", functools.partial(F.leaky_relu, negative_slope=0.3))),
    "a table": (keeps_a_table, lambda m: setattr(m, "tables", {})),
    "dropout": (lambda m, h, args: m.a(h), holds(a=lambda: nn.Dropout(0.4))),
    "dropout of channels": (across, holds(a=lambda: nn.Dropout1d(0.4))),
    "alpha dropout": (lambda m, h, args: m.a(h), holds(a=lambda: nn.AlphaDropout(0.2))),
    "random slopes": (lambda m, h, args: m.a(h), holds(a=lambda: nn.RReLU())),
    "gumbel": (lambda m, h, args: h * F.gumbel_softmax(h, tau=2.0, hard=True) if m.training else h, None),
    "attention layer": (
        lambda m, h, args: m.a(h, h, h, key_padding_mask=None, need_weights=False)[0],
        holds(a=lambda: nn.MultiheadAttention(D, 2, batch_first=True)),
    ),
    "encoder": (whole, holds(a=lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.1, batch_first=True))),
    "recurrent": (lambda m, h, args: m.a(h)[0], holds(a=lambda: nn.GRU(D, D, batch_first=True))),
    "long memory": (lambda m, h, args: m.a(h)[0], holds(a=lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True))),
    "cell": (
        lambda m, h, args: torch.stack([m.a(h[:, 0], h[:, i]) for i in range(h.shape[1])], 1),
        holds(a=lambda: nn.GRUCell(D, D)),
    ),
    "weight norm": (whole, normed_weight),
    "spectral norm": (whole, with_spectrum),
    "parametrized": (whole, parametrized),
    "hooks of modules": (lambda m, h, args: m.b(m.a(h)), with_hooks),
    "wrong backward": (lambda m, h, args: Wrong.apply(m.a(h), 5.0), linear()),
    "two results": (lambda m, h, args: sum(Two.apply(m.a(h), m.w)), lambda m: (linear()(m), parameter(D)(m))),
    "one of two results": (lambda m, h, args: Two.apply(h, m.w)[1], parameter(D)),
    "dirty": (lambda m, h, args: Dirty.apply(m.a(h)), linear()),
    "context apart": (lambda m, h, args: sum(Apart.apply(h.tanh())), None),
    **{one.__name__: (one, linear()) for one in (written, in_a_loop, through_a_view, filled, rounded, without_gradients)},
    **{one.__name__: (one, linear()) for one in (in_autocast, hooked, own_gradient, mapped, picked, chosen)},
    **{
        one.__name__: (one, None) for one in (into_empty, index_put, scattered, copied, out_of, swapped, windows, strided, expanded)
    },
    **{one.__name__: (one, None) for one in (noisy, mixed, in_place_noise, rotated, largest, ranked, counts)},
    **{one.__name__: (one, holds(e=lambda: nn.Embedding(V, D))) for one in (drawn_ids, stages)},
    **{one.__name__: (one, linear(3 * D)) for one in (attended, by_hand)},
    **{
        one.__name__: (one, buffers(steps=1.0, mean=[0.5] * D))
        for one in (counted, averaged, replaced, replaced_first, copied_into)
    },
    **{one.__name__: (one, buffers(steps=1.0, mean=[0.5] * D)) for one in (only_a_view, read_only, decided_by_a_buffer)},
    "unused": (unused, parameter(D)),
    "spectral": (spectral, lambda m: (linear()(m), parameter(D)(m))),
    "one_hot": (one_hot, linear(D, D + V)),
    "told": (told, linear(V)),
}
REFUSED = {
    **{one.__name__: (one, linear()) for one in (checkpointed, branches, left_out, counts_itself, clamps_its_parameter)},
    **{one.__name__: (one, None) for one in (selected, a_number, writes_to_an_input, by_python, by_a_generator)},
    "cumulative statistics": (across, holds(a=lambda: nn.BatchNorm1d(D, momentum=None))),
}
