"""Params of a model with adapters: initialised, split, joined and merged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.configs import Composite, found_once
from funcops.engine.contract.needs import Mask, Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import steps, ties
from funcops.engine.errors import FLOATS, check, describe, differing, fail, join_path, require_dtype, require_type
from funcops.engine.random import check_key
from funcops.engine.trees import at, has, paths, put, replace, stands_for_one, tensors, tree_map
from funcops.library.formats.scaled import unscaled
from funcops.library.ops.embedding import EmbeddingParams
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.low_rank import LowRankParams
from funcops.lora.rewrite import ADAPTER, BASE, BOTH, INSIDE, LORA, SUM, AdaptedLinear, adapted_linears

T = TypeVar("T")


def lora_init(params: Any, cfg: Any, *, key: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return the params of `cfg` (from `with_lora`): the base config's, the same objects, and new adapters.

    a: uniform in ±1/sqrt(I), Kaiming's with a = sqrt(5), as PEFT draws it; b: zero, so that y does not change. Each adapter has
    its own key, by path and layer. `dtype`: the adapters'; by default their weight's. `cfg` may be an op that `with_lora` made, and
    params a dict of the module's. Raises `ValueError` or `TypeError`, with the path, if params are not the base config's: a step
    without params must be None, not left out.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import lora_init, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> params["up"]["both"]["base"] is pretrained["up"], params["up"]["both"]["lora"].b.abs().sum()
    (True, tensor(0.))
    """
    where = "lora_init"
    check_key(where, key)
    require_dtype(where, dtype)
    if isinstance(cfg, Op):
        if not getattr(cfg.named, "layers", None):
            fail(where, "cfg", "a config, or an op that with_lora made", describe(cfg), TypeError)
        return cfg.named.lora_init(where, params, key, dtype)
    for linear in adapted(where, cfg):
        node = _base(where, params, linear.path, linear)
        like = _like(node.weight, params)
        keys: Any = random.fold_in(key, random.path_id(linear.module))
        made = _init(linear, keys, like.device, dtype or like.dtype)
        params = _put(params, linear.path, {BOTH: {BASE: node, LORA: made}, SUM: None})
    given, wanted = (paths(tree, is_leaf=stands_for_one) for tree in (unscaled(params), cfg.abstract()))
    if given.keys() != wanted.keys():
        fail(where, "params", "the base config's (None for a step without params)", differing(given, wanted))
    return params


def lora_needs(cfg: Any, *, x: Mask = False) -> Needs:
    """Request only the gradients of adapters; `x`: the mask over the model's x, as in `Needs`. Raises `ValueError` for a recipe
    with delayed scaling, whose scales would never change: its amaxes come with weight gradients.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import lora_init, lora_needs, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> y, residuals = chain.fwd(params, torch.ones(2, 8), cfg, needs=lora_needs(cfg))
    >>> grads, dx = chain.bwd(residuals, torch.ones(2, 16), cfg)
    >>> grads["up"]["both"]["base"].weight, grads["up"]["both"]["lora"].b.shape, dx
    (None, torch.Size([16, 2]), None)
    """
    for part in steps(cfg):
        recipe = part.cfg.low_recipe
        if recipe is not None and recipe.delayed:
            wanted = "one without delayed scaling, because a frozen weight gets no gradient, and so no amaxes"
            fail("lora_needs", f"the recipe of {part.path}", wanted, type(recipe).__name__)
    return Needs(x=x, params=tuple(linear.at(ADAPTER) for linear in adapted("lora_needs", cfg)))


def adapter(tree: Any, cfg: Any) -> dict[str, LowRankParams]:
    """Return the adapters in params, or in gradients like them, by the path of their linear, as an optimizer takes them.
    Raises `ValueError` or `TypeError` if the tree lacks an adapter of the config, or has something else in its place.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import adapter, lora_init, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> list(adapter(params, cfg)), adapter(params, cfg)["up"] is params["up"]["both"]["lora"]
    (['up'], True)
    """
    found = {}
    for linear in adapted("adapter", cfg):
        path = linear.at(ADAPTER)
        if not has(tree, path):
            paths(tree)  # raises if it was given away
            fail("adapter", "tree", f"one with {path}", describe(tree))
        found[linear.path] = own = at(tree, path)
        require_type("adapter", f"tree.{path}", own, LowRankParams)
        for part, t in paths(own).items():
            if t is not None:
                check("adapter", f"tree.{path}.{part}", detached(t), (...,), FLOATS)
    return found


