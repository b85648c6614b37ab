"""`parallel`: the config of a model, rewritten for the ranks of a mesh.

    cfg = parallel(model, {"*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}, mesh)

Between two such layers x and y are shared out along dimension 0 over the axis (sequence parallelism); from a column layer to its
row layer a rank has all rows, of its own features or heads. What reshapes or splits heads there is given its part of them, what is
packed (gates and values; q, k and v) is shared out each by itself, and dropout draws the mask of the whole. Params keep their
paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from funcops.compose.step import Step
from funcops.contract.configs import Composite, fields_of
from funcops.contract.op import Op
from funcops.contract.walk import Inside, Part, remade, rewrite
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.ops._linear import require_overlap
from funcops.distributed.ops.column_linear import column_linear
from funcops.distributed.ops.column_qlinear import column_op_of
from funcops.distributed.ops.context_attention import context_attention
from funcops.distributed.ops.parallel_experts import parallel_experts
from funcops.distributed.ops.parallel_low_rank import parallel_low_rank
from funcops.distributed.ops.row_linear import row_linear
from funcops.distributed.ops.row_qlinear import row_op_of
from funcops.distributed.ops.sharded_dropout import ShardedDropoutConfig, Shared, sharded_dropout
from funcops.distributed.ops.vocab_cross_entropy import vocab_cross_entropy
from funcops.distributed.ops.vocab_embedding import vocab_embedding
from funcops.distributed.ops.vocab_linear_cross_entropy import vocab_linear_cross_entropy
from funcops.errors import describe, fail, in_step, join_path, require, require_flag, require_type
from funcops.lora.rewrite import ADAPTER, INSIDE, is_adapted
from funcops.ops.attention import AttentionConfig, attention
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.dropout import DropoutConfig, dropout
from funcops.ops.embedding import EmbeddingConfig, embedding
from funcops.ops.experts import ExpertsConfig, experts
from funcops.ops.linear import LinearConfig, linear
from funcops.ops.linear_cross_entropy import LinearCrossEntropyConfig, linear_cross_entropy
from funcops.ops.low_rank import LowRankConfig, low_rank
from funcops.ops.qlinear import QLinearConfig, op_of

Rule = str | Callable[[Op, Any], tuple[Op, Any]]


class _Main(NamedTuple):
    """How ranks have the value between two steps. `place`: they share out its dimension that far from the end; 0: none, but rows.
    `source`: the path of the column layer whose features stand in it as they were."""

    place: int = 0
    source: str = ""


def parallel(
    cfg: Any, rules: Mapping[str, Rule], mesh: Mesh, *, axis: str = "tp", overlap: str = "none", sequence_parallel: bool = True
) -> Any:
    """The config of a whole model, or a part of it, for this rank of a mesh. `rules`: by globs over the paths of steps (the layers
    of a repeat are "*"), what becomes of a step, of globs the first that matches:

        "column"   a linear whose outputs `axis` shares out, with this `overlap`
        "row"      a linear whose inputs it shares out, behind a column layer
        "vocab"    an embedding, or a linear cross entropy, whose vocabulary it shares out, or a cross entropy of what a column
                   layer gives: ids and labels are then the same on all ranks of `axis`
        "context"  an attention over the tokens that "cp" shares out
        "expert"   experts that "ep" shares out
        a function (op, cfg) -> (op, cfg), of one that leaves its x shared out as it is

    Outputs are this rank's, of its rows. Rows are shared out along dimension 0 over "dp" and then `axis`, and along dimension 1,
    zigzag, over "cp": where the mesh has them, dropout draws the part of the mask that is this rank's. On an axis of one rank
    layers stay as they are. Without `sequence_parallel` all ranks of `axis` have the same rows between layers, whatever their
    number, and more of them in memory.

    Raises `ValueError`, with the path: a rule that decides no step, sizes that do not divide, a step that has no meaning where its
    x is shared out, and features that no row layer takes.

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
    require_type("parallel", "axis", axis, str)
    require_overlap("parallel", overlap)
    require_flag("parallel", sequence_parallel=sequence_parallel)
    if not isinstance(cfg, Composite):
        fail("parallel", "cfg", "the config of a combinator", describe(cfg), TypeError)
    parts: dict[str, tuple[int, ...]] = {}
    for _ in range(2):  # the first walk finds what is packed
        walk = _Walk(rules, mesh, mesh[axis], {"overlap": overlap, "sequence_parallel": sequence_parallel}, parts)
        made, main = rewrite(cfg, walk.part)[1], walk.around[0].main
    for glob in rules:
        wanted = f"globs over steps that no other matches before ({', '.join(walk.known)})"
        require(glob in walk.deciding, "parallel", "rules", wanted, repr(glob))
    if main.place:
        fail("parallel", "rules", "with a row layer behind every column layer", f"none behind {main.source or 'the last'}")
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

    def __init__(
        self, rules: Mapping[str, Rule], mesh: Mesh, axis: Axis, how: dict[str, Any], parts: dict[str, tuple[int, ...]]
    ) -> None:
        self.rules, self.axis, self.how, self.parts = rules, axis, how, parts
        self.mesh, self.deciding, self.known, self.widths = mesh, set[str](), list[str](), dict[str, int]()
        self.adapted = dict[str, str]()  # by the paths of a linear's parts, with an adapter, its own
        self.around = [_Around(Composite(), "", _Main())]

    def part(self, part: Part) -> tuple[Op, Any] | Inside:
        """The op and config of a rank."""
        path, main = part.path, self.around[-1].main
        if part.composite:
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
                self.same(here, one, parts[0][1], parts[0][0])
            main = _Main(main.place)
        self.note(around.path, _Main(main.place, around.path) if is_adapted(cfg) and main.place == 1 else main)
        return op, made

    def leaves(self, step: Step, cfg: Any, path: str, main: _Main) -> None:
        """What leaves the model must be of all features."""
        names = [name for name in step.gives if name in cfg.outputs and not step.outputs]
        if names and main.place:
            fail("parallel", f"output {names[0]!r} of step {path}", "of all features, behind a row layer", _said(main))

    def same(self, path: str, one: _Main, other: _Main, of: str) -> None:
        if one.place != other.place:
            fail("parallel", f"y of {path}", f"shared out as that of {of}", _said(one))

    def step(self, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """An op without parts at a path, and how its y is shared out."""
        path = self.adapted.get(path, path)  # an adapter has the role of its layer
        if path not in self.known:
            self.known.append(path)
        glob = next((glob for glob in self.rules if fnmatchcase(path, glob)), None)
        if glob is None:
            return self.between(op, cfg, path, main)
        self.deciding.add(glob)
        rule = self.rules[glob]
        if callable(rule):
            return *rule(op, cfg), main
        return self.plays(rule, op, cfg, path, main)

    def between(self, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """A step without a rule."""
        if cfg.attends and self.size("cp") > 1:
            fail("parallel", "rules", f"with one for {path}, an attention over the tokens of all ranks of 'cp'", list(self.rules))
        if cfg.draws_mask:
            return self.dropout(op, cfg, path, main)
        if not main.place or self.axis.size == 1:
            return op, cfg, main
        try:
            self.unpack(cfg, main)
            sharded = cfg.shared_out(main.place, self.axis.size)
            if sharded is not None:
                return op, sharded[0], _Main(sharded[1])
        except ValueError as error:
            in_step(error, path)
            raise
        if main.place == 1 and not cfg.featurewise and cfg.packed_parts(0) is None:
            fail("parallel", f"step {path}", f"one that takes each feature by itself ({_said(main)})", op.name)
        return op, cfg, main if cfg.featurewise else _Main(main.place)

    def unpack(self, cfg: Any, main: _Main) -> None:
        """Note the parts of a column layer, where this config says that its x is several side by side."""
        parts = cfg.packed_parts(self.widths.get(main.source, 0)) if main.place == 1 else None
        if parts:
            require(bool(main.source), "parallel", "x", "what a column layer gives, as it is", "what others made of it")
            self.parts[main.source] = parts

    def dropout(self, op: Op, cfg: DropoutConfig, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        names = ("dp", self.axis.name) if self.how["sequence_parallel"] and not main.place else ("dp",)
        shared = [Shared(0, self.mesh[name]) for name in names if self.size(name) > 1]
        if main.place:
            shared.append(Shared(-main.place, self.axis))
        if self.size("cp") > 1:
            shared.append(Shared(1, self.mesh["cp"], zigzag=True))
        if not shared:
            return op, cfg, main
        made = ShardedDropoutConfig(cfg.p, shared=tuple(shared), train=cfg.train)
        return self.remade(op, path, dropout, sharded_dropout), made, _Main(main.place)

    def size(self, name: str) -> int:
        return self.mesh.sizes.get(name, 1)

    def remade(self, op: Op, path: str, source: Op, becomes: Op) -> Op:
        try:
            return remade("parallel", op, source, becomes)
        except ValueError as error:
            in_step(error, path)
            raise

    def plays(self, role: str, op: Op, cfg: Any, path: str, main: _Main) -> tuple[Op, Any, _Main]:
        """A step in a role: its config's fields, and those that the role adds."""
        part = ROLES[role].get(type(cfg))
        if part is None:
            kinds = " or ".join(one.source.name for one in ROLES[role].values() if isinstance(one.source, Op))
            fail("parallel", f"rules for {path}", f"of another role ({role!r} is for {kinds})", type(cfg).__name__)
        axis = self.axis if part.axis == "" else self.mesh[part.axis] if part.axis in self.mesh.sizes else None
        if axis is None or axis.size == 1:
            return op, cfg, main
        if part.before is not None and main.place != part.before:
            wanted = "where x has its features shared out, behind a column layer" if part.before else "where x has all features"
            fail("parallel", f"{path}, a {role} layer,", wanted, _said(main))
        more = {"axis": axis, "side": role, "parts": self.parts.get(path, ()), **self.how}
        source, becomes = (one if isinstance(one, Op) else one(cfg.recipe) for one in (part.source, part.becomes))
        taken = {f.name for f in dataclasses.fields(becomes.config)}
        for field in dataclasses.fields(cfg):
            value = getattr(cfg, field.name)
            if field.name not in taken and value != field.default:
                fail("parallel", join_path(path, field.name), f"{field.default} ({becomes.name} has no such option)", value)
        fields = fields_of(cfg) | more
        try:
            made = becomes.config(**{name: value for name, value in fields.items() if name in taken})
        except ValueError as error:
            in_step(error, path)
            raise
        self.widths[path] = cfg.widths(None)[1] or 0
        after = _Main(main.place if part.before is None else part.after, path if part.after else "")
        return self.remade(op, path, source, becomes), made, after


class _Role(NamedTuple):
    """What becomes of an op. `before`, `after`: the place at which features must be shared out in its x and are in its y (None: at
    any, and they stay there). `axis`: that over which it talks; "" is that of the call. `source`, `becomes`: by a recipe, where one
    chooses."""

    source: Op | Callable[[Any], Op]
    becomes: Op | Callable[[Any], Op]
    before: int | None
    after: int = 0
    axis: str = ""


ROLES: dict[str, dict[type, _Role]] = {
    "column": {
        LinearConfig: _Role(linear, column_linear, 0, 1),
        QLinearConfig: _Role(op_of, column_op_of, 0, 1),
        LowRankConfig: _Role(low_rank, parallel_low_rank, 0, 1),
    },
    "row": {
        LinearConfig: _Role(linear, row_linear, 1),
        QLinearConfig: _Role(op_of, row_op_of, 1),
        LowRankConfig: _Role(low_rank, parallel_low_rank, 1),
    },
    "vocab": {
        EmbeddingConfig: _Role(embedding, vocab_embedding, 0),
        LinearCrossEntropyConfig: _Role(linear_cross_entropy, vocab_linear_cross_entropy, 0),
        CrossEntropyConfig: _Role(cross_entropy, vocab_cross_entropy, 1),
    },
    "expert": {ExpertsConfig: _Role(experts, parallel_experts, None, axis="ep")},
    "context": {AttentionConfig: _Role(attention, context_attention, None, axis="cp")},
}


def _said(main: _Main) -> str:
    return f"shared out along its {main.place}. dimension from the end" if main.place else "shared out by rows alone"
