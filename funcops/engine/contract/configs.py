"""Configs: frozen data, all that is static about an op, with checked fields and a cached hash; and hooks that generic code calls.

`OpConfig` is the base of every op's config, `Composite` the base of every combinator's. Each hook has a default, for an op that
does not override it. `docs/your-own-rewrite.md` shows how a walk or a rewrite of a model's config uses them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from typing_extensions import Self, dataclass_transform

from funcops.engine.backend.source import exact
from funcops.engine.contract.trace_safe_cache import given_while_tracing, number_while_tracing, reading
from funcops.engine.errors import describe, fail, in_html, require_type
from funcops.engine.trees import constant_paths, paths, stands_for_one

__all__ = ["Composite", "OpConfig", "Replace", "Width", "config", "fields_of", "found_once", "require_config"]


WIDTH, INDENT = 100, "    "


def shown(cfg: Any) -> str:
    """The repr of a config: the call that makes it, where every name is known, without the fields that are at their default.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> LinearConfig(64, 32)
    LinearConfig(in_features=64, out_features=32)
    >>> ChainConfig(steps=(Step("up", linear, LinearConfig(64, 32)), Step("down", linear, LinearConfig(32, 64, bias=False))))
    ChainConfig(
        steps=(
            Step(name='up', op=linear, cfg=LinearConfig(in_features=64, out_features=32)),
            Step(name='down', op=linear, cfg=LinearConfig(in_features=32, out_features=64, bias=False)),
        ),
    )
    """
    return _Printer().text(cfg, "", 0)


def html(cfg: Any) -> str:
    """The repr for a notebook."""
    return in_html(repr(cfg))


class _Printer:
    """The texts of one repr. `lines`: what each value is on one line, by its id."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}

    def opened(self, value: Any) -> tuple[str, list[tuple[str, Any]], str] | None:
        """Return what opens a value, its named parts, and what closes it; None for a value without parts."""
        # a class with a repr of its own is left to it
        if dataclasses.is_dataclass(value) and type(value).__repr__ is shown:
            # optimisers say so: their defaults are worth reading
            every = getattr(type(value), "shows_defaults", False)
            fields = [f for f in dataclasses.fields(value) if f.init and f.repr and (every or not _usual(f, value))]
            return f"{type(value).__name__}(", [(f"{f.name}=", getattr(value, f.name)) for f in fields], ")"
        return ("(", [("", one) for one in value], ")") if type(value) is tuple and value else None

    def line(self, value: Any) -> str:
        # once for each part: a config of depth n would write its innermost part 2^n times
        found = self.lines.get(id(value))
        if found is None:
            inside = self.opened(value)
            if inside is None:
                return repr(value)
            opening, inner, closing = inside
            comma = "," if opening == "(" and len(inner) == 1 else ""
            found = opening + ", ".join([name + self.line(one) for name, one in inner]) + comma + closing
            self.lines[id(value)] = found
        return found

    def text(self, value: Any, before: str, depth: int) -> str:
        """The value as source. `before`: what stands before it on its line; `depth`: of that line."""
        line, inside = self.line(value), self.opened(value)
        if inside is None or len(INDENT) * depth + len(before) + len(line) <= WIDTH:
            return line
        opening, inner, closing = inside
        rows = [INDENT * (depth + 1) + name + self.text(one, name, depth + 1) + "," for name, one in inner]
        return "\n".join([opening, *rows, INDENT * depth + closing])


def _usual(f: Any, cfg: Any) -> bool:
    """Whether a field is at its default."""
    value, default = getattr(cfg, f.name), f.default
    if f.default_factory is not dataclasses.MISSING:
        default = f.default_factory()
    # 1, 1.0 and True are equal, but not the same text
    return type(value) is type(default) and bool(value == default)


