"""Values of a model's file that `test_changes_after_the_trace.py` changes, as one that imports another file reads them."""

import enum
import functools

import torch
import torch.nn.functional as F

FACTOR = 2.0
TABLE = {"gain": [1.5, 2.0]}


class Mode(enum.Enum):
    PLAIN = 1.0
    DOUBLED = 2.0


MODE = Mode.PLAIN


class Options:
    power = 2

    @classmethod
    def factor(cls):
        return cls.power * FACTOR


def scaled(x):
    return inner(x)


def inner(x):
    return FACTOR * x


def with_default(x, by=2.0, *, plus=1.0):
    return by * x + plus


def closing(by):
    def close(x):
        return by * x

    def assign(value):
        nonlocal by
        by = value

    return close, assign


@functools.lru_cache
def table(n):
    return [float(i) for i in range(n)]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return FACTOR * x

    @staticmethod
    def backward(ctx, dy):
        return Options.power * dy


def activated(x):
    return F.gelu(x)
