"""The state of an optimiser in 8 bits, by blocks, as explicit trees.

    state = quantize_state(adamw_init(params, cfg))                      # 2 bytes a param in place of 8
    params, state = with_quantized_state(adamw_update)(params, grads, state, cfg)

A block of 256 elements is divided by its largest magnitude, and each element rounded to the nearest of 256 numbers whose
distances grow with their size: dynamic tree quantisation, as in bitsandbytes (arXiv:2110.02861, arXiv:1511.04561). Means
of squares get numbers without a sign.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.trace_safe_cache import remember
from funcops.engine.errors import FLOATS, check, describe, fail, join_path, require_callable, require_count, require_flag
from funcops.engine.trees import leaf, paths, stands_in, static, tensors, tree, tree_map, with_leaves
from funcops.optim._rows import open_into, open_trees

T = TypeVar("T")
BLOCK = 256
CHUNK = 1 << 24  # elements whose state is decoded at once, by whole leaves
UNSIGNED = ("exp_avg_sq",)  # fields of states that hold means of squares


@stands_in
@tree
class BlockTensor:
    """A tensor in 8 bits: a tree node that counts as the one leaf that it stands for. `absmax`: the largest magnitude of each block
    of 256 elements, in the order of memory, float64 if `dtype` is.

    >>> import torch
    >>> from funcops.optim import BlockTensor, SGDConfig, quantize_state, sgd_init
    >>> state = quantize_state(sgd_init({"w": torch.ones(64, 64)}, SGDConfig(momentum=0.9)))
    >>> isinstance(state.momentum["w"], BlockTensor), state.momentum["w"].absmax.shape
    (True, torch.Size([16]))
    """

    codes: Tensor = leaf("uint8")
    absmax: Tensor = leaf("[blocks], float32 or float64")
    dtype: torch.dtype = static()
    signed: bool = static()

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def zero_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros like the tensor that it stands for."""
        return torch.zeros_like(self.codes, dtype=dtype or self.dtype)

    def cast(self, dtype: torch.dtype) -> BlockTensor:
        """Return itself: a cast does not change codes."""
        return self

    def dequantize(self) -> Tensor:
        """Codes times the largest magnitudes, rounded once to `dtype`."""
        values = _tables(self.signed, self.codes.device)[0][self.codes.reshape(-1).int()]
        scales = self.absmax.repeat_interleave(BLOCK)[: values.numel()]
        return (values * scales).reshape(self.codes.shape).to(self.dtype)


def code_book(signed: bool = True) -> Tensor:
    """The 256 numbers of dynamic tree quantisation, in order, float32: 0, 1, and for i from 0 to 6 the midpoints of 2^i (without a
    sign: 2^(i + 1)) equal parts of [0.1, 1], times 10^(i - 6), with both signs or one. Raises `TypeError` unless
    `signed` is a bool.

    >>> from funcops.optim import code_book
    >>> code_book().shape, code_book()[127].item(), code_book()[-1].item(), code_book(False)[0].item()
    (torch.Size([256]), 0.0, 1.0, 0.0)
    """
    require_flag("code_book", signed=signed)
    found = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        middles = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values


_BOOKS = {signed: code_book(signed) for signed in (True, False)}
_there: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}


def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The code book on a device, and the numbers halfway between its neighbours."""
    found = _there.get((signed, device))
    if found is None:
        book = _BOOKS[signed]
        found = remember(_there, (signed, device), (book.to(device), ((book[1:] + book[:-1]) / 2).to(device)))
    return found


def _quantized(t: Tensor, signed: bool, absmax: Tensor | None = None) -> BlockTensor:
    flat = t.detach().reshape(-1).to(wide(t.dtype))
    blocks = _blocks(flat)
    absmax = blocks.abs().amax(1) if absmax is None else absmax
    absmax = torch.where(absmax.isfinite(), absmax, torch.nan)  # an infinity of either sign would decode to a positive one
    scaled = (blocks / torch.where(absmax == 0, 1, absmax)[:, None]).view(-1)[: flat.numel()]
    codes = torch.bucketize(scaled.float(), _tables(signed, t.device)[1]).to(torch.uint8)
    return BlockTensor(codes.view(t.shape), absmax, dtype=t.dtype, signed=signed)


def _blocks(t: Tensor) -> Tensor:
    flat = t.detach().reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _restored(t: Tensor, signed: bool) -> BlockTensor:
    """A tensor in 8 bits, so that a block which was decoded from 8 bits is decoded to the same numbers again. The code book has 1,
    but not -1: where a block's largest is negative, its scale was larger than any element, and is looked for here."""
    made = _quantized(t, signed)
    if not signed:
        return made
    near, absmax = (made.absmax / -_BOOKS[True][0].item()).to(t.dtype), made.absmax
    ends = [torch.nextafter(near, torch.full_like(near, end)) for end in (0.0, torch.inf)]
    for one in (near, *ends, made.absmax):  # the last that fits counts
        scale = one.to(absmax.dtype)
        fits = _blocks(_quantized(t, signed, scale).dequantize() != t).any(1).logical_not()
        absmax = torch.where(fits, scale, absmax)
    return _quantized(t, signed, absmax)