def with_adapter(params: Any, adapter: Mapping[str, LowRankParams], cfg: Any) -> Any:
    """Return the params with these adapters in place of their own; every other leaf is the same object. Raises `ValueError` or
    `TypeError`, with the path, for an adapter of another model.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import adapter, lora_init, with_adapter, with_lora
    >>> from funcops.trees import tree_map
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> learned = tree_map(lambda t: t + 1.0, adapter(params, cfg))
    >>> new = with_adapter(params, learned, cfg)
    >>> new["up"]["both"]["lora"] is learned["up"], new["up"]["both"]["base"] is pretrained["up"]
    (True, True)
    """
    where = "with_adapter"
    known = {linear.path: linear for linear in adapted(where, cfg)}
    _check_adapter(where, adapter, known)
    for path, made in adapter.items():
        inside = known[path].at(ADAPTER)
        if not has(params, inside):
            fail(where, "params", f"a tree with {inside}", describe(params))
        params = _put(params, inside, made)
    return params


def merge(params: Any, cfg: Any) -> Any:
    """Return the params of the base config, with `weight + scale b a` for each adapted weight, at least in float32, rounded once.

    Raises `ValueError` if a merged weight is tied, as the other would not follow; `TypeError` for a weight in low precision.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import lora_init, merge, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> merged, x = merge(params, cfg), torch.ones(2, 8)
    >>> torch.allclose(chain.fwd(merged, x, base)[0], chain.fwd(params, x, cfg)[0])
    True
    """
    _check_ties("merge", cfg)
    for linear in adapted("merge", cfg):
        node = _base("merge", params, linear.at(INSIDE), linear)
        lora = at(params, linear.at(ADAPTER))
        _check_one("merge", f"params.{linear.at(ADAPTER)}", lora, linear)
        params = _put(params, linear.path, replace(node, weight=_moved("merge", node.weight, lora, linear, 1.0)))
    return params


def unmerge(params: Any, adapter: Mapping[str, LowRankParams], cfg: Any) -> Any:
    """Undo `merge`, within rounding: `weight - scale b a`, with the adapters of `adapter` beside it. `params`: the base config's.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import adapter, lora_init, merge, unmerge, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> cfg, pretrained = with_lora(base, rank=2, targets=("up",)), chain.init(base, key=random.key(0))
    >>> params = lora_init(pretrained, cfg, key=random.key(1))
    >>> again = unmerge(merge(params, cfg), adapter(params, cfg), cfg)
    >>> torch.allclose(again["up"]["both"]["base"].weight, pretrained["up"].weight)
    True
    """
    _check_ties("unmerge", cfg)
    known = {linear.path: linear for linear in adapted("unmerge", cfg)}
    _check_adapter("unmerge", adapter, known)
    for path, linear in known.items():
        node, lora = _base("unmerge", params, path, linear), adapter[path]
        base = replace(node, weight=_moved("unmerge", node.weight, lora, linear, -1.0))
        params = _put(params, path, {BOTH: {BASE: base, LORA: lora}, SUM: None})
    return params


def adapted(where: str, cfg: Any) -> list[AdaptedLinear]:
    """The adapted linears of a config; raises if it has none."""
    found = found_once(cfg, "adapted", lambda: list(adapted_linears(cfg)))
    if not found:
        fail(
            where,
            "cfg",
            "one that with_lora made (with_adapter_of, for adapters in files)",
            describe(cfg) if not isinstance(cfg, Composite) else "one without adapters",
        )
    return found


