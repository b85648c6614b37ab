"""Pytrees: dataclass nodes with named fields, known to optree (namespace "funcops") and to torch's own pytree.

None is a leaf everywhere, so a tree with an absent gradient has the structure of a tree with a present one. Every leaf
has a path such as `blocks.3.mlp.up.weight`.

>>> import dataclasses, torch
>>> from funcops import LinearParams, RouteParams, optim, trees
>>> tree = {"up": LinearParams(torch.ones(4, 3), None), "steps": (1, 2)}
>>> trees.paths(tree)["steps.1"], trees.at(tree, "up"), trees.has(tree, "down")
(2, LinearParams(weight=float32[4, 3], bias=None), False)
>>> [type(leaf).__name__ for leaf in trees.leaves(tree)], len(trees.tensors(tree)), trees.nbytes(tree)
(['int', 'int', 'Tensor', 'NoneType'], 1, 48)
>>> trees.tree_map(lambda a, b: (a, b), {"w": 1, "b": None}, {"w": 2, "b": 3})
{'w': (1, 2), 'b': (None, 3)}
>>> trees.tree_map_tensors(torch.zeros_like, tree)["up"].weight.sum(), trees.nothing_like(tree)["steps"]
(tensor(0.), (None, None))
>>> trees.tree_map_with_path(lambda path, leaf: path, tree)["up"].bias
'up.bias'
>>> trees.cast(tree, torch.bfloat16)["up"], trees.fake(tree["up"].weight, torch.float64).dtype
(LinearParams(weight=bfloat16[4, 3], bias=None), torch.float64)
>>> values, spec = trees.flatten(tree)
>>> trees.unflatten(spec, values)["up"].weight is tree["up"].weight, spec == trees.structure(tree)
(True, True)
>>> trees.same_structure({"w": 1, "b": None}, {"w": 2, "b": 3}), trees.same_structure({"w": 1}, {"w": (1,)})
(True, False)
>>> trees.show(trees.replace(tree["up"], bias=torch.zeros(4))), trees.constant_paths(RouteParams(torch.zeros(4)))
('LinearParams(weight=float32[4, 3], bias=float32[4])', {'bias'})
>>> trees.elements({"state": optim.adamw_init(tree["up"], optim.AdamWConfig())})
{'state.step': ['weight']}

Classes become nodes, an `Aside` is not part of a structure, and a node may count as one leaf, as a `QTensor` does:

>>> point, box = dataclasses.make_dataclass("Point", ["x", "y"]), type("Box", (list,), {})
>>> trees.register(point)
>>> trees.register_node(box, tuple, lambda node: None, lambda inside, _: box(inside), lambda node: ("inside",))
>>> trees.paths(box([point(1, trees.Aside("a note"))])), trees.Aside("a note") == trees.Aside("another")
({'inside.x': 1, 'inside.y': Aside()}, True)
>>> one = trees.stands_in(dataclasses.make_dataclass("One", ["codes", "scales"]))
>>> trees.stands_for_one(one(1, 2)), trees.stands_for_one(point(1, 2))
(True, False)
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from typing_extensions import dataclass_transform

from funcops.engine.backend.source import compile_source, exact
from funcops.engine.errors import (
    describe,
    describe_tree,
    fail,
    join_path,
    nearest,
    require_callable,
    require_dtype,
    require_flag,
    require_type,
)

NAMESPACE = "funcops"
FIELDS: dict[type, tuple[tuple[str, ...], ...]] = {}  # for each node class, the names of leaves, statics and hidden fields
T = TypeVar("T")


def leaf(shape: str, gradient: bool = True, each_of: str = "") -> Any:
    """A tensor field of a tree, None by default; `shape` documents it, as in `"[out, in]"`. `gradient`: whether it can have a
    gradient. `each_of`: another field, a tree; this one has an element for each of its tensors, in its order. Raises `TypeError`
    for a `gradient` or `each_of` of another type."""
    require_flag("leaf", gradient=gradient)
    require_type("leaf", "each_of", each_of, str)
    return dataclasses.field(default=None, metadata={"shape": shape, "constant": not gradient, "each_of": each_of})


def static(default: Any = None) -> Any:
    """A field that is not a leaf: hashable data that belongs to the tree's structure."""
    # by name alone, so that a node is rebuilt with its leaves by position
    return dataclasses.field(default=default, metadata={"static": True}, kw_only=True)


