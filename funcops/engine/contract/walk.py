"""`walk` and `rewrite`, which visit and replace the parts of a model's config by path; the ties of a config, globs over paths, and
`remade`, which puts another op inside an op that remat or with_policy made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from funcops.engine.contract.configs import Composite, require_config
from funcops.engine.contract.op import Op
from funcops.engine.errors import fail, few, join_path, require_callable, require_flag, require_type

__all__ = ["Inside", "Part", "check_globs", "check_selection", "layer_numbers", "layer_ranges", "matches", "nested", "remade"]
__all__ += ["rewrite", "shared_layers", "steps", "ties", "walk"]


class Part(NamedTuple):
    """A config inside another: its path, its op and its config. `layer`: the number of the repeat's layer that it is in, if the
    walk counts layers. The op of the root of a walk is None, unless it was given."""

    path: str
    op: Any
    cfg: Any
    layer: int | None = None

    @property
    def composite(self) -> bool:
        """Whether the config is a combinator's."""
        return isinstance(self.cfg, Composite)

    def parts(self, layers: bool = False) -> Iterator[Part]:
        """The parts of a combinator, in the order of the forward. A repeat's body is one part, "*", or several by the numbers of
        their layers; with `layers` one for each layer, by number, or one under the repeat's own path if its params are stacked."""
        if not isinstance(self.cfg, Composite):
            return
        found = [Part(join_path(self.path, name), op, inner, self.layer) for name, op, inner in self.cfg.parts()]
        if layers and self.cfg.times is not None:
            every = [] if self.cfg.stacked else [(i, part) for part in found for i in layer_numbers(part.path, self.cfg.times)]
            own = [part._replace(path=join_path(self.path, i), layer=i) for i, part in sorted(every, key=lambda one: one[0])]
            found = own or [Part(self.path, *self.cfg.parts()[0][1:])]
        yield from found


class Inside(NamedTuple):
    """An answer to `rewrite`: how it goes on with the parts of a combinator, and then with the combinator. Each field may be None.

    `fn`: the function to call for these parts, and for theirs. `changes`: takes the new `(op, cfg)` of each part by name, and
    returns the other fields of the combinator that change. `after`: takes the op and the new config, and returns the `(op, cfg)`
    that replaces the combinator; it is called for an op without parts, too.

    >>> from funcops import ChainConfig, ScaleConfig, Step, chain, rewrite, scale
    >>> from funcops.engine.contract.walk import Inside
    >>> cfg = ChainConfig(steps=(Step("double", scale, ScaleConfig(2.0)),))
    >>> rewrite(cfg, lambda part: Inside(changes=lambda parts: {"recompute": False}) if part.composite else None)[1].recompute
    False
    """

    fn: Rewrite | None = None
    changes: Callable[[dict[Any, tuple[Any, Any]]], dict[str, Any]] | None = None
    after: Callable[[Any, Any], tuple[Any, Any]] | None = None


Rewrite = Callable[[Part], "tuple[Any, Any] | Inside | None"]


def walk(cfg: Any, *, op: Any = None, path: str = "", layers: bool = False) -> Iterator[Part]:
    """Every part of a config, itself first, combinators before their parts, in the order of the forward. `layers`: see
    `Part.parts`. Raises `TypeError` for a `cfg` that is not the config of an op.

    >>> from funcops import ChainConfig, LinearConfig, RepeatConfig, SkipConfig, Step, chain, linear, repeat, skip, walk
    >>> layer = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 8)),))
    >>> cfg = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, layer), 2)),))
    >>> [part.path for part in walk(cfg) if not part.composite]
    ['layers.*.up']
    >>> [part.path for part in walk(cfg, layers=True) if not part.composite]
    ['layers.0.up', 'layers.1.up']
    """
    require_config("walk", cfg)
    require_flag("walk", layers=layers)
    require_type("walk", "path", path, str)
    # no generator itself, so that a wrong argument raises at the call
    return (part for part, _ in nested(cfg, op=op, path=path, layers=layers))


def nested(
    cfg: Any, *, op: Any = None, path: str = "", layers: bool = False, stop: Callable[[Part], bool] | None = None
) -> Iterator[tuple[Part, tuple[Part, ...]]]:
    """Every part as `walk` yields it, with the combinators around it, outermost first; nothing below a part at which `stop(part)`
    is true."""
    todo: list[tuple[Part, tuple[Part, ...]]] = [(Part(path, op, cfg), ())]
    while todo:
        part, around = todo.pop()
        yield part, around
        if stop is None or not stop(part):
            # reversed, as the last one in the list is the next
            todo += [(inner, (*around, part)) for inner in reversed(list(part.parts(layers)))]


