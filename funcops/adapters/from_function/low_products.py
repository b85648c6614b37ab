"""The linear products of a traced module: in low precision (`op_from_module(recipe=)`), or measured (`quantization_report`).

A product is a linear layer's if it is what `F.linear` computes of a parameter [O, I] of the module; it has the path of the module
that computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from funcops.adapters.autograd.differentiable import run
from funcops.adapters.from_function.formulas import like
from funcops.adapters.from_function.joint import Joint, Like
from funcops.adapters.from_function.matched import Call, Finder, Formula, Forward, Part, with_parts
from funcops.engine.contract.walk import check_globs, check_selection, matches
from funcops.engine.errors import FLOATS, describe, fail, few, require
from funcops.library.formats.recipes import low_form_of, require_recipe
from funcops.library.ops.linear import LinearConfig, LinearParams


def _examples(dtype: torch.dtype) -> Sequence[tuple[Like, ...]]:
    rows = [like(dtype, *[2, 3, 4, 5][:rank], 8) for rank in range(1, 5)]
    return [(x, like(dtype, 6, 8), *bias) for x in rows for bias in ((), (like(dtype, 6),))]


def _linear(out: Like, x: Like, w: Like, b: Like | None = None) -> Call | None:
    right = x.shape[-1:] == w.shape[1:] and (b is None or b.shape == w.shape[:1]) and 0 not in (*x.shape, *w.shape)
    return F.linear if right else None


LINEARS = (Formula(F.linear, _examples, (), _linear, FLOATS),)


class Product(NamedTuple):
    """A linear layer's product: its path, and the part of the forward that it is, from x, w and perhaps b."""

    path: str
    node: fx.Node
    part: Part


def products_of(forward: Forward, params: int) -> Iterator[Product]:
    """The products of a forward whose first `params` leaves are parameters, in its order."""
    found, weights = Finder(LINEARS, lambda t: True)(forward), set(forward.leaves[:params])
    for node in forward.nodes:
        if node in found and found[node].inputs[1] in weights:
            yield Product(node.meta.get("custom", {}).get("path", ""), node, found[node])


class LowProducts:
    """The linear products of a module of so many parameters, in low precision."""

    def __init__(self, where: str, recipe: Any, skip: Any, params: int) -> None:
        self.where, self.recipe, self.skip, self.params = where, recipe, skip, params

    def __call__(self, forward: Forward) -> dict[fx.Node, Part]:
        every, refused = list(products_of(forward, self.params)), dict[str, str]()
        check_selection(self.where, [one.path for one in every], (), self.skip)
        found: dict[fx.Node, Part] = {}
        for path, node, part in every:
            if matches(path, self.skip):
                continue
            out_features, in_features = part.inputs[1].meta["val"].shape
            cfg: Any = LinearConfig(in_features, out_features, bias=len(part.inputs) == 3)
            form: Any = low_form_of(cfg)
            try:
                _, op, low = form(cfg, self.recipe)
            except ValueError as error:  # its sizes
                refused[path] = str(error)
                continue
            found[node] = part._replace(call=functools.partial(_call, op, low))
        if not found:
            got = "; ".join([f"{path}: {why}" for path, why in refused.items()]) or f"products {few([one.path for one in every])}"
            fail(self.where, "recipe", "for a module with linear layers that take it", got)
        return found


def _call(op: Any, cfg: Any, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return run(op, LinearParams(w, b), x, cfg)  # type: ignore[no-any-return]


def check_recipe(where: str, recipe: Any, skip: Any) -> None:
    """Raise unless a graph can have the recipe, which then is the same in every step."""
    check_globs(where, "skip", skip)
    if recipe is None:
        require(not skip, where, "skip", "() without a recipe", repr(skip))
        return
    require_recipe(where, recipe)
    if recipe.delayed:
        expected = "one without state, such as Fp8Current, which has the same formats"
        fail(where, "recipe", expected, type(recipe).__name__)
    if recipe.stochastic:
        fail(where, "recipe", "one that rounds to nearest (stochastic=False)", describe(recipe))


class Seen(NamedTuple):
    """A forward that autograd has followed: its results, and of each linear product its path, x, w and result."""

    ys: list[Tensor]
    products: list[tuple[str, Tensor, Tensor, Tensor]]

    @staticmethod
    def of(joint: Joint, leaves: Sequence[Tensor], asked: Sequence[bool], params: int) -> Seen | None:
        """Run a traced forward. None if its backward is not autograd's of its operators."""
        forward = Forward(joint.graph, len(leaves))
        every = {one.node: one for one in products_of(forward, params)}
        parts, products = {node: one.part for node, one in every.items()}, list[tuple[str, Tensor, Tensor, Tensor]]()
        if with_parts(joint, leaves, asked, lambda _: parts) is None:
            return None
        values: dict[fx.Node, Any] = {
            node: getattr(joint.graph, str(node.target)) for node in forward.nodes if node.op == "get_attr"
        }
        for node, t, ask in zip(forward.leaves, leaves, asked, strict=True):
            values[node] = t.detach().requires_grad_() if ask else t

        def done(node: fx.Node, value: Any) -> None:
            if node in every:
                x, w = [values[one] for one in every[node].part.inputs[:2]]
                products.append((every[node].path, x, w, value))

        with torch.enable_grad(), torch.random.fork_rng():
            return Seen(forward.run(values, parts, done), products)

    def operands(self, dys: Sequence[Any]) -> list[tuple[str, Tensor, Tensor, Tensor]]:
        """The path, x, w and dy of each product that gets a gradient."""
        pairs = [(y, dy) for y, dy in zip(self.ys, dys, strict=True) if y.requires_grad and dy is not None]
        trained = [one for one in self.products if one[3].requires_grad]
        ys, given = [y for y, _ in pairs], [dy for _, dy in pairs]
        found = torch.autograd.grad(ys, [one[3] for one in trained], given, allow_unused=True) if pairs and trained else ()
        rows = zip(trained, found, strict=True) if found else ()
        return [(path, x.detach(), w.detach(), dy) for (path, x, w, _), dy in rows if dy is not None]
