"""Modules that stand for what people write in torch.nn, each with an example, and what a test needs to call them."""

import types

import optree
import torch
from torch import nn

from funcops import TorchConfig

CFG = TorchConfig()
SCALE = 2.0


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.slope, self.parts, self.config = 0.5, [1.0], types.SimpleNamespace(power=2)

    def forward(self, x):
        h = self.up(self.norm(x))
        h = torch.where(h > 0, h, self.slope * h) ** self.config.power
        return x + SCALE * self.parts[0] * self.down(h)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6), Mlp()

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Language(nn.Module):
    """Ids in, tied weights, a dict of results."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 6), Block(), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None, *, twice=False):
        h = self.block(self.embed(ids))
        logits = self.head(self.block(h) if twice else h)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Convolved(nn.Module):
    """Writes in place, and batch statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.act(self.norm(self.first(x)))
        h = self.act(self.second(h)) + h
        h[:, :2] *= 2
        return h.mean((2, 3))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.steps += 1
        return self.b(self.a(x).add_(1.0).relu_() * self.steps)


class Assigning(nn.Module):
    """Puts another tensor in the place of a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        h = self.a(x) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h * self.mean


class Shared(nn.Module):
    """Parts that have two names."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([nn.ModuleList([self.a, self.norm]) for _ in range(2)])

    def forward(self, x):
        for linear, norm in self.blocks:
            x = x + norm(linear(x)).relu()
        return x


class Twice(torch.autograd.Function):
    """A backward that is not the forward's: a trace must follow it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 5 * dy * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, scale):
        return self.b(Twice.apply(self.a(x))), scale * 2


class Scales(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * self.inner.gain


MODELS = {
    "mlp": (Mlp, lambda: draw(2, 5, 6)),
    "block": (Block, lambda: draw(2, 5, 6)),
    "language": (Language, lambda: {"ids": torch.arange(10).view(2, 5) % 7, "labels": torch.ones(2, 5, dtype=torch.long)}),
    "language, logits": (Language, lambda: {"ids": torch.arange(10).view(2, 5) % 7, "twice": True}),
    "conv": (Convolved, lambda: draw(2, 3, 6, 6)),
    "counting": (Counting, lambda: draw(3, 6)),
    "assigning": (Assigning, lambda: draw(3, 6)),
    "shared parts": (Shared, lambda: draw(4, 6)),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()),
        lambda: draw(2, 4, 6, 6).contiguous(memory_format=torch.channels_last),
    ),
    "custom function": (Custom, lambda: (draw(3, 6), draw(3, 2))),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)), lambda: draw(3, 6)),
    "recurrent": (lambda: nn.GRU(6, 6, batch_first=True), lambda: draw(2, 4, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), lambda: draw(2, 4, 6)),
    "lazy view": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), lambda: draw(4, 2, 6)),
}


def made(name):
    torch.manual_seed(0)
    build, example = MODELS[name]
    return build().double(), example()


def called(module, x):
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def plain(tree):
    """The tensors of a result, without None."""
    return [t for t in optree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def trained(x):
    return optree.tree_map(lambda t: t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t, x)