def _base(where: str, params: Any, path: str, linear: AdaptedLinear) -> LinearParams | GroupedLinearParams | EmbeddingParams:
    """The params of the layer at a path, checked."""
    if path and not has(params, path):
        fail(where, "params", f"a tree with {path}", describe(params))
    node = at(params, path)
    kinds: Any = EmbeddingParams if linear.lora.by_ids else (LinearParams, GroupedLinearParams)
    if not isinstance(node, kinds):
        wanted = "an EmbeddingParams" if linear.lora.by_ids else "a LinearParams"
        fail(where, join_path("params", path), f"{wanted} (params of the base config)", describe(node), TypeError)
    name, shape = join_path("params", path), (*linear.lead, *linear.lora.weight_shape)
    if node.weight is not None and not stands_for_one(node.weight):  # tied, or in codes
        check(where, f"{name}.weight", detached(node.weight), shape, FLOATS)
    if not isinstance(node, EmbeddingParams) and linear.base.bias:
        check(where, f"{name}.bias", detached(node.bias), shape[:-1], FLOATS)
    return node


def detached(t: Any) -> Any:
    """A tensor detached from autograd; anything else unchanged."""
    return t.detach() if isinstance(t, Tensor) else t


def _like(weight: Any, params: Any) -> Any:
    """A tensor with the weight's dtype and device: itself, in codes or not; a float tensor of params if the weight is tied."""
    own = unscaled(weight)
    if stands_for_one(own) or (isinstance(own, Tensor) and own.dtype in FLOATS):
        return own
    found = next((t for t in tensors(params) if t.dtype in FLOATS), None)
    if found is None:
        fail("lora_init", "params", "a tree with float tensors", describe(params))
    return found


def _init(linear: AdaptedLinear, key: Tensor, device: Any, dtype: torch.dtype) -> LowRankParams:
    def draw(key: Any) -> Any:
        axis: Any = linear.axis
        lora: Any = linear.lora
        if axis is None:
            return linear.op.init(lora, key=key, device=device, dtype=dtype)
        whole = linear.op.init(dataclasses.replace(lora, experts=axis.size * lora.experts), key=key, device=device, dtype=dtype)
        return tree_map(lambda t: t.chunk(axis.size)[axis.rank].contiguous(), whole)

    if not linear.lead:
        return draw(key)  # type: ignore[no-any-return]
    made = [draw(own) for own in random.split(key, math.prod(linear.lead))]
    return tree_map(lambda *layers: torch.stack(layers).unflatten(0, linear.lead), made[0], *made[1:])


def _put(params: Any, path: str, value: Any) -> Any:
    return put(params, path, value) if path else value


def _check_adapter(where: str, adapter: Any, known: Mapping[str, AdaptedLinear]) -> None:
    require_type(where, "adapter", adapter, Mapping)
    missing, extra = [path for path in known if path not in adapter], [path for path in adapter if path not in known]
    if missing or extra:
        said = [f"{kind} {', '.join(map(str, names))}" for kind, names in (("missing", missing), ("extra", extra)) if names]
        fail(where, "adapter", f"keyed by the paths {', '.join(known)}", "; ".join(said))
    for path, made in adapter.items():
        _check_one(where, f"adapter[{path!r}]", made, known[path])


def _check_one(where: str, name: str, made: Any, linear: AdaptedLinear) -> None:
    require_type(where, name, made, LowRankParams)
    for part, shape in linear.lora.shapes.items():
        t = getattr(made, part)
        check(where, join_path(name, part), detached(t), (*linear.lead, *shape), FLOATS)


def _check_ties(where: str, cfg: Any) -> None:
    tied = {path: pair for pair in ties(cfg).items() for path in pair}
    for linear in adapted(where, cfg):
        pair = tied.get(path := linear.at(join_path(INSIDE, "weight")))
        if pair is not None:
            fail(where, "cfg", f"one where {path} is not tied, as only one of the two would change", f"{pair[0]} tied to {pair[1]}")


def _moved(where: str, weight: Any, lora: LowRankParams, linear: AdaptedLinear, sign: float) -> Tensor:
    if not (isinstance(weight, Tensor) and weight.dtype in FLOATS):
        fail(
            where,
            f"params.{linear.path}: weight",
            "a float tensor",
            f"{describe(weight)}: merge before the weights are quantised, or funcops.low_precision.dense(params) first",
            TypeError,
        )
    dtype = wide(weight.dtype)
    with torch.no_grad():
        change = linear.lora.change(lora.a.to(dtype), lora.b.to(dtype))
        return weight.to(dtype).add(change, alpha=sign * linear.lora.scale).to(weight.dtype)