def quantize_state(state: T, *, min_size: int = 4096) -> T:
    """The state of an optimiser with every float tensor of at least `min_size` elements in its trees like params as a
    `BlockTensor`. Counts of steps stay; nothing is shared with the given state. A block with a value that is not finite becomes
    NaN. Raises `TypeError` for anything but the state of an optimiser.

    >>> import torch
    >>> from funcops.optim import AdamWConfig, adamw_init, dequantize_state, quantize_state
    >>> state = quantize_state(adamw_init({"w": torch.ones(64, 64), "b": torch.ones(4)}, AdamWConfig()))
    >>> type(state.exp_avg["w"]).__name__, state.exp_avg_sq["w"].signed, state.exp_avg["b"].shape
    ('BlockTensor', False, torch.Size([4]))
    >>> torch.equal(dequantize_state(state).exp_avg["w"], torch.zeros(64, 64))
    True
    """
    require_count("quantize_state", 0, min_size=min_size)

    def one(signed: bool, t: Any) -> Any:
        big = isinstance(t, Tensor) and t.is_floating_point() and t.numel() >= min_size
        return _quantized(t, signed) if big else _copied(t)

    return _mapped("quantize_state", state, lambda name, tree: tree_map(functools.partial(one, name not in UNSIGNED), tree))


def dequantize_state(state: T) -> T:
    """The state with every `BlockTensor` as the tensor that it stands for. Raises as `quantize_state` does."""
    return _mapped("dequantize_state", state, lambda name, tree: tree_map(lambda t: _copied(_dense(t), t), tree, is_leaf=_is_coded))


def coded_paths(tree: Any) -> list[str]:
    return [path for path, node in _by_path(tree).items() if type(node) is BlockTensor]


def decoded(tree: T) -> T:
    """The tree with every `BlockTensor` as the tensor that it stands for, on the CPU: no device holds more than one of them."""
    return tree_map(lambda node: node.dequantize().cpu() if type(node) is BlockTensor else node, tree, is_leaf=_is_coded)


def wide_like(tree: T) -> T:
    """The tree with a tensor of the shape and dtype of each `BlockTensor`, on the CPU, which takes no memory."""
    one = lambda node: torch.zeros((), dtype=node.dtype).expand(node.shape) if type(node) is BlockTensor else node  # noqa: E731
    return tree_map(one, tree, is_leaf=_is_coded)


def encoded_like(tree: T, like: T, device: str | torch.device) -> T:
    """The tree with each tensor in 8 bits whose leaf of `like` is a `BlockTensor`, on that leaf's device, or `device` if it is the
    meta device."""

    def one(node: Any, t: Any) -> Any:
        if type(node) is not BlockTensor:
            return t
        return _restored(t.to(device if node.codes.is_meta else node.device), node.signed)

    return tree_map(one, like, tree, is_leaf=_is_coded)


def _copied(t: Any, source: Any = None) -> Any:
    """A copy of a tensor, unless it was made from `source`; any other leaf as it is."""
    return t.clone() if isinstance(t, Tensor) and (source is None or source is t) else t


def _is_coded(node: Any) -> bool:
    return type(node) is BlockTensor


def _dense(node: Any) -> Any:
    return node.dequantize() if type(node) is BlockTensor else node


def _fields(where: str, state: Any) -> dict[str, Any]:
    """The trees like params in a state, by field."""
    if not dataclasses.is_dataclass(state) or isinstance(state, type) or not type(state).__name__.endswith("State"):
        fail(where, "state", "the state of an optimiser", describe(state), TypeError)
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.init and f.name != "step"}


def _mapped(where: str, state: T, fn: Callable[[str, Any], Any]) -> T:
    fields, step = _fields(where, state), getattr(state, "step", None)
    if step is not None:
        check(where, "state.step", step, (...,), torch.float32)
    for name, own in fields.items():
        for path, t in _by_path(own).items():
            if t is not None and type(t) is not BlockTensor:
                check(where, join_path(f"state.{name}", path), t, (...,), FLOATS)
    found = {name: fn(name, tree) for name, tree in fields.items()}
    return dataclasses.replace(state, **found, **({} if step is None else {"step": step.clone()}))  # type: ignore[type-var]


