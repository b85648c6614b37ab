"""Memos that a compiler may read and never writes."""

from __future__ import annotations

from typing import TypeVar

import torch

K = TypeVar("K")
V = TypeVar("V")


def remember(memo: dict[K, V], key: K, value: V) -> V:
    """The value, put into the memo. While torch.compile traces it is not put there: the tracer would have to write outside of the
    graph that it makes, which it refuses inside an autograd node, and cannot do with objects that it has made itself."""
    if not torch.compiler.is_dynamo_compiling():
        memo[key] = value
    return value