@dataclass_transform(field_specifiers=(leaf, static))
def tree(cls: type[T]) -> type[T]:
    """Class decorator: a slotted dataclass whose fields are leaves or subtrees, registered as a pytree node. Raises `TypeError`
    if `cls` is not a class.

    >>> import torch
    >>> from funcops.trees import leaf, same_structure, static, tree
    >>> @tree
    ... class GainParams:
    ...     weight: torch.Tensor = leaf("[D]")
    ...     name: str = static("")
    ...
    >>> GainParams(torch.ones(3)), same_structure(GainParams(None, name="a"), GainParams(None, name="b"))
    (GainParams(weight=float32[3]), False)
    """
    require_type("tree", "cls", cls, type)
    # no `eq`: leaves are tensors, which are compared by element
    made = dataclasses.dataclass(slots=True, eq=False, repr=False)(cls)
    made.__repr__ = show  # type: ignore[assignment]
    register(made)
    for mark, by_class in _marks.items():
        if said := {f.name: f.metadata[mark] for f in dataclasses.fields(made) if f.metadata.get(mark)}:  # type: ignore[arg-type]
            by_class[made] = said
    return made


_marks: dict[str, dict[type, dict[str, Any]]] = {"constant": {}, "each_of": {}}  # of `leaf`: by class, what its fields say


def elements(tree: Any) -> dict[str, list[str]]:
    """Find each leaf that has an element for each tensor of another field (`leaf(each_of=)`); return, by its path, the paths of
    these tensors in that field."""
    found, by_class = {}, _marks["each_of"]
    for path, node in paths(tree, is_leaf=lambda node: type(node) in by_class).items():
        for name, other in by_class.get(type(node), {}).items():
            found[join_path(path, name)] = [inner for inner, t in paths(getattr(node, other)).items() if t is not None]
    return found


def constant_paths(tree: Any) -> set[str]:
    """The paths of leaves that never have a gradient, such as the bias of a router."""
    by_class = _marks["constant"]
    nodes = paths(tree, is_leaf=lambda node: type(node) in by_class)
    # other leaves of the tree are in `nodes`, too, but in no table
    return {join_path(path, name) for path, node in nodes.items() for name in by_class.get(type(node), ())}


_stand_ins: set[type] = set()


def stands_in(cls: type[T]) -> type[T]:
    """Class decorator: a node of this class counts as the one leaf that it represents. It has `zero_gradient(dtype)`, an
    accumulator for gradients of that leaf, and `cast(dtype)`, which `cast` calls. Raises `TypeError` if `cls` is not a class."""
    require_type("stands_in", "cls", cls, type)
    _stand_ins.add(cls)
    return cls


def stands_for_one(node: Any) -> bool:
    """Whether `node` counts as one leaf."""
    return type(node) in _stand_ins


def dense(tree: Any) -> Any:
    """The tree with every node that stands for a tensor in few bits, such as a `QTensor`, replaced by that tensor.

    >>> import torch
    >>> from funcops.low_precision import Format, dense, quantize_tensor
    >>> dense({"w": quantize_tensor(torch.ones(1, 2), Format("e4m3")), "b": torch.zeros(1)})
    {'w': tensor([[1., 1.]]), 'b': tensor([0.])}
    """

    def in_few_bits(node: Any) -> bool:
        return stands_for_one(node) and hasattr(node, "dequantize")

    return tree_map(lambda node: node.dequantize() if in_few_bits(node) else node, tree, is_leaf=in_few_bits)