def with_quantized_state(update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """The update of an optimiser, such as `adamw_update`, for a state from `quantize_state`: the same arguments, results, errors.

    Some leaves at a time, at most 2^24 elements or one leaf: their state is decoded, updated, and rounded again; so a step takes no
    more memory than that besides. Leaves that are not in 8 bits give the bits of `update`. `in_place` writes codes into the state's
    tensors. Raises `TypeError` if `update` is not callable.

    >>> import torch
    >>> from funcops.optim import AdamWConfig, adamw_init, adamw_update, quantize_state, with_quantized_state
    >>> params, cfg = {"w": torch.ones(64, 64)}, AdamWConfig(lr=0.1, weight_decay=0.0)
    >>> state = quantize_state(adamw_init(params, cfg))
    >>> params, state = with_quantized_state(adamw_update)(params, {"w": torch.ones(64, 64)}, state, cfg)
    >>> params["w"][0, 0], type(state.exp_avg["w"]).__name__
    (tensor(0.9000), 'BlockTensor')
    """
    require_callable("with_quantized_state", update=update)
    where = getattr(update, "__name__", "update")

    @functools.wraps(update)
    def quantized(params: Any, grads: Any, state: Any, cfg: Any, **options: Any) -> tuple[Any, Any]:
        in_place = options.get("in_place", False)
        fields = _fields(where, state)
        _check(where, params, grads, fields, options)
        step = getattr(state, "step", None)
        every = {name: _by_path(tree) for name, tree in {"params": params, "grads": grads, **fields}.items()}
        also = {name: _by_path(options.pop(name)) for name in ("decay", "into") if options.get(name) is not None}
        there = [path for path, p in every["params"].items() if p is not None]
        if step is not None:
            check(where, "state.step", step, (len(there),), torch.float32)
        counts = [] if step is None else [step.clone() if not in_place else step]
        results: dict[str, dict[str, Any]] = {name: dict(trees) for name, trees in every.items() if name != "grads"}
        done = 0
        for names in _chunks(there, every["params"]):
            # in the order of the tree, and of counts: a plain dict is flattened by sorted keys, and "10" comes before "2"
            own: dict[str, Any] = {field: OrderedDict((path, _dense(every[field][path])) for path in names) for field in fields}
            at = slice(done, done + len(names))
            done += len(names)
            if counts:
                own["step"] = counts[0][at]
            given = [OrderedDict((path, every[name][path]) for path in names) for name in ("params", "grads")]
            given_also = {name: OrderedDict((path, trees[path]) for path in names) for name, trees in also.items()}
            new, after = update(*given, type(state)(**own), cfg, **given_also, **options)
            results["params"].update(new)
            for field in fields:
                kept = getattr(after, field)
                given_grad = [path for path in names if every["grads"][path] is not None]  # the others are skipped
                results[field].update({path: _again(every[field][path], kept[path], in_place) for path in given_grad})
            if counts and not in_place:
                counts[0][at] = after.step
        if in_place:
            return params, state
        rebuilt = {name: with_leaves(params, list(of.values())) for name, of in results.items()}
        more = {"step": counts[0]} if counts else {}
        new_params = rebuilt.pop("params")
        return new_params, dataclasses.replace(state, **rebuilt, **more)

    return quantized


def _by_path(tree: Any) -> dict[str, Any]:
    return paths(tree, is_leaf=_is_coded)


def _again(before: Any, after: Any, in_place: bool) -> Any:
    """The new value of a leaf of state in the form that it had; written into its tensors if `in_place`."""
    if type(before) is not BlockTensor:
        return after
    made = _quantized(after, before.signed)
    if in_place:
        before.codes.copy_(made.codes)
        before.absmax.copy_(made.absmax)
        return before
    return made


def _chunks(names: list[str], params: dict[str, Any]) -> Iterator[list[str]]:
    found: list[str] = []
    size = 0
    for name in names:
        if found and size + params[name].numel() > CHUNK:
            yield found
            found, size = [], 0
        found.append(name)
        size += params[name].numel()
    if found:
        yield found


def _check(where: str, params: Any, grads: Any, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise what the update would raise for trees that do not fit, before any of their leaves is changed."""

    def stand_in(node: Any) -> Any:
        """A tensor of that shape that takes no memory."""
        return node.codes.new_zeros((), dtype=node.dtype).expand(node.shape) if type(node) is BlockTensor else node

    states = {f"state.{name}": tree_map(stand_in, tree, is_leaf=_is_coded) for name, tree in fields.items()}
    states = {name: tree for name, tree in states.items() if tensors(tree) or not tensors(params)}
    open_trees(where, {"params": params, "grads": grads, **states}, options.get("decay"), True)
    if options.get("into") is not None:
        open_into(where, params, grads, options["into"])
