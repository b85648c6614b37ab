"""Our kernels' work in torch's own functions, for torch.compile: a function, the tensors that it takes,
and the graphs of it that correspond to our kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.traffic.ours import Case
from funcops.library.kernels import glu
from funcops.library.kernels.activation import ACTIVATIONS

ACTS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
KINDS = (*ACTS, "swiglu", "geglu_tanh")  # the others are alike
HEAD = 128  # the width of every head of the samples


class Function(NamedTuple):
    """A function for torch.compile. `graphs`: which of forward and backward do our work. `below`: a bound for its integer
    inputs."""

    f: Callable[..., Any]
    inputs: list[Tensor]
    graphs: slice
    below: int = 1


FORWARD, BACKWARD, BOTH = slice(0, 1), slice(1, 2), slice(0, 2)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, 1e-6)


def _group(groups: int, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, groups, w, b, 1e-5)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


NORMS: dict[str, Callable[..., Tensor]] = {"rms": _rms, "layer": _layer, "l2": _unit}


def _added(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def f(x: Tensor, residual: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return norm(stream, *rest), stream

    return f


def _gated(kind: str) -> Callable[..., Tensor]:
    return lambda gate, linear: ACTS[glu.GATES[kind]](gate) * linear


def _halves(kind: str) -> Callable[[Tensor], Tensor]:
    return lambda x: _gated(kind)(*x.chunk(2, -1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def _split(heads: int, kv_heads: int) -> Callable[..., tuple[Tensor, ...]]:
    def f(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        parts = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], -2)
        return _turned(parts[0], cos, sin), _turned(parts[1], cos, sin), parts[2].contiguous()

    return f


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


def _angles(table: Tensor) -> list[Tensor]:
    return [torch.empty(*table.shape[:-1], table.shape[-1] // 3, dtype=table.dtype) for _ in range(2)]


def turns_halves(case: Case) -> bool:
    """Whether every number of every head is rotated, paired with one of the other half of its head."""
    table = next((t for t in case.args if isinstance(t, Tensor) and t.dtype is torch.float32), None)
    return table is not None and table.shape[-1] == 3 * HEAD and case.shape.startswith("halves")


def function_of(case: Case) -> Function | None:
    """The function for a case; None if torch.compile has no counterpart, or makes its graph only with CUDA (dropout)."""
    name, a = case.name, case.args
    if any(kind in (*ACTIVATIONS, *glu.GATES) and kind not in KINDS for kind in case.shape.split()):
        return None
    if name.startswith("dropout"):
        return None
    if name.startswith("group_norm"):
        x, w, groups = (a[0], a[1], a[3]) if name.endswith("fwd") else (a[1], a[2], a[5])
        return Function(functools.partial(_group, groups), [x, w, w], FORWARD if name.endswith("fwd") else BACKWARD)
    if name.endswith("norm_fwd"):
        f = NORMS[name.removeprefix("add_").split("_")[0]]
        tensors = [t for t in a if isinstance(t, Tensor)]
        return Function(_added(f) if name.startswith("add") else f, tensors, FORWARD)
    if name.endswith("norm_bwd"):
        kind = name.removeprefix("add_").split("_")[0]
        f = NORMS[kind]
        x, w = (a[2], a[3]) if name.startswith("add") else (a[1], a[2])
        tensors = {"rms": [x, w], "layer": [x, w, w], "l2": [x]}[kind]
        return Function(_added(f), [x, *tensors], BACKWARD) if name.startswith("add") else Function(f, tensors, BACKWARD)
    if name.startswith(("rope", "qkv_split")) and not turns_halves(case):
        return None
    made: dict[str, Callable[[], Function]] = {
        "row_sums": lambda: Function(lambda dy: dy.sum(0), [a[0]], FORWARD),
        "add": lambda: Function(torch.add, list(a), FORWARD),
        "softmax_fwd": lambda: Function(lambda x: torch.softmax(x, -1), [a[0]], FORWARD),
        "softmax_bwd": lambda: Function(lambda x: torch.softmax(x, -1), [a[1]], BACKWARD),
        "scale": lambda: Function(lambda x: x * 0.5, [a[0]], FORWARD),
        "activation_fwd": lambda: Function(ACTS[a[1]], [a[0]], FORWARD),
        "activation_bwd": lambda: Function(ACTS[a[2]], [a[1]], BACKWARD),
        "bias_activation_fwd": lambda: Function(lambda x, b: ACTS[a[2]](x + b), [a[0], a[1]], FORWARD),
        "bias_activation_bwd": lambda: Function(
            lambda x, b: ACTS[a[3]](x + b), [a[1], a[1][0] if a[2] is None else a[2]], BACKWARD
        ),
        "glu_fwd": lambda: Function(_halves(a[2]), [a[0]], FORWARD),
        "glu_bwd": lambda: Function(_halves(a[3]), [a[1]], BACKWARD),
        "glu_pair_fwd": lambda: Function(_gated(a[2]), [a[0], a[1]], FORWARD),
        "glu_pair_bwd": lambda: Function(_gated(a[3]), [a[1], a[2]], BACKWARD),
        "rope_apply": lambda: Function(_turned, [a[0], *_angles(a[1])], FORWARD),
        "qkv_split_fwd": lambda: Function(_split(a[2], a[3]), [a[0], *_angles(a[1])], FORWARD),
        "qkv_split_bwd": lambda: Function(_split_again(a), [_joint(a), *_angles(a[3])], BACKWARD),
        "cross_entropy_fwd": lambda: Function(_loss, [a[0], a[1]], FORWARD, a[0].shape[1]),
        "cross_entropy_bwd": lambda: Function(_loss, [a[1], a[2]], BACKWARD, a[1].shape[1]),
        "cross_entropy": lambda: Function(_loss, [a[0], a[1]], BOTH, a[0].shape[1]),
        "embedding_wgrad": lambda: Function(
            lambda dy, ids: dy.new_zeros(a[2], dy.shape[-1]).index_put((ids,), dy, accumulate=True), [a[0], a[1]], FORWARD, a[2]
        ),
    }
    return made[name]() if name in made else None


def _joint(args: Any) -> Tensor:
    dq, dk = args[:2]
    return torch.empty(*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1], dtype=dq.dtype)


def _split_again(args: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The split without gradients for the angles."""
    f = _split(args[0].shape[-2], args[1].shape[-2])
    return lambda qkv, cos, sin: f(qkv, cos.detach(), sin.detach())