class Aside:
    """Data that travels with a tree's structure but is not part of it: equal to any other `Aside`, so that structures compare as if
    it were absent. A copy of a structure drops it."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Aside

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        return Aside, ()

    def __repr__(self) -> str:
        return "Aside()"


def register(cls: type, aside: str = "") -> None:
    """Make a dataclass a pytree node of optree and torch. Fields whose metadata says "hidden" are left out. `aside` names an
    attribute, an `Aside`, that a node rebuilt from new leaves gets as an argument of that name. Raises `TypeError` if `cls` is not
    a dataclass."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        fail("register", "cls", "a dataclass", describe(cls) if not isinstance(cls, type) else cls.__name__, TypeError)
    require_type("register", "aside", aside, str)
    fields = [f for f in dataclasses.fields(cls) if not f.metadata.get("hidden")]
    # the names are written into source below
    names = tuple(exact(f.name) for f in fields if not f.metadata.get("static"))
    statics = tuple(exact(f.name) for f in fields if f.metadata.get("static"))
    FIELDS[cls] = names, statics, tuple(exact(f.name) for f in dataclasses.fields(cls) if f.metadata.get("hidden"))

    def reading(of: tuple[str, ...]) -> str:
        return "(" + "".join(f"node.{name}, " for name in of) + ")"

    context = (*statics, aside) if aside else statics

    def rebuild(values: Iterable[Any], data: tuple[Any, ...]) -> Any:
        return cls(*values, **dict(zip(context, data, strict=True)))

    # Generated source, as in dataclasses: every walk over a tree calls this at every node.
    text = f"def flatten(node):\n    return {reading(names)}, {reading(context)}, names\n"
    _register(cls, compile_source(f"children of {cls.__name__}", text, {"names": names})["flatten"], rebuild)


def register_node(
    cls: type,
    children: Callable[[Any], tuple[Any, ...]],
    context: Callable[[Any], Any],
    rebuild: Callable[[Iterable[Any], Any], Any],
    entries: Callable[[Any], tuple[Any, ...]],
) -> None:
    """Register any class as a pytree node of optree and torch; `entries` names its children in paths. Raises `TypeError` if
    `cls` is not a class, or another argument is not a function."""
    require_type("register_node", "cls", cls, type)
    require_callable("register_node", children=children, context=context, rebuild=rebuild, entries=entries)
    _register(cls, lambda node: (children(node), context(node), entries(node)), rebuild)


def _register(cls: type, flatten: Callable[[Any], tuple[Any, Any, Any]], rebuild: Callable[[Iterable[Any], Any], Any]) -> None:
    def with_keys(node: Any) -> tuple[list[Any], Any]:
        children, context, entries = flatten(node)
        return [(torch_pytree.MappingKey(e), c) for e, c in zip(entries, children, strict=True)], context

    # optree calls with a node's data first, torch with its children
    optree.register_pytree_node(cls, flatten, lambda data, values: rebuild(values, data), namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten(node)[0]), flatten(node)[1]),
        rebuild,
        # `torch.export` saves structures by this name
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def show(node: Any) -> str:
    """A node as text, `LinearParams(weight=float32[4, 3], bias=None)`. Raises `TypeError` unless it is a node with named fields."""
    if type(node) not in FIELDS:
        fail("show", "node", "a node of a tree with named fields", describe(node), TypeError)
    names, *_ = FIELDS[type(node)]
    return f"{type(node).__name__}({', '.join(f'{name}={describe_tree(getattr(node, name))}' for name in names)})"


