"""`with_lora`: the config of a model with adapters on some of its linear steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from funcops.compose.chain import ChainConfig, chain
from funcops.compose.parallel import ParallelConfig, parallel
from funcops.compose.repeat import RepeatConfig
from funcops.compose.step import Step
from funcops.compose.walk import Part, check_globs, matches
from funcops.contract.configs import Composite, require_config
from funcops.contract.op import Op
from funcops.errors import describe, fail, in_step, join_path, require, require_count, require_number, require_type
from funcops.ops.add import AddConfig, add
from funcops.ops.linear import LinearConfig, linear
from funcops.ops.low_rank import ADAPTERS, LowRankConfig
from funcops.ops.qlinear import QLinearConfig, qlinear

BOTH, BASE, LORA, SUM = "both", "base", "lora", "sum"  # the names of an adapted linear's parts
INSIDE = f"{BOTH}.{BASE}"


def with_lora(
    cfg: Any, rank: int, targets: Sequence[str], *, alpha: float | None = None, dropout: float = 0.0, key: str = "key"
) -> Any:
    """Return the config with an adapter beside each `linear` or `qlinear` step, also over ranks, that a glob of `targets` matches.

        y = base(x) + (alpha / rank) (m * x) a^T b^T

    `targets`: globs over the paths of steps, as "*.q.proj"; the layers of a repeat are "*". `alpha`: by default `rank`, a factor of
    1. `dropout`: of the adapter's x, in [0, 1); m is drawn from the extra `key`, which is declared by chains that do not yet, and
    folded by path, so that no two adapters share a mask. A tie to or from an adapted linear stays a tie of its own weight. The
    config of a linear itself, whose path is "", becomes a `chain`'s. For adapters of several ranks, call it once for each.

    Raises `ValueError` for a rank below 1, a glob that matches no linear step, and a glob that matches a linear with an adapter.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear
    >>> from funcops.lora import with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)), Step("down", linear, LinearConfig(16, 8))))
    >>> cfg = with_lora(base, rank=2, targets=("up",), alpha=4.0)
    >>> params = chain.init(cfg, device="meta")
    >>> list(params["up"]["both"]), params["up"]["both"]["lora"].a.shape, list(params)
    (['base', 'lora'], torch.Size([2, 8]), ['up', 'down'])
    """
    where = "with_lora"
    require_config(where, cfg)
    require_count(where, rank=rank)
    check_globs(where, "targets", targets)
    require(len(targets) > 0, where, "targets", "at least one glob", repr(targets))
    if alpha is not None:
        require_number(where, alpha=alpha)
    require_number(where, 0.0, dropout=dropout)
    require(dropout < 1.0, where, "dropout", "below 1", dropout)
    require_type(where, "key", key, str)
    require(key.isidentifier(), where, "key", "an identifier", repr(key))
    _check_targets(where, cfg, targets)
    walk = _Walk(tuple(targets), rank, (rank if alpha is None else alpha) / rank, dropout, key)
    return walk.rewritten(chain, cfg, "")[1]


def is_adapted(cfg: Any) -> bool:
    """Whether it is a config that `with_lora` makes from a linear's."""
    if type(cfg) is not ChainConfig or list(cfg.names) != [BOTH, SUM] or type(both := cfg.steps[0].cfg) is not ParallelConfig:
        return False
    return list(both.names) == [BASE, LORA] and isinstance(both.branches[1].cfg, LowRankConfig)


class AdaptedLinear(NamedTuple):
    """An adapted linear. `lead`: the leading dims of its leaves, if layers are stacked; `module`: the path with "*" for the number
    of a stacked layer."""

    path: str
    module: str
    lead: tuple[int, ...]
    base: Any
    lora: LowRankConfig
    op: Op  # the adapter's

    @property
    def base_shape(self) -> tuple[int, int]:
        """The weight's shape; for a layer over ranks, of this rank's part."""
        of = getattr(self.base, "linear", self.base)
        return getattr(of, "weight_shape", (of.out_features, of.in_features))

    @property
    def bias_shape(self) -> tuple[int]:
        of = getattr(self.base, "linear", self.base)
        return getattr(of, "bias_shape", (of.out_features,))

    def at(self, part: str) -> str:
        return join_path(self.path, part)


def adapted_linears(cfg: Any, path: str = "", module: str = "", lead: tuple[int, ...] = ()) -> Iterator[AdaptedLinear]:
    """The adapted linears of a config, in the order of the forward."""
    if is_adapted(cfg):
        base, lora = cfg.steps[0].cfg.branches
        yield AdaptedLinear(path, module, lead, base.cfg, lora.cfg, lora.op)
        return
    stacked = type(cfg) is RepeatConfig and cfg.stacked
    for part in Part(path, None, cfg).parts(layers=True):
        own = part.path[len(path) :].removeprefix(".")
        inner = join_path(module, "*" if stacked else own)
        yield from adapted_linears(part.cfg, part.path, inner, (*lead, cfg.times) if stacked else lead)


