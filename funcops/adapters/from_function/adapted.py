"""`with_lora` of an op that `op_from_module` made: adapters beside the linear products of a module, by path.

y = base(x) + (alpha / rank) x a^T b^T
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx

from funcops.adapters.autograd.differentiable import run
from funcops.adapters.from_function.joint import operator_name
from funcops.adapters.from_function.low_products import products_of
from funcops.adapters.from_function.matched import Forward, Part
from funcops.engine import random
from funcops.engine.contract.walk import check_selection, matches
from funcops.engine.errors import fail, few, join_path
from funcops.library.ops.low_rank import LowRankConfig, LowRankParams, low_rank


class Layer(NamedTuple):
    """A linear layer: the name of its weight, and the config of its adapter."""

    weight: str
    cfg: LowRankConfig


Layers = dict[str, Layer]  # by path


def layers_in(graph: fx.Graph, params: Mapping[str, Any]) -> dict[str, str]:
    """The names of the weights [O, I] by the paths of the modules that read them, in a graph whose first leaves are params."""
    found: dict[str, str] = {}
    for name, node in zip(params, graph.find_nodes(op="placeholder")[: len(params)], strict=True):
        if node.meta["val"].dim() == 2:
            readers = [user for user in node.users if not operator_name(user).startswith("embedding")]
            found.update({path: name for user in readers if (path := user.meta.get("custom", {}).get("path")) is not None})
    return found


def adapted(
    where: str,
    known: Mapping[str, str],
    params: Mapping[str, Tensor],
    before: Layers,
    rank: int,
    targets: Sequence[str],
    scale: float,
) -> Layers:
    """The layers with adapters, and those whose paths match one of the targets."""
    check_selection(where, list(known), targets, ())
    chosen = {path: name for path, name in known.items() if matches(path, targets)}
    if twice := [path for path in chosen if path in before]:
        fail(where, "targets", "globs over layers without an adapter", few(twice))
    made: Layers = {}
    for path, name in chosen.items():
        out_features, in_features = params[name].shape
        made[path] = Layer(name, LowRankConfig(in_features, out_features, rank, scale=scale))
    return before | made


def names_of(layers: Layers) -> list[str]:
    return [join_path(join_path(path, "lora"), leaf) for path in layers for leaf in ("a", "b")]


def adapters(layers: Layers, params: Mapping[str, Tensor], key: Any, device: Any, dtype: Any) -> dict[str, Tensor]:
    """The params of new adapters, each by its own key, beside these params."""
    found: dict[str, Tensor] = {}
    for path, (weight, cfg) in layers.items():
        own: Any = random.fold_in(random.key(0) if key is None else key, random.path_id(path))
        like = params[weight]
        made = low_rank.init(cfg, key=own, device=device or like.device, dtype=dtype or like.dtype)
        found.update(zip(names_of({path: layers[path]}), (made.a, made.b), strict=True))
    return found


def parts_of(where: str, forward: Forward, params: int, layers: Layers, low: Mapping[fx.Node, Part]) -> dict[fx.Node, Part]:
    """The products of these layers with their adapters, whose leaves follow so many params."""
    leaves = iter(forward.leaves[params:])
    own = {path: (next(leaves), next(leaves)) for path in layers}
    found: dict[fx.Node, Part] = {}
    for path, node, plain in products_of(forward, params):
        if path in layers:
            base = low.get(node, plain)
            call = functools.partial(_call, base.call if node in low else F.linear, layers[path].cfg)
            found[node] = base._replace(inputs=(*base.inputs, *own[path]), call=call)
    if missing := layers.keys() - {one.path for one in products_of(forward, params)}:
        fail(where, "targets", "globs over products that F.linear computes of a parameter", few(sorted(missing)))
    return found


def _call(base: Any, cfg: LowRankConfig, x: Tensor, *given: Tensor) -> Tensor:
    *own, a, b = given
    return base(x, *own) + run(low_rank, LowRankParams(a, b), x, cfg)  # type: ignore[no-any-return]