def replace(node: T, **changes: Any) -> T:
    """A copy of a tree node with some fields changed; the node itself stays as it is. Raises `TypeError` for anything but a
    node with named fields, `ValueError` for a field that it lacks."""
    if type(node) not in FIELDS:
        fail("replace", "node", "a node of a tree with named fields", describe(node), TypeError)
    known = [f.name for f in dataclasses.fields(node) if f.init]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            fail("replace", "changes", f"of fields among {', '.join(known)}", repr(name))
    # residuals compare an edit with the forward's tensors, and hand their marks on
    own: Any = getattr(type(node), "__replace__", dataclasses.replace)
    return own(node, **changes)  # type: ignore[no-any-return]


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """All leaves, including None, and nodes for which `is_leaf` is true. Raises `TypeError` if `is_leaf` is not a function."""
    if is_leaf is not None:
        require_callable("leaves", is_leaf=is_leaf)
    return optree.tree_leaves(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def tensors(tree: Any) -> list[Tensor]:
    """The leaves that are tensors, in the tree's order: dicts by sorted key."""
    return [x for x in leaves(tree) if isinstance(x, Tensor)]


def paths(tree: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Every leaf by its dotted path, in the tree's order; the path of a bare leaf is "". `is_leaf` says which nodes are leaves.
    Raises `TypeError` if `is_leaf` is not a function, `ValueError` if two leaves have the same path."""
    if is_leaf is not None:
        require_callable("paths", is_leaf=is_leaf)
    return _by_path("paths", "tree", tree, is_leaf)


def _by_path(
    where: str, name: str, tree: Any, is_leaf: Callable[[Any], bool] | None = None, error: type[Exception] = ValueError
) -> dict[str, Any]:
    """`paths` for a function whose own errors name it and its argument."""
    found, values, _ = optree.tree_flatten_with_path(tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    names = [_dotted(path) for path in found]
    by_path = dict(zip(names, values, strict=True))
    # as of {"a.b": ..., "a": {"b": ...}}, or of the keys 1 and "1"
    if len(by_path) != len(names):  # a dict would keep the last of them, and lose the others in silence
        twice = ", ".join(sorted(path for path, count in Counter(names).items() if count > 1))
        got = f"keys with dots, or of two types, that give two leaves the same path: {twice}"
        fail(where, name, "a tree with one leaf per path", got, error)
    return by_path


def _dotted(path: Iterable[Any]) -> str:
    # a key of a subclass of str may print as something else
    return ".".join([part if type(part) is str else str(exact(part)) for part in path])


def tree_map(fn: Callable[..., Any], tree: T, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Apply `fn` leaf by leaf to trees of one structure, to None leaves too, and to nodes for which `is_leaf` is true. Raises
    `TypeError` if `fn` is not a function."""
    if not callable(fn) or not (is_leaf is None or callable(is_leaf)):
        require_callable("tree_map", fn=fn, is_leaf=is_leaf or fn)
    given: Any = tree
    return optree.tree_map(fn, given, *rest, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)  # type: ignore[return-value]


def tree_map_tensors(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` as `tree_map` does, but to tensors only; other leaves stay. Raises `TypeError` if `fn` is not a function."""
    require_callable("tree_map_tensors", fn=fn)
    return tree_map(lambda x, *others: fn(x, *others) if isinstance(x, Tensor) else x, tree, *rest)


def tree_map_with_path(fn: Callable[..., Any], tree: T, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """Apply `fn` as `tree_map` does, giving it the leaf's dotted path first. Raises `TypeError` if `fn` is not a function."""
    if not callable(fn) or not (is_leaf is None or callable(is_leaf)):
        require_callable("tree_map_with_path", fn=fn, is_leaf=is_leaf or fn)
    given: Any = tree

    def named(path: Any, *values: Any) -> Any:
        return fn(_dotted(path), *values)

    return optree.tree_map_with_path(  # type: ignore[return-value]
        named, given, *rest, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
    )


def cast(tree: T, dtype: torch.dtype) -> T:
    """The tree with every floating tensor in `dtype`; a tensor that already has it is the same object. Quantised values
    and their scales stay as they are. Raises `TypeError` if `dtype` is not a floating dtype, and for a leaf of 4 bits."""
    require_type("cast", "dtype", dtype, torch.dtype)
    if not dtype.is_floating_point or dtype is PAIRS:
        fail("cast", "dtype", "a floating dtype of at least 8 bits", dtype, TypeError)

    def changes(t: Tensor) -> bool:
        return t.is_floating_point() and t.dtype is not dtype

    found = [t for t in leaves(tree, is_leaf=stands_for_one) if isinstance(t, Tensor)]
    others = [t for t in found if changes(t)]
    # torch would refuse them without a path
    _no_pairs("cast", "tree", others, tree)
    made = []
    if others and all([_copied_at_once(t) for t in others]):
        made = [torch.empty_like(t, dtype=dtype) for t in others]
        torch._foreach_copy_(made, others)  # one launch for all tensors: on a GPU it costs the host no more than a launch for one
    # in the order of leaves, as the map below takes them
    ready = iter(made)

    def one(t: Any) -> Any:
        if stands_for_one(t):
            return t.cast(dtype)
        if not isinstance(t, Tensor) or not changes(t):
            return t
        return next(ready) if made else t.to(dtype)

    return tree_map(one, tree, is_leaf=stands_for_one)


PAIRS = torch.float4_e2m1fn_x2  # two numbers in a byte: torch has no arithmetic with it, nor a cast


def _no_pairs(where: str, name: str, found: Iterable[Any], tree: Any) -> None:
    """Raise `TypeError` if one of the leaves `found` in `tree` holds pairs of 4-bit numbers."""
    if any([isinstance(t, Tensor) and t.dtype is PAIRS for t in found]):
        path = next(path for path, t in paths(tree).items() if isinstance(t, Tensor) and t.dtype is PAIRS)
        remedy = "decode it first (funcops.low_precision.dense, of a tree with its scales)"
        fail(where, join_path(name, path), "a tensor of at least 8 bits", f"{describe(paths(tree)[path])}: {remedy}", TypeError)


def _copied_at_once(t: Tensor) -> bool:
    recorded = t.requires_grad and torch.is_grad_enabled()
    return t.is_cuda and not recorded and type(t) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def fake(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor with t's shape, strides and device (the CPU for a meta tensor), to compute shapes
    under FakeTensorMode. Raises `TypeError` if `t` is not a tensor or `dtype` not a dtype."""
    require_type("fake", "t", t, Tensor)
    require_dtype("fake", dtype, floating=False)
    device = "cpu" if t.is_meta else t.device
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype or t.dtype, device=device)


def nothing_like(tree: T) -> T:
    """The same structure with every leaf None: a tree of absent gradients."""
    return tree_map(lambda _: None, tree)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have the same nodes, keys and static fields; their leaves may differ."""
    wanted, got = structure(a), structure(b)
    return _alike(wanted, got) if torch.compiler.is_dynamo_compiling() else wanted == got


def _alike(a: Any, b: Any) -> bool:
    """Whether structures, in the compiler's form, are equal: they hold functions, which torch 2.11 cannot compare while tracing."""
    if a.type is not b.type or a._metadata != b._metadata or a.entries() != b.entries():
        return False
    return all([_alike(x, y) for x, y in zip(a.children(), b.children(), strict=True)])


def structure(tree: Any) -> Any:
    """The tree without its leaves, as optree's PyTreeSpec: equal where two trees have the same nodes, keys and static fields."""
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """All leaves, None included, and the structure: `leaves` and `structure` in one walk."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(spec: Any, values: Iterable[Any]) -> Any:
    """A tree of structure `spec` with these leaves. Raises `TypeError` if `spec` is not a structure from `flatten`."""
    if not (torch.compiler.is_dynamo_compiling() or isinstance(spec, optree.PyTreeSpec)):  # Dynamo has its own class for structures
        fail("unflatten", "spec", "a structure from `flatten`", describe(spec), TypeError)
    return _unflatten("unflatten", spec, values)


def _unflatten(where: str, spec: Any, values: Any) -> Any:
    try:
        found = list(values)
    except TypeError:
        fail(where, "values", "an iterable of leaves", describe(values), TypeError)
    # optree would raise without the name of the function that was called
    if len(found) != spec.num_leaves:
        fail(where, "values", f"{spec.num_leaves} leaves", len(found))
    return optree.tree_unflatten(spec, found)


def with_leaves(tree: T, values: Iterable[Any]) -> T:
    """A tree of the same structure with other leaves, in the order of `leaves`.

    >>> from funcops.trees import with_leaves
    >>> with_leaves({"a": (1, None)}, [3, 4])
    {'a': (3, 4)}
    """
    return _unflatten("with_leaves", structure(tree), values)  # type: ignore[no-any-return]


def nbytes(tree: Any) -> int:
    """Bytes of the distinct storages behind the tree's tensors: an alias counts once."""
    storages = {}
    for t in tensors(tree):
        storage = t.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def at(tree: Any, path: str) -> Any:
    """The leaf or subtree at a dotted path. Raises `ValueError`, with the paths that exist, if `path` does not, `TypeError` if it
    is not a string."""
    require_type("at", "path", path, str)
    node, rest = tree, path
    try:
        while rest:
            # only the dict can say where a key with dots ends
            if isinstance(node, dict):
                key, rest = _key(node, rest)
                node = node[key]
                continue
            name, _, rest = rest.partition(".")
            node = node[int(name)] if isinstance(node, (tuple, list)) else getattr(node, name)
    except (KeyError, IndexError, ValueError, AttributeError):
        fail("at", "path", f"one of {', '.join(paths(tree)) or '(no leaves)'}", repr(path))
    return node


def _key(tree: dict[Any, Any], path: str) -> tuple[Any, str]:
    """The key of a dict with which a path begins, and the rest of the path. A key may be a number, or contain dots.
    Raises `ValueError` if no key matches and the path does not begin with a number."""
    for dots in range(path.count(".") + 1):  # the longest first, as "a" and "a.2" may be keys of one dict
        key = path.rsplit(".", dots)[0]
        if key in tree:
            return key, path[len(key) + 1 :]
    name, _, rest = path.partition(".")
    return int(name), rest


def has(tree: Any, path: str) -> bool:
    """Whether a leaf or subtree exists at a dotted path, by one walk down the path. Raises `TypeError` for a path that is not a
    string."""
    require_type("has", "path", path, str)
    node, rest = tree, path
    # at least once, so that "" is not a path
    while rest or node is tree:
        name, _, further = rest.partition(".")
        if isinstance(node, dict):
            try:
                key, further = _key(node, rest)
                node = node[key]
            except (KeyError, ValueError):
                return False
        elif isinstance(node, (tuple, list)) and name in map(str, range(len(node))):  # `int` also takes "-1" and "01"
            node = node[int(name)]
        # not by `hasattr`: methods and statics are not parts of a tree
        elif type(node) in FIELDS and name in FIELDS[type(node)][0]:
            node = getattr(node, name)
        else:
            return False
        rest = further
    return True


def put(tree: Any, path: str, value: Any) -> Any:
    """A copy of the tree with the leaf at a dotted path replaced; all other leaves are the same objects. Raises `ValueError`
    for a path that does not exist.

    >>> from funcops.trees import put
    >>> put({"a": (1, 2)}, "a.1", 3)
    {'a': (1, 3)}
    """
    if not isinstance(path, str) or not path or not has(tree, path):
        require_type("put", "path", path, str)
        fail("put", "path", f"one of {nearest(str(path), paths(tree)) or '(no leaves)'}", repr(path))
    return _put(tree, path, value)


def _put(tree: Any, path: str, value: Any) -> Any:
    if isinstance(tree, dict):
        key, rest = _key(tree, path)
        # a subclass keeps what else it holds, as residuals of a combinator their config
        made = {**tree} if type(tree) is dict else copy.copy(tree)
        made[key] = _put(tree[key], rest, value) if rest else value
        return made
    name, _, rest = path.partition(".")
    if isinstance(tree, tuple):
        i = int(name)
        changed = (*tree[:i], _put(tree[i], rest, value) if rest else value, *tree[i + 1 :])
        return type(tree)._make(changed) if hasattr(tree, "_make") else changed  # type: ignore[attr-defined]
    return replace(tree, **{name: _put(getattr(tree, name), rest, value) if rest else value})


@tree
class WithExtras:
    """x at a combinator's boundary: the main value, and named extra inputs.

    >>> import torch
    >>> from funcops import WithExtras
    >>> x = WithExtras(torch.ones(1), {"positions": torch.arange(3)})
    >>> x.main, x.extras["positions"]
    (tensor([1.]), tensor([0, 1, 2]))
    """

    main: Any = leaf("x")
    extras: Any = leaf("{name: tensor}")