class _Walk(NamedTuple):
    targets: tuple[str, ...]
    rank: int
    scale: float
    dropout: float
    key: str

    def rewritten(self, op: Op, cfg: Any, path: str) -> tuple[Op, Any]:
        if is_adapted(cfg):
            return op, cfg
        if not isinstance(cfg, Composite):
            wanted = type(cfg) in ADAPTERS and matches(path, self.targets)
            return (chain, self.adapted(op, cfg, path)) if wanted else (op, cfg)
        made = {name: self.rewritten(part, inner, join_path(path, name)) for name, part, inner in cfg.parts()}
        changes: dict[str, Any] = {}
        if type(cfg) is ChainConfig:
            asked = any(self.key in inner.extras for _, inner in made.values())
            given = {*cfg.extras, *(name for step in cfg.steps for name in step.gives)}
            if asked and self.key not in given:
                changes["extras"] = (*cfg.extras, self.key)
            changes["ties"] = _moved(cfg.ties, made)
        return op, cfg.with_parts(lambda name, *_: made[name], **changes)

    def adapted(self, op: Op, cfg: Any, path: str) -> ChainConfig:
        if not path:  # a config alone, from which the op follows
            op = _op_of(cfg)
        low = LowRankConfig(cfg.in_features, cfg.out_features, self.rank, scale=self.scale, dropout=self.dropout)
        try:
            own, low = ADAPTERS[type(cfg)](cfg, low)
        except ValueError as error:
            in_step(error, path)
            raise
        extras = (self.key,) if self.dropout else ()
        both = ParallelConfig(branches=(Step(BASE, op, cfg), Step(LORA, own, low, takes=extras)))
        return ChainConfig(steps=(Step(BOTH, parallel, both), Step(SUM, add, AddConfig())), extras=extras)


def _op_of(cfg: Any) -> Op:
    """The op of a linear's config."""
    if type(cfg) not in (LinearConfig, QLinearConfig):
        wanted = "the config of a combinator (the config of a layer over ranks does not tell its op)"
        fail("with_lora", "cfg", wanted, describe(cfg))
    return linear if type(cfg) is LinearConfig else qlinear


def _moved(ties: Any, made: dict[Any, tuple[Op, Any]]) -> tuple[tuple[str, str], ...]:
    """A chain's ties, with the paths of newly adapted linears extended to their base."""
    new = [linear.path for name, (_, inner) in made.items() for linear in adapted_linears(inner, name)] if ties else []

    def moved(path: str) -> str:
        for at in new:
            if path.startswith(f"{at}.") and not path.startswith(f"{at}.{INSIDE}."):
                return f"{at}.{INSIDE}{path[len(at) :]}"
        return path

    return tuple((moved(path), moved(source)) for path, source in ties)


def _check_targets(where: str, cfg: Any, targets: Sequence[str]) -> None:
    """Raise unless every glob matches a linear step, and none matches an adapted one."""
    if not isinstance(cfg, Composite) and type(cfg) not in ADAPTERS:
        wanted = "the config of a linear, or one with steps (for a DecoderConfig: decoder(cfg))"
        fail("with_lora", "cfg", wanted, type(cfg).__name__)
    found = dict(_kinds(cfg, ""))
    known = [path for path, kind in found.items() if kind == "linear"]
    for glob in targets:
        met = [path for path in found if matches(path, (glob,))]
        wanted = (
            f"globs over linear steps without an adapter ({', '.join(path or repr(path) for path in known) or 'none in this cfg'})"
        )
        adapted = [path for path in met if found[path] == "adapter"]
        if adapted:
            fail(where, "targets", wanted, f"{glob!r}, which matches {adapted[0]}, which has one")
        if not any(found[path] == "linear" for path in met):
            fail(where, "targets", wanted, f"{glob!r}" + (f", which matches {met[0]}, a {found[met[0]]}" if met else ""))


def _kinds(cfg: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each step with "linear", "adapter", or the name of its config's class."""
    if is_adapted(cfg):
        yield path, "adapter"
        yield join_path(path, INSIDE), "adapter"
    elif isinstance(cfg, Composite):
        for part in Part(path, None, cfg).parts():
            yield from _kinds(part.cfg, part.path)
    else:
        yield path, "linear" if type(cfg) in ADAPTERS else type(cfg).__name__
