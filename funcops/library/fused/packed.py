"""`pack_qkv`: the weights of q, k and v in one memory."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.contract.walk import walk
from funcops.engine.errors import describe, join_path, require
from funcops.engine.program.explain import plan
from funcops.engine.trees import at, has, tree_map_with_path
from funcops.library.fused import qkv
from funcops.library.kernels.sibling_linear import stacked

T = TypeVar("T")


def pack_qkv(params: T, cfg: Any) -> T:
    """Return the params with the weights of each layer's q, k and v as parts of one tensor, one below the other, and their biases
    too. Paths, shapes and values stay. On CUDA their forward is then one product of [*, I] by [O_q + O_k + O_v, I] instead of
    three, so that x is read once, and their input gradient needs no copy of the three weights. Their weight gradients are one
    product in any case, and if they are added `into` accumulators, where these, a tree like params, are packed too. Each y is
    rounded as by another kernel of the library.

    It holds for the updates of `optim`, pure or in place, and their `into`, and where tensors are passed on (`lora_init`). Other
    new tensors lie apart: after `cast`, `load`, `from_hf` or a move to another device call it again. It takes the layers
    that the fusion rule "q, k and v" takes; stacked layers, codes, tensors of subclasses and a gate and up in one weight already
    stay as they are. The forward of branches with adapters stays three products. Raises `TypeError` for a config that is not an
    op's, and `ValueError` for params of another config.

    >>> import torch
    >>> from funcops import chain, fused
    >>> from funcops.models.blocks import block_config
    >>> cfg = block_config(64, heads=4, hidden=96, kv_heads=2)
    >>> qkv = fused.pack_qkv(chain.init(cfg, device="meta"), cfg)["attn"]["qkv"]
    >>> [qkv[name]["proj"].weight.storage_offset() for name in "qkv"]
    [0, 4096, 6144]
    """
    found: dict[str, Tensor] = {}
    for part in walk(cfg, layers=True):
        for line in plan(part.cfg).backward if part.composite and part.cfg.branching else ():
            if line.rule in (qkv.backward_rule, qkv.in_flight_rule):
                layers = [join_path(part.path, call.path) for call in line.calls if call.op.layer is not None]
                missing = next((layer for layer in layers if not has(params, layer)), None)
                require(missing is None, "pack_qkv", "params", f"params of cfg, with {missing}", describe(params))
                for name in ("weight", "bias"):
                    given = [getattr(at(params, layer), name) for layer in layers]
                    found |= zip([join_path(layer, name) for layer in layers], _below(given), strict=True)
    return tree_map_with_path(lambda path, t: found.get(path, t), params)


def _below(given: list[Any]) -> list[Any]:
    """Copies of the tensors, one below the other in one memory; the same ones if they are already, or cannot be."""
    first = given[0]
    kinds = {(type(t), getattr(t, "dtype", None), getattr(t, "device", None), *getattr(t, "shape", ())[1:]) for t in given}
    if len(kinds) > 1 or type(first) is not Tensor or first.dim() > 2:
        return given
    with torch.no_grad():
        if stacked(*given) is not None:
            return given
        parts = torch.cat(given).split([len(t) for t in given])
    return [part.detach().requires_grad_(t.requires_grad) for part, t in zip(parts, given, strict=True)]
