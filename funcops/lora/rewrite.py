"""`with_lora`: the config of a model with adapters on some of its linear steps."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from funcops.engine.compose.add import AddConfig, add
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.step import Step
from funcops.engine.contract.configs import Composite, fields_of, require_config
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Inside, Part, check_globs, matches, nested, rewrite
from funcops.engine.errors import describe, fail, in_step, join_path, require, require_count, require_number, require_type
from funcops.library.ops import grouped_low_rank as grouped_low_rank  # enters the layers of experts
from funcops.library.ops import low_rank_embedding as low_rank_embedding  # enters embeddings
from funcops.library.ops.embedding import EmbeddingConfig, embedding
from funcops.library.ops.expert_steps import by_steps
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.low_rank import Adapter, LowRankConfig, adapter_of
from funcops.library.ops.qlinear import QLinearConfig, qlinear

BOTH, BASE, LORA, SUM = "both", "base", "lora", "sum"  # the names of an adapted linear's parts
INSIDE, ADAPTER = join_path(BOTH, BASE), join_path(BOTH, LORA)


def with_lora(
    cfg: Any, rank: int, targets: Sequence[str], *, alpha: float | None = None, dropout: float = 0.0, key: str = "key"
) -> Any:
    """Return the config with an adapter beside each step that a glob of `targets` matches: `linear`, `qlinear`, their layers over
    ranks, the layers `up` and `down` of experts, and an `embedding`, if the glob's last name has no wildcard ("*" is all linears).

        y = base(x) + (alpha / rank) (m * x) a^T b^T

    `targets`: globs over the paths of steps, as "*.q.proj"; the layers of a repeat are "*". `alpha`: by default `rank`, a factor of
    1. `dropout`: of the adapter's x (no ids are dropped), in [0, 1); m is drawn from the extra `key`, which is declared by chains
    that do not yet, and folded by path, so that no two adapters share a mask. A tie to or from an adapted layer stays a tie of
    its own weight. The config of a layer itself, whose path is "", becomes a `chain`'s. For adapters of several ranks, call it once
    for each.

    `cfg` may be an op that `op_from_module` made: the result is an op then, and `targets` are globs over the paths of modules whose
    products `F.linear` computes of a parameter. `lora_init(params, op, key=key)` adds the adapters' params, `PATH.lora.a` and
    `PATH.lora.b`. It takes no dropout, and `key` is not read.

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
    if isinstance(cfg, Op):
        return _of_module(where, cfg, rank, targets, alpha, dropout)
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
    scale = (rank if alpha is None else alpha) / rank

    def adapt(part: Part, around: str = "") -> tuple[Op, Any] | Inside | None:
        if part.composite:
            return Inside(changes=lambda made: {"ties": _moved(part.cfg.ties, made)}) if part.cfg.ties else None
        if part.cfg.linear_parts:
            becomes, plain = by_steps(where, part.op, part.cfg)
            made = rewrite(plain, lambda inner: adapt(inner, part.path), path=part.path)[1]
            return (part.op, part.cfg) if made == plain else (becomes, made)
        adapter = adapter_of(part.cfg)
        if adapter is None:
            return None
        globs = targets if adapter.layer == "linear" else list(filter(_names_one, targets))
        if not (matches(part.path, globs) or (around and matches(around, targets))):
            return None
        return chain, _both(part, adapter, key, rank, scale, dropout)

    return rewrite(cfg, adapt)[1]


def _of_module(where: str, op: Op, rank: int, targets: Sequence[str], alpha: float | None, dropout: float) -> Op:
    if not hasattr(op.named, "with_lora"):
        fail(where, "cfg", "a config, or an op that op_from_module made", describe(op), TypeError)
    require_count(where, rank=rank)
    check_globs(where, "targets", targets)
    require(len(targets) > 0, where, "targets", "at least one glob", repr(targets))
    if alpha is not None:
        require_number(where, alpha=alpha)
    require(dropout == 0.0, where, "dropout", "0 for an op of a module", dropout)
    return op.named.with_lora(where, rank, targets, (rank if alpha is None else alpha) / rank)  # type: ignore[no-any-return]


def is_adapted(cfg: Any) -> bool:
    """Whether it is a config that `with_lora` makes from a linear's."""
    if _names(cfg) != [BOTH, SUM]:
        return False
    both = cfg.members[0].cfg
    return _names(both) == [BASE, LORA] and isinstance(both.members[1].cfg, LowRankConfig)


def _names(cfg: Any) -> list[str]:
    return [step.name for step in cfg.members] if isinstance(cfg, Composite) else []


class AdaptedLinear(NamedTuple):
    """An adapted linear. `lead`: the leading dims of its leaves, if layers are stacked; `module`: the path with "*" for the number
    of a stacked layer; `axis`: the axis that shards its experts."""

    path: str
    module: str
    lead: tuple[int, ...]
    base: Any
    lora: LowRankConfig
    op: Op  # the adapter's
    axis: Any = None

    def at(self, part: str) -> str:
        return join_path(self.path, part)


