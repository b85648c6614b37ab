"""`dist.parallel`: the config of a model, rewritten for the ranks of a mesh. `funcops.parallel` is another thing: a combinator.

    cfg = parallel(model, {"*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}, mesh)

Between two such layers x and y are sharded along dimension 0 over the axis (sequence parallelism); from a column layer to its
row layer a rank has all rows, of its own features or heads. Steps there that reshape or split heads get the rank's heads, packed
features (gates and values; q, k and v) are sharded each by itself, and dropout draws the rank's part of the whole mask. Params keep
their paths.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.ops._linear import require_overlap
from funcops.distributed.ops.column_linear import column_linear
from funcops.distributed.ops.column_qlinear import column_qlinear
from funcops.distributed.ops.context_attention import context_attention
from funcops.distributed.ops.context_sink_attention import context_sink_attention
from funcops.distributed.ops.dispatch import require_capacity
from funcops.distributed.ops.parallel_expert_steps import parallel_expert_steps, sharded_steps
from funcops.distributed.ops.parallel_experts import parallel_experts
from funcops.distributed.ops.parallel_latent_split import parallel_latent_split
from funcops.distributed.ops.parallel_low_rank import parallel_low_rank
from funcops.distributed.ops.row_linear import row_linear
from funcops.distributed.ops.row_qlinear import row_qlinear
from funcops.distributed.ops.sharded_dropout import ShardedDropoutConfig, Shared, sharded_dropout
from funcops.distributed.ops.vocab_cross_entropy import vocab_cross_entropy
from funcops.distributed.ops.vocab_embedding import vocab_embedding
from funcops.distributed.ops.vocab_linear_cross_entropy import vocab_linear_cross_entropy
from funcops.distributed.specs import PIPELINE
from funcops.engine.compose.step import Step
from funcops.engine.contract.configs import Composite, fields_of
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Inside, Part, remade, rewrite
from funcops.engine.errors import describe, fail, in_step, join_path, require, require_flag, require_type
from funcops.library.ops.attention import AttentionConfig, attention
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.dropout import DropoutConfig, dropout
from funcops.library.ops.embedding import EmbeddingConfig, embedding
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps
from funcops.library.ops.experts import ExpertsConfig, experts
from funcops.library.ops.latent_split import LatentSplitConfig, latent_split
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyConfig, linear_cross_entropy
from funcops.library.ops.low_rank import LowRankConfig, low_rank
from funcops.library.ops.qlinear import QLinearConfig, qlinear
from funcops.library.ops.rope import RopeConfig, rope
from funcops.library.ops.sink_attention import SinkAttentionConfig, sink_attention
from funcops.lora.rewrite import ADAPTER, INSIDE, is_adapted

Rule = str | Callable[[Op, Any], tuple[Op, Any]]


class _Main(NamedTuple):
    """How the value between two steps is sharded. `dim`: along dim -`dim`; 0: only along rows. `source`: the path of the column
    layer whose features it has, unchanged."""

    dim: int = 0
    source: str = ""


class _Shares(NamedTuple):
    """Which axes of a mesh share out what: features; tokens, and within a part of these tokens again; experts; rows, the outermost
    axis first."""

    features: Axis
    tokens: Axis | None
    within: Axis | None
    experts: Axis | None
    rows: tuple[Axis, ...]

    @staticmethod
    def of(mesh: Mesh, axis: str, context: Any, experts: Any, rows: Any) -> _Shares:
        require_type("parallel", "axis", axis, str)
        require_type("parallel", "experts", experts, str, type(None))
        require_type("parallel", "context", context, str, tuple, type(None))
        levels = context if isinstance(context, tuple) else () if context is None else (context,)
        right = len(levels) in (1, 2) and len({axis, *levels}) == 1 + len(levels) and all(isinstance(one, str) for one in levels)
        wanted = "two other axes than `axis`, between nodes and within a node" if levels is context else "another axis than `axis`"
        require(right or context is None, "parallel", "context", wanted, repr(context))
        require(experts not in (*levels, PIPELINE), "parallel", "experts", "an axis along which rows differ", repr(experts))
        known = f"of the mesh ({', '.join(mesh.sizes)})"
        wanted = f"axes {known}" if levels is context else f"an axis {known} or None"
        require(context == "cp" or {*levels} <= {*mesh.sizes}, "parallel", "context", wanted, repr(context))
        require(experts in (*mesh.sizes, "ep", None), "parallel", "experts", f"an axis {known} or None", repr(experts))
        require_type("parallel", "rows", rows, tuple, type(None))
        others = [name for name in mesh.sizes if name not in (axis, *levels, PIPELINE)]
        right = rows is None or (set(rows) <= set(others) and len(set(rows)) == len(rows))
        require(right, "parallel", "rows", f"different ones of {', '.join(others) or 'no axes'}", rows)
        named = (*(*levels, None, None)[:2], experts)
        tokens, within, found = [mesh[name] if name in mesh.sizes else None for name in named]
        within = within if within is not None and within.size > 1 else None
        return _Shares(mesh[axis], tokens, within, found, tuple([mesh[name] for name in (others if rows is None else rows)]))

    def over_tokens(self) -> tuple[Axis, ...]:
        """The axes of several ranks that share out tokens."""
        return tuple([one for one in (self.tokens, self.within) if one is not None and one.size > 1])


def parallel(
    cfg: Any,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    *,
    axis: str = "tp",
    overlap: str = "none",
    sequence_parallel: bool = True,
    context: str | tuple[str, str] | None = "cp",
    experts: str | None = "ep",
    rows: tuple[str, ...] | None = None,
    capacity: float | None = None,
) -> Any:
    """The config of a whole model, or a part of it, for this rank of a mesh. `rules`: by globs over the paths of steps (the layers
    of a repeat are "*"), the role of a step; the first glob that matches decides:

        "column"   a linear with outputs sharded over `axis`, with this `overlap`
        "row"      a linear with inputs sharded over `axis`, after a column layer
        "vocab"    an embedding or a linear cross entropy with its vocabulary sharded over `axis`, or a cross entropy after a column
                   layer: ids and labels are then the same on all ranks of `axis`
        "context"  an attention over tokens that are sharded over the axis `context`, whose keys are gathered; "context ring" and
                   "context heads" choose the other ways to communicate (see `ContextAttentionConfig`); `context=("cp", "sp")`
                   is for two levels: heads are exchanged over "sp", within a node, and keys are gathered or in a ring over "cp"
        "expert"   experts that are sharded over the axis `experts`, with this `capacity` (see `DispatchConfig`)
        "hidden"   experts whose hidden features are sharded over `axis`, without biases
        "shared"   the rotary part of a key, which all heads of latent attention share, and the `latent_split` that joins it to
                   heads that are sharded over `axis`
        a function (op, cfg) -> (op, cfg), for a step that does not change how its x is sharded

    Outputs are for this rank's rows. Dimension 0 is sharded over the axes `rows`, the first the outermost, and then over `axis`; by
    default `rows` are all axes of the mesh but "pp", `axis` and `context`, in its order. Dimension 1 is sharded over `context`, in
    zigzag order (of two axes over the first, and its parts over the second). Each rank draws its part of masks and noise. On an
    axis of one rank layers are unchanged, as for a `context` or `experts` of None, or by default on a mesh without it. Without
    `sequence_parallel` all ranks of `axis` have the same rows between layers: their number need not divide, and they take more
    memory.

    Raises `ValueError`, with the path, for a rule that decides no step, sizes that do not divide, a step that mixes sharded
    features or tokens, one that draws numbers which are the same on all ranks, features that no row layer takes, and an axis that
    the mesh lacks.

    >>> from funcops import ActivationConfig, ChainConfig, LinearConfig, Step, activation, chain, dist, linear
    >>> up, act = Step("up", linear, LinearConfig(8, 16)), Step("act", activation, ActivationConfig("gelu"))
    >>> cfg = ChainConfig(steps=(up, act, Step("down", linear, LinearConfig(16, 8))))
    >>> mesh = dist.Mesh.abstract({"tp": 2}, rank=0)
    >>> split = dist.parallel(cfg, {"up": "column", "down": "row"}, mesh)
    >>> [step.op for step in split.steps], chain.init(split, device="meta")["up"].weight.shape
    ([column_linear, activation, row_linear], torch.Size([8, 8]))
    """
    require_type("parallel", "mesh", mesh, Mesh)
    require_type("parallel", "rules", rules, Mapping)
    for glob, rule in rules.items():
        require_type("parallel", "rules", glob, str)
        known = rule in ROLES if isinstance(rule, str) else callable(rule)
        require(known, "parallel", f"rules[{glob!r}]", f"{', '.join(map(repr, ROLES))}, or a function", describe(rule))
    shares = _Shares.of(mesh, axis, context, experts, rows)
    require_overlap("parallel", overlap)
    require_capacity("parallel", capacity)
    require_flag("parallel", sequence_parallel=sequence_parallel)
    if not isinstance(cfg, Composite):
        fail("parallel", "cfg", "the config of a combinator", describe(cfg), TypeError)
    parts: dict[str, tuple[int, ...]] = {}
    for _ in range(2):  # the first walk finds packed features
        walk = _Walk(rules, shares, {"overlap": overlap, "sequence_parallel": sequence_parallel, "capacity": capacity}, parts)
        made, main = rewrite(cfg, walk.part)[1], walk.around[0].main
    for glob in rules:
        wanted = f"globs that are the first to match a step ({', '.join(walk.known)})"
        require(glob in walk.deciding, "parallel", "rules", wanted, repr(glob))
    if main.dim:
        fail("parallel", "rules", "with a row layer after every column layer", f"none after {main.source or 'the last'}")
    return made


class _Around:
    """A combinator whose parts are being rewritten: how its x is sharded, and how the y of each part so far is, by path."""

    def __init__(self, cfg: Any, path: str, x: _Main) -> None:
        self.cfg, self.path, self.x, self.parts = cfg, path, x, list[tuple[str, _Main]]()

    @property
    def main(self) -> _Main:
        """How the x of the next part is sharded."""
        return self.x if self.cfg.branching or not self.parts else self.parts[-1][1]


class _Walk:
    """One rewrite of a config, in the order of the forward. `around`: the combinators whose parts are not done, outermost first."""

    def __init__(self, rules: Mapping[str, Rule], over: _Shares, how: dict[str, Any], parts: dict[str, tuple[int, ...]]) -> None:
        self.rules, self.over, self.axis, self.how, self.parts = rules, over, over.features, how, parts
        self.deciding, self.known, self.widths = set[str](), list[str](), dict[str, int]()
        self.adapted = dict[str, str]()  # the path of an adapted linear, by the paths of its parts
        self.around = [_Around(Composite(), "", _Main())]

    def part(self, part: Part) -> tuple[Op, Any] | Inside:
        """The op and config of a rank."""
        path, main = part.path, self.around[-1].main
        if part.composite and (ROLES["expert"].get(type(part.cfg)) is None or self.glob(path) is None):
            self.around.append(_Around(part.cfg, path, main))
            if is_adapted(part.cfg):
                self.adapted |= {join_path(path, one): path for one in (INSIDE, ADAPTER)}
            return Inside(after=self.finish)
        op, cfg, main = self.step(part.op, part.cfg, path, main)
        self.note(path, main)
        return op, cfg

    def note(self, path: str, main: _Main) -> None:
        """Note how the y of a part is sharded."""
        around = self.around[-1]
        around.parts.append((path, main))
        if around.cfg.maps_to_itself:
            self.same(path, main, around.x, "its x")

    def finish(self, op: Op, made: Any) -> tuple[Op, Any]:
        """Go on behind a combinator whose parts are done."""
        around = self.around.pop()
        cfg, parts = around.cfg, around.parts
        for step, (here, one) in zip(cfg.members, parts, strict=False):
            self.leaves(step, cfg, here, one)
        main = parts[-1][1]
        if cfg.branching:
            for here, one in parts:
                self.same(here, one, parts[0][1], f"y of {parts[0][0]}")
            main = _Main(main.dim)
        self.note(around.path, _Main(main.dim, around.path) if is_adapted(cfg) and main.dim == 1 else main)
        return op, made

    def leaves(self, step: Step, cfg: Any, path: str, main: _Main) -> None:
        """Check that the outputs of a step, if they leave the model, have all features."""
        names = [name for name in step.gives if name in cfg.outputs and not step.outputs]
        if names and main.dim:
            fail("parallel", f"output {names[0]!r} of step {path}", "of all features: take it after a row layer", self.said(main))

    def same(self, path: str, one: _Main, other: _Main, of: str) -> None:
        if one.dim != other.dim:
            fail("parallel", f"y of {path}", f"sharded like {of}", self.said(one))

    def said(self, main: _Main) -> str:
        return f"sharded along dim -{main.dim} over {self.axis.name!r}" if main.dim else "sharded only along rows"

    def step(self, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """The op and config of an op without parts, and how its y is sharded."""
        path = self.adapted.get(path, path)  # an adapter has the role of its layer
        if path not in self.known:
            self.known.append(path)
        glob = self.glob(path)
        if (cfg.draws_mask or cfg.has_place) and "shared" in fields_of(cfg):
            cfg = dataclasses.replace(cfg, shared=self.shares(main))
        if glob is None:
            return self.between(op, cfg, path, main)
        self.deciding.add(glob)
        rule = self.rules[glob]
        if callable(rule):
            return *rule(op, cfg), main
        return self.plays(rule, op, cfg, path, main)

    def glob(self, path: str) -> str | None:
        """The glob that decides the role of a step."""
        return next((glob for glob in self.rules if fnmatchcase(path, glob)), None)

    def between(self, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """A step without a rule."""
        self.check_alone(op, cfg, path, main)
        if cfg.draws_mask and "shared" not in fields_of(cfg):
            return self.dropout(op, cfg, path, main)
        if not main.dim or self.axis.size == 1:
            return op, cfg, main
        try:
            self.unpack(cfg, main)
            found = self.of_rank(cfg, main)
        except ValueError as error:
            in_step(error, path)
            raise
        if found is not None:
            return op, *found
        if main.dim == 1 and not cfg.featurewise and cfg.packed_parts(0) is None:
            wanted = f"featurewise, as x is {self.said(main)} (put a row layer before it)"
            fail("parallel", f"step {path}", wanted, f"{op.name}, which mixes features")
        return op, cfg, main if cfg.featurewise else _Main(main.dim)

    def check_alone(self, op: Op, cfg: Any, path: str, main: _Main) -> None:
        """Check that a step without a rule may run on a part of the tokens and rows."""
        for tokens in self.over.over_tokens():
            if cfg.attends:
                wanted = f"with 'context' for {path}, an attention over the tokens of all ranks of {tokens.name!r}"
                fail("parallel", "rules", wanted, list(self.rules))
            if cfg.mixes_positions:
                wanted = f"of each token alone, as tokens are sharded over {tokens.name!r} (to run on a part, give it a function)"
                fail("parallel", f"step {path}", wanted, f"{op.name}, which mixes positions")
        if op.keyed_by(cfg) and not cfg.draws_mask and self.shares(main):
            wanted = "of no random key, as it would draw the same on all ranks (give it a function that folds in the rank)"
            fail("parallel", f"step {path}", wanted, op.name)

    def of_rank(self, cfg: Any, main: _Main) -> tuple[Any, _Main] | None:
        """The config of a rank, and how its y is sharded, for a step that changes with its x; None for any other."""
        found = cfg.sharded(main.dim, self.axis.size)
        if found is None:
            return None
        own, dim = found
        return dataclasses.replace(own, over=self.axis.name) if "over" in fields_of(own) else own, _Main(dim)

    def unpack(self, cfg: Any, main: _Main) -> None:
        """Note the parts of a column layer, if this config says that its x has several side by side."""
        parts = cfg.packed_parts(self.widths.get(main.source, 0)) if main.dim == 1 else None
        if parts:
            require(bool(main.source), "parallel", "x", "the y of a column layer, unchanged", "one that other steps changed")
            self.parts[main.source] = parts

    def shares(self, main: _Main) -> tuple[Shared, ...]:
        """How the x of a step is sharded."""
        shared = [Shared(0, axis) for axis in self.over.rows]
        if main.dim or self.how["sequence_parallel"]:
            shared.append(Shared(-main.dim, self.axis))
        shared += [Shared(1, one, zigzag=True) for one in self.over.over_tokens()]
        return tuple([one for one in shared if one.axis.size > 1])

    def dropout(self, op: Op, cfg: DropoutConfig, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        shared = self.shares(main)
        if not shared:
            return op, cfg, main
        made = ShardedDropoutConfig(**fields_of(cfg), shared=shared)
        return self.remade(op, path, dropout, sharded_dropout), made, _Main(main.dim)

    def remade(self, op: Op, path: str, source: Op, becomes: Op) -> Op:
        try:
            return remade("parallel", op, source, becomes)
        except ValueError as error:
            in_step(error, path)
            raise

    def plays(self, role: str, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """Give a step its role: the new config has the fields of its config, and the fields that the role adds."""
        part = ROLES[role].get(type(cfg))
        if part is None:
            kinds = " or ".join(one.source.name for one in ROLES[role].values())
            fail("parallel", f"rules for {path}", f"of another role ({role!r} is for {kinds})", type(cfg).__name__)
        axis: Axis | None = getattr(self.over, part.axis)
        if axis is None or (axis.size == 1 and (part.axis != "tokens" or self.over.within is None)):
            return (op, cfg, main) if part.axis == "features" else self.between(op, cfg, path, main)
        if part.axis == "experts" and axis == self.axis and not (self.how["sequence_parallel"] and main.dim == 0):
            fail("parallel", f"{path}, of experts over {axis.name!r},", "where ranks have rows of their own", self.said(main))
        if part.before is not None and main.dim != part.before:
            wanted = "after a column layer, where features are sharded" if part.before else "where x has all features"
            fail("parallel", f"{path}, a {role} layer,", wanted, f"x {self.said(main)}")
        more = {"axis": axis, "side": role, "parts": self.parts.get(path, ()), "heads_axis": self.over.within}
        more |= {**self.how, **part.more}
        source, becomes = part.source, part.becomes
        make: Any = part.make or becomes.config
        taken = inspect.signature(make).parameters
        try:
            if part.before is None and main.dim and self.axis.size > 1:
                cfg = (self.of_rank(cfg, main) or (cfg,))[0]
            fields = fields_of(cfg) | {name: value for name, value in more.items() if name in taken}
            made = make(**fields)
        except ValueError as error:
            in_step(error, path)
            raise
        self.widths[path] = cfg.widths(None)[1] or 0
        after = _Main(main.dim if part.before is None else part.after, path if part.after else "")
        return self.remade(op, path, source, becomes), made, after


class _Role(NamedTuple):
    """How a role replaces an op. `before`, `after`: the sharded dim of features, from the end, that its x must have and its y has
    (None: any, and it stays). `axis`: which one of `_Shares` the op communicates over. `make`: makes the new config of its fields.
    `more`: further fields of the new config, if it has them."""

    source: Op
    becomes: Op
    before: int | None
    after: int = 0
    axis: str = "features"
    make: Callable[..., Any] | None = None
    more: Mapping[str, Any] = {}


ROLES: dict[str, dict[type, _Role]] = {
    "column": {
        LinearConfig: _Role(linear, column_linear, 0, 1),
        QLinearConfig: _Role(qlinear, column_qlinear, 0, 1),
        LowRankConfig: _Role(low_rank, parallel_low_rank, 0, 1),
    },
    "row": {
        LinearConfig: _Role(linear, row_linear, 1),
        QLinearConfig: _Role(qlinear, row_qlinear, 1),
        LowRankConfig: _Role(low_rank, parallel_low_rank, 1),
    },
    "vocab": {
        EmbeddingConfig: _Role(embedding, vocab_embedding, 0),
        LinearCrossEntropyConfig: _Role(linear_cross_entropy, vocab_linear_cross_entropy, 0),
        CrossEntropyConfig: _Role(cross_entropy, vocab_cross_entropy, 1),
    },
    "shared": {RopeConfig: _Role(rope, rope, 0, 2), LatentSplitConfig: _Role(latent_split, parallel_latent_split, 2, 2)},
    "expert": {
        ExpertsConfig: _Role(experts, parallel_experts, None, axis="experts", more={"sequence_parallel": None}),
        ExpertStepsConfig: _Role(expert_steps, parallel_expert_steps, None, axis="experts", make=sharded_steps),
    },
    "hidden": {ExpertsConfig: _Role(experts, parallel_experts, 0, more={"shards": "hidden", "capacity": None})},
    **{
        f"context {comm}".removesuffix(" gather"): {
            AttentionConfig: _Role(attention, context_attention, None, axis="tokens", more={"comm": comm}),
            SinkAttentionConfig: _Role(sink_attention, context_sink_attention, None, axis="tokens", more={"comm": comm}),
        }
        for comm in ("gather", "ring", "heads")
    },
}
