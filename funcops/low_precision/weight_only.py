"""Linear layers whose weights are stored in few bits and decoded for each product: the frozen layers of QLoRA (arXiv 2305.14314).

    y = x d(w)^T + b        dx = dy d(w)        d: decode the codes to the dtype of x

    cfg = with_weight_only(cfg, NF4(double=True), skip=("head",))       # config to config
    params = quantize_weights(params, cfg)                              # once: codes in place of the weights

Params keep their paths, and residuals alias the codes. A decoded weight lives as long as one product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from funcops.engine.contract.by_config import class_by
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.contract.schema import open_node
from funcops.engine.contract.walk import Part, check_selection, matches, rewrite, steps, ties
from funcops.engine.errors import FLOATS, describe, fail, join_path, require_type
from funcops.engine.trees import at, has, put
from funcops.library.formats import NF4, Format, NF4Tensor, QTensor, nf4_tensor, quantize_tensor, stacked
from funcops.low_precision.weights import each_layer

T = TypeVar("T")
WeightFormat = Format | NF4
CODES = (QTensor, NF4Tensor)


def quantize_weight(weight: Tensor, format: WeightFormat) -> QTensor | NF4Tensor:
    """A weight [*, O, I] in few bits, by rows; each of several matrices has scales of its own. Raises `TypeError` or `ValueError`
    for a format that is neither a `Format` nor an `NF4`, and for anything but a float matrix.

    >>> import torch
    >>> from funcops.low_precision import Format, quantize_weight
    >>> quantize_weight(torch.ones(4, 64), Format("e2m1", (1, 32), "e8m0")).codes.shape
    torch.Size([4, 32])
    """
    where = "quantize_weight"
    _require_format(where, format)
    if isinstance(format, NF4):
        return nf4_tensor(where, weight, format)
    if not (isinstance(weight, Tensor) and weight.dim() >= 2 and weight.dtype in FLOATS):
        fail(where, "weight", "a float tensor [*, O, I]", describe(weight), TypeError)
    if 0 in weight.shape[:-2]:
        fail(where, "weight", "at least one matrix [O, I]", list(weight.shape))
    lead, made = weight.shape[:-2], [quantize_tensor(w, format, where=where) for w, _ in each_layer(weight, None)]
    for size in reversed(lead):
        made = [stacked(made[i : i + size]) for i in range(0, len(made), size)]
    return made[0]


def weight_only(op: Op, format: WeightFormat) -> Op:
    """The linear op with its weights in `format`, as `quantize_weights` makes them. Config, x, y and dx, with their shapes, dtypes
    and errors, are the op's own, and `init` draws the op's params; the gradient of a weight, where it is asked for, is dense.
    Raises `ValueError` for an op without linear layers; its forward raises `TypeError` for a weight in another form.

    >>> import torch
    >>> from funcops import LinearConfig, LinearParams, linear
    >>> from funcops.low_precision import NF4, quantize_weight, weight_only
    >>> low, cfg = weight_only(linear, NF4()), LinearConfig(64, 2, bias=False)
    >>> params = LinearParams(quantize_weight(torch.eye(2, 64), NF4()), None)
    >>> y, residuals = low.fwd(params, torch.ones(3, 64), cfg)
    >>> y[0], residuals.weight is params.weight
    (tensor([1., 1.]), True)
    """
    where = "weight_only"
    require_type(where, "op", op, Op)
    _require_format(where, format)
    config: Any = op.config
    if not config.linear_weights:
        fail(where, "op", "a linear layer or experts (of a model: with_weight_only(cfg, format), after with_lora)", op.name)
    return _weight_only(op, format)


@functools.lru_cache(maxsize=256)
def _weight_only(op: Op, format: WeightFormat) -> Op:
    name = f"weight_only({op.name})"

    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
        params = op.init(cfg, key=key, device=device, dtype=dtype)
        for path in cfg.linear_weights:
            params = put(params, path, quantize_weight(at(params, path), format))
        return params

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        require_config(f"{name}_fwd", cfg, op.config)
        if type(params) is not op.params:  # the op says what is wrong
            return op.fwd(params, x, cfg, needs=needs)  # type: ignore[no-any-return]
        codes, plain = {path: at(params, path) for path in cfg.linear_weights}, params
        for path, weight in codes.items():
            if not isinstance(weight, CODES) or weight.format != format:
                wanted = f"in {format.name}: quantize_weights(params, cfg) makes it"
                fail(f"{name}_fwd", f"params.{path}", wanted, describe(weight), TypeError)
            plain = put(plain, path, weight.dequantize())
        y, node = op.fwd(plain, x, cfg, needs=needs)
        if node is not None:
            held = {field: codes[path] for field, path in _fields(op, cfg).items() if getattr(node, field) is not None}
            node.set(**held)
        return y, node

    def opened(where: str, kept: Any, dy: Any, cfg: Any) -> Any:
        """A copy of the residuals with decoded weights."""
        node = open_node(where, kept, class_by(where, op.keeps, cfg), cfg, dy=dy)
        codes = {field: getattr(node, field) for field in _fields(op, cfg)}
        return node.copy(**{field: weight.dequantize() for field, weight in codes.items() if weight is not None})

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        return op.dgrad(opened(f"{name}_dgrad", residuals, dy, cfg), dy, cfg)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        return op.bwd(opened(f"{name}_bwd", residuals, dy, cfg), dy, cfg, into=into)

    return wrap(op, (weight_only, (op, format)), name=name, init=init, fwd=fwd, dgrad=dgrad, bwd=bwd)


def with_weight_only(cfg: Any, format: WeightFormat, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Any:
    """Return the config with the weights of its linear layers in `format`: of `linear`, `grouped_linear` and their layers over
    ranks, and of `experts`. Params keep their paths; `quantize_weights` makes them. `with_lora` may come before or after (for
    adapters on experts, before).

    `only`, `skip`: globs over the paths of steps, as in `with_recipe`. Steps that have a format keep it. Raises `ValueError` for a
    glob that matches no linear layer, and for a layer whose weight is tied: name it in `skip`; `TypeError` for one layer's config.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import NF4, with_weight_only
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(64, 128)), Step("head", linear, LinearConfig(128, 64))))
    >>> [step.op for step in with_weight_only(cfg, NF4(), skip=("head",)).steps]
    [weight_only(linear), linear]
    """
    where = "with_weight_only"
    _require_format(where, format)
    require_config(where, cfg)
    if cfg.linear_weights:
        fail(where, "cfg", "the config of a combinator (of one layer take weight_only(op, format))", type(cfg).__name__, TypeError)
    known = [part.path for part in steps(cfg) if part.cfg.linear_weights]
    check_selection(where, known, only, skip)
    tied = {path for pair in ties(cfg).items() for path in pair}

    def low(part: Part) -> tuple[Op, Any] | None:
        left = part.composite or not part.cfg.linear_weights or _format_of(part.op) is not None
        if left or (only and not matches(part.path, only)) or matches(part.path, skip):
            return None
        for weight in part.cfg.linear_weights:
            if join_path(part.path, weight) in tied:
                fail(where, "cfg", f"without a tie of {join_path(part.path, weight)}, or skip=({part.path!r},)", "one with it")
        return weight_only(part.op, format), part.cfg

    return rewrite(cfg, low)[1]


def _require_format(where: str, format: Any) -> None:
    if isinstance(format, type):
        fail(where, "format", "a Format or an NF4", f"the class {format.__name__}: call it", TypeError)
    require_type(where, "format", format, Format, NF4)


def quantize_weights(params: T, cfg: Any) -> T:
    """Return the params with the weights of each step from `with_weight_only` in its format; every other leaf is the same object,
    and so is a weight that is in its format. Decoded weights have the dtype that the weights had: cast the params before. Raises
    `ValueError` or `TypeError` for a config without such a step, and for params that lack one of its weights.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import NF4, quantize_weights, with_weight_only
    >>> cfg = with_weight_only(ChainConfig(steps=(Step("up", linear, LinearConfig(64, 128)),)), NF4(double=True))
    >>> params = quantize_weights(chain.init(cfg, key=random.key(0)), cfg)
    >>> params["up"].weight.codes.shape, params["up"].bias.shape
    (torch.Size([128, 32]), torch.Size([128]))
    """
    where = "quantize_weights"
    require_config(where, cfg)
    found = {join_path(p.path, w): _format_of(p.op) for p in steps(cfg, layers=True) if p.op for w in p.cfg.linear_weights}
    made: Any = params
    if not any(found.values()):
        fail(where, "cfg", "one that with_weight_only made", describe(cfg))
    for path, format in found.items():
        if format is None:
            continue
        if not has(params, path):
            fail(where, "params", f"a tree with {path}", describe(params))
        weight = at(params, path)
        if not (isinstance(weight, CODES) and weight.format == format):
            if not isinstance(weight, Tensor):
                fail(where, f"params.{path}", f"a float tensor, or in {format.name}", describe(weight), TypeError)
            made = put(made, path, quantize_weight(weight, format))
    return made  # type: ignore[no-any-return]


def _fields(op: Op, cfg: Any) -> dict[str, str]:
    """The fields of residuals that alias weights, and the paths of these in the params."""
    held = {name: str(field.alias).removeprefix("params.") for name, field in op.fields(cfg).items() if field.of_params}
    return {name: path for name, path in held.items() if path in cfg.linear_weights}


def _format_of(op: Op) -> WeightFormat | None:
    """The format of the weights of an op from `weight_only`, whatever was made of it; None for any other op."""
    made_by: Any = getattr(op.fwd, "made_by", (None, ()))
    make, args = made_by
    if make is weight_only:
        return args[1]  # type: ignore[no-any-return]
    return next((found for arg in args if isinstance(arg, Op) and (found := _format_of(arg)) is not None), None)