def adapted_linears(cfg: Any, path: str = "") -> Iterator[AdaptedLinear]:
    """The adapted linears of a config, in the order of the forward."""
    for part, around in nested(cfg, path=path, layers=True, stop=lambda part: is_adapted(part.cfg)):
        if is_adapted(part.cfg):
            stacked = [one for one in around if one.cfg.stacked]
            base, lora = part.cfg.steps[0].cfg.branches
            lead = tuple(one.cfg.times for one in stacked)
            axis = next((one.cfg.axis for one in around if one.cfg.specs), None)
            yield AdaptedLinear(part.path, _module(part.path, stacked), lead, base.cfg, lora.cfg, lora.op, axis)


def _module(path: str, stacked: Sequence[Part]) -> str:
    """The path with "*" behind the path of each stacked repeat, outermost first."""
    module, before = "", ""
    for repeat in stacked:
        module = join_path(join_path(module, repeat.path[len(before) :].removeprefix(".")), "*")
        before = repeat.path
    return join_path(module, path[len(before) :].removeprefix("."))


def _both(part: Part, adapter: Adapter, key: str, *settings: Any) -> ChainConfig:
    """The config of a layer with an adapter of these settings beside it."""
    op = part.op if part.path else _op_of(part.cfg)  # a config alone, from which the op follows
    try:
        own, low = adapter.beside(part.cfg, *settings)
    except ValueError as error:
        in_step(error, part.path)
        raise
    extras = (key,) if low.dropout else ()
    groups, rows = _taken(part.cfg)
    both = ParallelConfig(branches=(Step(BASE, op, part.cfg, takes=groups), Step(LORA, own, low, takes=(*rows, *extras))))
    return ChainConfig(steps=(Step(BOTH, parallel, both), Step(SUM, add, AddConfig())), extras=(*groups, *extras))


def _taken(cfg: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values that a layer of experts takes beside x, by their names in `plain_experts`, and the ones that its adapter takes."""
    given = fields_of(cfg)
    if "gathered" not in given:
        return (), ()
    if given["gathered"]:
        return ("offsets", "order", "place"), ("offsets", "order", "place")
    return ("offsets", "order", "weights") if given["weighted"] else ("offsets",), ("offsets",)


def _names_one(glob: str) -> bool:
    """Whether the last name is written out, as it must be for an embedding, so that "*" is all linears."""
    return not re.search(r"[*?[]", glob.rpartition(".")[2])


def _op_of(cfg: Any) -> Op:
    """The op of a layer's config."""
    ops: dict[Any, Op] = {LinearConfig: linear, QLinearConfig: qlinear, EmbeddingConfig: embedding}
    found = ops.get(type(cfg))
    if found is None:
        wanted = "the config of a combinator (the config of a layer over ranks does not tell its op)"
        fail("with_lora", "cfg", wanted, describe(cfg))
    return found


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
    if not isinstance(cfg, Composite) and not adapter_of(cfg):
        wanted = "the config of a linear or an embedding, or one with steps (for a DecoderConfig: decoder(cfg))"
        fail("with_lora", "cfg", wanted, type(cfg).__name__)
    found = dict(_kinds(cfg))
    known = [path or repr(path) for path, kind in found.items() if kind in ("linear", "embedding")]
    wanted = f"globs over linear steps and names of embeddings, without an adapter ({', '.join(known) or 'none in this cfg'})"
    for glob in targets:
        met = [path for path in found if matches(path, (glob,))]
        adapted = [path for path in met if found[path] == "adapter"]
        if adapted:
            fail(where, "targets", wanted, f"{glob!r}, which matches {adapted[0]}, which has one")
        kinds = ("linear", "embedding") if _names_one(glob) else ("linear",)
        if not any(found[path] in kinds for path in met):
            remedy = f", which matches {met[0] or repr('')} ({found[met[0]]})" if met else _nearest(glob, known)
            fail(where, "targets", wanted, f"{glob!r}{remedy}")


def _nearest(glob: str, known: Sequence[str]) -> str:
    """The remedy for a glob that matches no path: PEFT's names for all linears and for a module, or the glob nearest to it."""
    if glob == "all-linear":
        return ": write '*' for every linear"
    word = glob.removeprefix("*.").removesuffix("_proj")
    ends = {f"*.{'.'.join(path.split('.')[-n:])}": path for path in known for n in (1, 2)}
    near = [end for end in ends if word in end.split(".")] or difflib.get_close_matches(f"*.{word}", ends, 1, 0.0)
    return f", nearest {near[0]!r}" if near else ""


def _kinds(cfg: Any) -> Iterator[tuple[str, str]]:
    """Yield the path of each step with "linear", "embedding", "adapter", or the name of its config's class."""
    for part, _ in nested(cfg, stop=lambda part: is_adapted(part.cfg)):
        if is_adapted(part.cfg):
            yield part.path, "adapter"
            yield join_path(part.path, INSIDE), "adapter"
        elif not part.composite:
            inner = part.cfg.linear_parts
            adapter = adapter_of(part.cfg)
            yield part.path, "linear" if inner else type(part.cfg).__name__ if adapter is None else adapter.layer
            yield from ((join_path(part.path, name), "linear") for name in inner)