T = TypeVar("T")
NoneType = type(None)
LARGEST = torch.finfo(torch.float32).max
Replace = Callable[[Any, Any, Any], tuple[Any, Any]]  # (name, op, cfg) of a part -> its new op and cfg


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config(cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass whose hash is computed once. All that is static about an op. A field
    annotated int, float, bool or str (or one of them, or None) raises `TypeError` for anything else, `ValueError` for NaN, and
    for a finite float beyond the range of float32, in which kernels compute."""
    checked = _check_types(cls)
    _check_hooks(cls)
    own_repr = "__repr__" in vars(cls)
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
    if not own_repr:
        made.__repr__, made._repr_html_ = shown, html
    made.__init__, compute = _with_suggestion(made.__init__), made.__hash__

    def __hash__(self: Any) -> int:
        # computed at the first use and kept: configs are keys of each cache of programs
        try:
            return self._hash
        except AttributeError:
            try:
                object.__setattr__(self, "_hash", compute(self))
            except TypeError:
                # Python's own error does not say which field it is
                _name_unhashable(self)
                raise
            return self._hash

    made.__hash__ = __hash__
    made.number_while_tracing = number_while_tracing
    # A copy is the config itself; unpickling makes a new one, as hashes and values computed from fields hold in one process only.
    made.__copy__ = lambda self: self
    made.__deepcopy__ = lambda self, memo: self
    names = [f.name for f in dataclasses.fields(made) if f.init]
    # fills the list that `_check_types` returned before the fields of the bases were known
    checked += names
    made.__reduce__ = lambda self: (_unpickled, (type(self), {name: getattr(self, name) for name in names}))
    return made


def _name_unhashable(cfg: Any) -> None:
    """Raise `TypeError` for the first field of a config that has no hash, by name; for a config inside, by that one's."""
    for name, value in fields_of(cfg).items():
        try:
            hash(value)
        except TypeError as error:
            # a config inside has named its own field already
            if "must be hashable" in str(error):
                raise
            wanted = "hashable (a tuple in place of a list, a tuple of pairs in place of a dict)"
            fail(type(cfg).__name__, name, wanted, repr(value), TypeError)


def _with_suggestion(init: Any) -> Any:
    """A constructor whose error for an unknown field names the known ones."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        try:
            return init(self, *args, **given)  # type: ignore[no-any-return]
        except TypeError:
            known = [f.name for f in dataclasses.fields(self) if f.init]
            unknown = next((name for name in given if name not in known), None)
            if unknown is None:
                raise
        # outside of the handler, so that the traceback does not begin with Python's own error
        near = "".join(f" (did you mean {name}?)" for name in difflib.get_close_matches(unknown, known, 1))
        fail(type(self).__name__, "arguments", f"of its fields, {', '.join(known) or 'none'}{near}", unknown, TypeError)

    return __init__


def _unpickled(cls: Any, fields: dict[str, Any]) -> Any:
    # a pickle calls with arguments by position, and a config takes its fields by name alone
    return cls(**fields)


def _check_hooks(cls: Any) -> None:
    """Raise if a field has the name of a hook and no default: dataclasses would take the hook for its default."""
    for name, annotation in cls.__dict__.get("__annotations__", {}).items():
        if name not in cls.__dict__ and "ClassVar" not in str(annotation):
            for base in (OpConfig, Composite):
                if name in vars(base) and (base is OpConfig or issubclass(cls, base)):
                    wanted = f"of another name, or have a default ({base.__name__} has a hook of that name)"
                    fail(cls.__name__, f"field {name}", wanted, "none", TypeError)


_PLAIN = (str, int, float, bool, NoneType)
_TYPES = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "None": (NoneType,)}


def _check_types(cls: Any) -> list[str]:
    """Put a check of plain fields before the class's own checks. Returns a list to be filled with the names of fields: in their
    values, a name of a str subclass becomes a plain string from then on."""
    fields: list[str] = []
    wanted: dict[str, tuple[type, ...]] = {}
    for name, annotation in cls.__dict__.get("__annotations__", {}).items():
        # annotations are text in a file that postpones them, else types
        words = (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))).split(" | ")
        if all([word in _TYPES for word in words]):
            wanted[name] = tuple([t for word in words for t in _TYPES[word]])
    given = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        # names get into generated source and paths, where the repr of a subclass of str must not
        for name in fields:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, exact(value))
        for name, types in wanted.items():
            value = getattr(self, name)
            require_type(type(self).__name__, name, value, *types)
            # NaN, which would make equal configs differ
            if value != value:
                fail(type(self).__name__, name, "a number", value)
            # infinity passes: a class that takes finite numbers alone says so in its own check
            if float in types and value is not None and LARGEST < abs(value) < math.inf:
                fail(type(self).__name__, name, f"at most {LARGEST:.3g} in magnitude, the largest float32", value)
        if given is not None:
            given(self)

    cls.__post_init__ = __post_init__
    return fields


class Width(NamedTuple):
    """The size of a last dimension, and the path of the step that gives it."""

    size: int
    of: str


class OpConfig:
    """The base of an op's config, which is a subclass with the decorator `config`. Generic code calls these hooks on any config;
    override each hook about which the op knows more.

    >>> from funcops import LinearConfig
    >>> from funcops.engine.contract.op import OpConfig
    >>> cfg = LinearConfig(8, 16)
    >>> isinstance(cfg, OpConfig), cfg.widths(None), cfg.outputs
    (True, (8, 16), ())
    """

    def __dir__(self) -> list[str]:
        """The fields, for completion; a rewrite finds the hooks on the class."""
        own = {name for name in object.__dir__(self) if name.startswith("__")}
        return sorted(own | {field.name for field in dataclasses.fields(self)}) if dataclasses.is_dataclass(self) else sorted(own)

    extras: tuple[str, ...] = ()
    """Names of the inputs beside main, if x is `WithExtras(main, {name: ...})`."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs beside main, if y is `WithExtras(main, {name: ...})`."""
    keys: tuple[str, ...] = ()
    """The extras that are random keys."""
    takes_also: tuple[str, ...] = ()
    """Names of values that the op takes behind those that its step took before a rewrite put this config there. A chain around it
    declares them as extras."""
    fuse: bool = True
    """Whether rules of fusion may join the op's calls with others."""
    gives_by_position: bool = True
    """Whether a `Step` may name further parts of y by their position: y is then `(main, *gives)`."""
    featurewise: ClassVar[bool] = False
    """Whether each feature of y is computed from the same feature of x alone, so that features may be sharded."""
    shards_features: bool | None = None
    """Whether each rank of the config's axis has different features in y; None if y's features are sharded as x's are."""
    sequence_parallel: bool | None = None
    """Whether the rows of x or y are sharded over the config's axis; None if the op has no such choice."""
    derives: ClassVar[bool] = False
    """Whether the op derives a table from an extra, which other steps derive, too (`once`)."""
    attends: ClassVar[bool] = False
    """Whether y at a position depends on the keys and values of other positions: attention."""
    mixes_positions: ClassVar[bool] = False
    """Whether y at a position depends on x at other positions, so that positions cannot be sharded over ranks."""
    draws_mask: ClassVar[bool] = False
    """Whether the op draws a mask with the shape of x, of which a rank draws the part for its own part of x."""
    has_place: ClassVar[bool] = False
    """Whether the op, without a mask, depends on where in the whole a rank's part of x is, which a field `shared` says."""
    reruns: bool = False
    """Whether a policy may run the forward again in the backward, on the way to a tensor that a later step reads: y is a function
    of params and x alone, and nothing is sent to other ranks."""
    linear_parts: tuple[str, ...] = ()
    """The names of the linear layers inside an op, if it has several; each has its params under that name."""
    linear_weights: tuple[str, ...] = ()
    """The paths, in the op's params, of the weights of linear layers."""
    largest: Any = None
    """The function that makes a whole weight's amaxes of the amaxes of its parts on the ranks; None if ranks have whole weights."""

    given_while_tracing = given_while_tracing

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        """The width (size of the last dimension) that x must have, None if any; and the width of y if x has `width`, None if not
        known."""
        return None, None

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """The width of y of the step at `path`, if its x has `width`; None if not known. Raises `ValueError` for a `width` that
        does not fit."""
        wanted, given = self.widths(None if width is None else width.size)
        if width is not None and wanted is not None and wanted != width.size:
            fail(where, f"x of step {path!r}", f"[..., {wanted}]", f"[..., {width.size}] of step {width.of!r}")
        if given is None:
            return None
        # a step that takes any width passes it on: an error names the step that set it
        return width if width is not None and wanted is None and given == width.size else Width(given, path)

    def wanted(self) -> int | None:
        """The width that x must have; None if any, or not known."""
        return self.widths(None)[0]

    group_dims: tuple[int, ...] = ()
    """The leading dimension that each param has for the groups of a grouped layer."""

    @property
    def low_recipe(self) -> Any:
        """The recipe of an op in low precision; None for any other op."""
        return None

    @property
    def takes_codes(self) -> Any:
        """The format by rows in which a `QTensor` may stand for a dense x, with the same bits of all results; None if none may."""
        return None

    @property
    def specs(self) -> dict[str, Any]:
        """A `funcops.dist.Spec` for each sharded param, or the name of its axis and its dim, by its path in the op's params."""
        return {}

    def packed_parts(self, width: int) -> tuple[int, ...] | None:
        """The sizes of the parts in the last dimension of an x of `width`, such as gate and value; () if it is one
        part; None if the op mixes features."""
        return None

    def sharded(self, dim: int, n: int) -> tuple[Any, int] | None:
        """If dim -`dim` of x is sharded over n ranks: the config of a rank, and the d for which dim -d of y is then sharded. None
        if config and dim stay the same. Raises `ValueError` if sizes do not divide, or the op cannot be sharded so."""
        return None


def same_width(cfg: Any, width: int | None) -> tuple[int | None, int | None]:
    """`OpConfig.widths` of an op whose y has the last dimension of x, whatever its size."""
    return None, width


class Composite(OpConfig):
    """The base of a combinator's config: an op that is made of parts, each an op with a config and a name."""

    gives_by_position = False
    members: tuple[Any, ...] = ()
    """The `Step`s of a combinator whose parts have names."""
    ties: Any = ()
    """Pairs of a tied path and its source's path."""
    names: dict[str, None] = {}
    """The names of the steps, if params are a dict by name."""
    part: ClassVar[str] = "step"
    """What an error calls a part."""
    lowered_by: ClassVar[Any] = None
    """The op whose `lower` writes the parts as one program; None if the parts run as programs of their own."""
    fsdp: Any = None
    """The axis over which all params of the parts are sharded."""
    like: Any = None
    """The params of the parts by shape alone, before that axis shards them."""
    times: int | None = None
    """The number of layers, if the part runs several times, one layer after another, each with params of its own; else None."""
    stacked: bool = False
    """Whether the params of these layers are one tree, whose leaves have a leading layer dimension."""
    side_by_side: int | None = None
    """The number of parts of x's rows that go through the body in turns, each while another waits for communication; else None."""
    branching: ClassVar[bool] = False
    """Whether every part reads the config's x, and y is the tuple of their y; else each reads the y of the part before it."""
    maps_to_itself: ClassVar[bool] = False
    """Whether y has the shape of x, and is sharded as x is."""
    as_chain: Any = None
    """The config of the chain that runs the parts; None if no chain does."""
    joined: tuple[str, ...] = ()
    """The parts that run as one with the parts before them, as in `ChainConfig`."""

    def needs_of_chain(self, needs: Any) -> Any:
        """The `Needs` of `as_chain`, made from the needs of the config's own op."""
        return needs

    def as_run(self) -> Self:
        """The config of the parts as they run."""
        return self

    def with_parts(self, replace: Replace, **changes: Any) -> Self:
        """The config with `replace(name, op, cfg)` for each part's op and config, and `changes` of other fields. A part whose name
        is None has its combinator's path."""
        raise NotImplementedError(f"{type(self).__name__}.with_parts")

    def parts(self) -> list[tuple[Any, Any, Any]]:
        """Name, op and config of each part, in the order of the forward; the body of a repeat once, as "*", or each of its bodies
        by the numbers of its layers, such as 0-9."""
        if self.members:
            return [(step.name, step.op, step.cfg) for step in self.members]
        # a combinator need only say how its parts are replaced: that lists them, too
        found: list[tuple[Any, Any, Any]] = []

        def note(name: Any, op: Any, inner: Any) -> tuple[Any, Any]:
            found.append((name, op, inner))
            return op, inner

        self.with_parts(note)
        return found

    @property
    def first_parts(self) -> tuple[OpConfig, ...]:
        """The configs of the parts whose x is this config's x."""
        return ()

    def wanted(self) -> int | None:
        return next((width for inner in self.first_parts if (width := inner.wanted()) is not None), None)

    def abstract(self) -> Any:
        """The params on the meta device, made from the parts' params; see `funcops.engine.program.values.abstract_params`."""
        raise NotImplementedError(f"{type(self).__name__}.abstract")

    def gradient_shapes(self) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
        """The `shapes` of the params. A method, as `program_while_tracing` is: a tracer takes its result as a constant, and would
        otherwise trace every `init`, and warn of the cache around it."""
        # a tracer lets Python run this: it must fill no memo that the trace has looked into
        with reading():
            return tuple(shapes(self.abstract()).items())

    gradient_shapes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shapes(params: Any) -> dict[str, tuple[int, ...] | None]:
    """Shapes by path; None for a param that is absent, or never has a gradient."""
    constant = constant_paths(params)
    leaves = paths(params, is_leaf=stands_for_one)
    return {path: None if t is None or path in constant else tuple(t.shape) for path, t in leaves.items()}


def require_config(where: str, cfg: Any, wanted: type | None = None) -> None:
    """Raise `TypeError` unless `cfg` is the config of an op; with `wanted`, unless it is of that very class."""
    if wanted is not None:
        if type(cfg) is not wanted:
            fail(where, "cfg", wanted.__name__, describe(cfg) + own_function(where, cfg), TypeError)
    elif not isinstance(cfg, OpConfig):
        fail(where, "cfg", "the config of an op (of a DecoderConfig: decoder(cfg))", describe(cfg), TypeError)


def own_function(where: str, cfg: Any) -> str:
    """The remedy for the config of another op: the same function of that op, if its name says which."""
    half, own = where.rpartition("_")[2], type(cfg).__name__.removesuffix("Config")
    # `where` may be another function, such as a rewrite: the other op has no function to name instead
    if half not in ("init", "fwd", "bwd", "dgrad", "wgrad", "recompute"):
        return ""
    # an op is a name in the module of its config, which must be imported already
    module = sys.modules.get(type(cfg).__module__)
    for name, value in vars(module).items() if isinstance(cfg, OpConfig) and module is not None else ():
        if getattr(value, "config", None) is type(cfg) and name.replace("_", "").lower() == own.lower():
            return f": call {name}_{half}"
    return ""


def fields_of(cfg: Any) -> dict[str, Any]:
    """The values of a config's fields by name, as its class takes them."""
    return {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}


def found_once(cfg: Any, name: str, find: Callable[[], T]) -> T:
    """The result of `find()`. Unless it is empty, it is kept on the config, by `name`, so that a tracer reads it instead of tracing
    `find`."""
    found = getattr(cfg, f"found_{name}", None)
    if found is None:
        found = find()
        # a tracer cannot write to an object outside of its graph
        if found and not torch.compiler.is_dynamo_compiling():
            object.__setattr__(cfg, f"found_{name}", found)
    return found