def rewrite(cfg: Any, fn: Rewrite, *, op: Any = None, path: str = "") -> tuple[Any, Any]:
    """The op and config with parts replaced. `fn(part)` is called for every part, the config itself first: it returns the
    `(op, cfg)` that takes the part's place, or None to go on with the parts of a combinator, or to keep any other op. If it returns
    an `Inside`, that says how to go on.
    Raises `TypeError` for a `cfg` that is not the config of an op, and for an `fn` that is not a function.

    >>> from funcops import ActivationConfig, ChainConfig, Step, activation, chain, rewrite
    >>> cfg = ChainConfig(steps=(Step("act", activation, ActivationConfig("relu")),))
    >>> def silu(part):
    ...     return (activation, ActivationConfig("silu")) if part.op is activation else None
    ...
    >>> rewrite(cfg, silu)[1].steps[0].cfg.kind
    'silu'
    """
    require_config("rewrite", cfg)
    require_callable("rewrite", fn=fn)
    require_type("rewrite", "path", path, str)
    return _rewritten(Part(path, op, cfg), fn)


def _rewritten(part: Part, fn: Rewrite) -> tuple[Any, Any]:
    made = fn(part)
    if made is not None and not isinstance(made, Inside):
        return made
    op, cfg = part.op, part.cfg
    inner, changes, after = made or Inside()
    if isinstance(cfg, Composite):
        within = fn if inner is None else inner

        def replaced(name: Any, of: Any, own: Any) -> tuple[Any, Any]:
            return _rewritten(Part(join_path(part.path, name), of, own), within)

        if changes is None:
            cfg = cfg.with_parts(replaced)
        else:
            # `changes` reads the results of all parts before the combinator is made anew
            by_name = {name: replaced(name, of, own) for name, of, own in cfg.parts()}
            cfg = cfg.with_parts(lambda name, *_: by_name[name], **changes(by_name))
    return (op, cfg) if after is None else after(op, cfg)


def steps(cfg: Any, *, op: Any = None, layers: bool = False) -> Iterator[Part]:
    """The parts that are not combinators."""
    return (part for part in walk(cfg, op=op, layers=layers) if not part.composite)


def ties(cfg: Any) -> dict[str, str]:
    """Every tied path, and the path that it is tied to."""
    return {
        join_path(part.path, tied): join_path(part.path, source)
        # by number, as ties are about params, and each layer has its own
        for part in walk(cfg, layers=True)
        if part.composite
        for tied, source in part.cfg.ties
    }


def layer_ranges(part: str) -> tuple[range, ...] | None:
    """The ranges of layers that a part of a path names, such as 3, 0-9 or 0-2,5-7; None for any other part."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", part):
        return None
    return tuple([range(int(one.partition("-")[0]), int(one.rpartition("-")[2]) + 1) for one in part.split(",")])


def layer_numbers(name: str, times: int) -> Sequence[int]:
    """The numbers of the layers of a part of a repeat, by the part's name or path."""
    return [i for own in layer_ranges(name.rpartition(".")[2]) or (range(times),) for i in own]


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs matches the path."""
    return any(fnmatchcase(path, glob) for glob in globs)


def shared_layers(known: Sequence[str], glob: str) -> str:
    """For a glob that matches no path because it names some layers of a `repeat`: what it must be; "" for any other."""
    given = glob.split(".")
    # a layer may be given by number, or by a class of digits such as [12]
    shared = ["*" if re.fullmatch(r"\d+|\[[^]]*\]", part) else part for part in given]
    for path in known:
        places = [i for i, part in enumerate(path.split(".")) if part == "*" and shared[i : i + 1] == ["*"] != given[i : i + 1]]
        if places and matches(path, (".".join(shared),)):
            repeat = (" " + ".".join(path.split(".")[: places[0]])).rstrip()
            return f"of all layers of the repeat{repeat}, which share one config, as {'.'.join(shared)!r}"
    return ""


def check_globs(where: str, name: str, globs: Any) -> None:
    """Check that globs are a tuple or list of strings."""
    # a bare string is a sequence, too: of globs of one character
    if not isinstance(globs, (tuple, list)) or not all(isinstance(glob, str) for glob in globs):
        fail(where, name, "a tuple of globs", repr(globs), TypeError)


def check_selection(where: str, known: Sequence[str], only: Any, skip: Any) -> None:
    """Raise unless every glob of `only` and of `skip` matches one of the `known` paths."""
    for name, globs in (("only", only), ("skip", skip)):
        check_globs(where, name, globs)
        for glob in globs:
            if not any(matches(path, (glob,)) for path in known):
                fail(where, name, shared_layers(known, glob) or f"globs over {few(known)}", repr(glob))


def remade(where: str, op: Op, source: Op, becomes: Op) -> Op:
    """The op made from `becomes` as `op` is made from `source`, by remat or with_policy. Raises `ValueError` for any other op."""
    if op is source:
        return becomes
    make, args = getattr(op.fwd, "made_by", (None, ()))
    if make is None:
        fail(where, f"op {op.name!r}", f"{source.name}, or one that remat or with_policy made from it", "another")
    # the op may be under several wrappers, as in remat of with_policy
    return make(*[remade(where, arg, source, becomes) if isinstance(arg, Op) else arg for arg in args])  # type: ignore[no-any-return]
