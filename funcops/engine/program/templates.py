"""The lines of each kind of row. In braces: `r`, `w` and `d`, which are a row's reads, writes and data; constants, which become
globals of the function; and expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from funcops.engine.program.lower import Call, Place, Scope
from funcops.engine.program.rows import Row, is_a

ARGUMENTS = {"forward": "P, main, extras", "backward": "K, dy, I", "dgrad": "K, dy", "wgrad": "W, I", "products": "W, I"}

# The letter of a constant's name, before the number of its call, scope or piece; and its value.
CONSTANTS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "op": ("o", lambda row: row.of.op),
    "cfg": ("c", lambda row: row.of.cfg),
    "fwd": ("f", lambda row: row.of.op.fwd),
    "bwd": ("b", lambda row: row.of.op.bwd),
    "dgrad": ("b", lambda row: row.of.op.dgrad),
    "wgrad": ("e", lambda row: row.of.op.wgrad),
    "products": ("e", lambda row: row.of.op.products),
    "pausing_fwd": ("pausing_f", lambda row: row.of.op.pausing.fwd),
    "pausing_bwd": ("pausing_b", lambda row: row.of.op.pausing.bwd),
    "pausing_dgrad": ("pausing_b", lambda row: row.of.op.pausing.dgrad),
    "begin": ("begin", lambda row: row.of.op.prefetch.begin),
    "begun_bwd": ("begun_b", lambda row: row.of.op.prefetch.bwd),
    "begun_wgrad": ("begun_e", lambda row: row.of.op.prefetch.wgrad),
    "advanced": ("advance", lambda row: row.of.op.prefetch.advance),
    "settled": ("settle", lambda row: row.of.op.prefetch.settle),
    "recompute": ("y", lambda row: row.of.op.recompute),
    "raw": ("x", lambda row: row.data[0]),
    "raw_wgrad": ("z", lambda row: row.data[0]),
    "raw_recompute": ("s", lambda row: row.data[0]),
    "raw_fwd": ("r", lambda row: row.data[3]),
    "Params": ("T", lambda row: row.data[4]),
    "Residuals": ("C", lambda row: row.of.residuals),
    "OwnPending": ("D", lambda row: row.of.op.pending),
    "Unwatched": ("U", lambda row: row.of.residuals.unwatched),
    "kept_needs": ("w", lambda row: row.needs),
    "needs": ("u", lambda row: row.needs),
    "rule": ("rule", lambda row: row.of.rule),
    "calls": ("calls", lambda row: row.of.calls),
    "joint": ("joint", lambda row: row.of.rule),
    "own": ("own", lambda row: row.of.calls),
    "scope_cfg": ("k", lambda row: row.of.cfg),
    "scope_needs": ("m", lambda row: row.of.needs),
    "Kept": ("K", lambda row: row.of.residuals),
    "Pending": ("W", lambda row: row.of.pending),
    "KeptTree": ("R", lambda row: row.of.residuals),
    "PendingTree": ("R", lambda row: row.of.pending),
    "names": ("names", lambda row: dict.fromkeys(row.of.cfg.names)),
    "ties": ("ties", lambda row: row.of.ties),
}

# `t` is the last guarded leaf: held on, it would outlive the node that is emptied.
_TEST = """try: ok = fast and type({n}) is %s and {n}.cfg is {cfg}%s and (\
(m := {n}._marks) is None or {marks})
except Exception: ok = False
t = None
"""

_PAUSING_FWD = "{pausing_fwd}({params}, {bundle}, {cfg}, needs={kept_needs})"
_PAUSING_BWD = "{pausing_bwd}({reads}, {cfg}, into={into})"
_PAUSING_DGRAD = "{pausing_dgrad}({reads}, {cfg})"
_ENDED = {"bwd": "({wgrad}(None, {cfg}, into={into}), None)", "dgrad": "(None, None)"}  # of a call that kept nothing

_ALIKE = "if {r[1]}.shape != {r[0]}.shape or {r[1]}.dtype is not {r[0]}.dtype: run.unlike({r[0]}, {r[1]})"

LINES = {
    "release": "del {reads}",
    "copy": "{w[0]} = {r[0]}",
    "is": "{w[0]} = {d[0]}",
    "none": "{w[0]} = None",
    "choice": "if {r[0]} is NotImplemented:",
    "values": "{w[0]} = {{{items}}}",
    "results": "{d[0]}, {d[1]} = {r[0]}",
    "unpack": "{d[0]} = {r[0]}",
    # The forward.
    # an argument is deleted at once, as its name would hold x to the end
    "main": "{w[0]} = main; del main",
    # the list is emptied, so that the layer before holds neither addend while this one runs
    "addends": "{w[1]}, {w[0]} = main.pop(), main.pop(); del main",
    "extra": "{w[0]} = extras[{d[0]!r}]",
    "fold": "{w[0]} = fold_in({r[0]}, {d[0]})",
    "open params": """P{i} = {params}
if type(P{i}) is not dict or P{i}.keys() != {names}.keys(): run.check_names({d[0]!r}, 'params', P{i}, {scope_cfg})""",
    "tied params": "P{i} = run.tied({d[0]!r}, P{i}, {ties})",
    "fwd": "{y}, {last} = {fwd}({params}, {bundle}, {cfg}, needs={kept_needs})",
    "raw fwd": """p = {params}
{y}, {last} = ({raw_fwd} if fast and type(p) is {Params} else {fwd})(p, {bundle}, {cfg}, needs={kept_needs})""",
    "begin": "{w[0]} = {begin}({params}, {cfg})",
    "begun fwd": "{y}, {last} = {fwd}({r[0]}.ready(), {bundle}, {cfg}, needs={kept_needs})",
    "pausing fwd": f"{{y}}, {{last}} = yield from {_PAUSING_FWD}",
    "named pausing fwd": f"{{y}}, {{last}} = yield from scopes.resumed({{path}}, 'fwd', {_PAUSING_FWD})",
    "output": "{w[0]} = {r[0]}{d[0]}",
    "alike": _ALIKE,
    "sum of skip": f"{_ALIKE}\n{{w[0]}} = {{r[0]}} + {{r[1]}}",
    "forward piece": "{w[0]} = run.forward_piece({rule}, {calls}, ({all_params}), {d[0]}, E{i})",
    "taken": "{w[0]} = {r[0]}[{d[0]}]",
    # `Nested.__init__` written out; a tracer gets the class itself
    "kept": """{w[0]} = new_node({Kept}); fill({w[0]}, {{{kept}}})
{w[0]}.cfg = {scope_cfg}; {w[0]}.needs = {scope_needs}; {w[0]}.donated = {w[0]}.gone = False; {w[0]}.had = ()""",
    "traced kept": "{w[0]} = {Kept}({{{kept}}}, cfg={scope_cfg}, needs={scope_needs})",
    "return forward": "return {bundle}, {last_read}",
    "named return forward": "scopes.kept({last_read})\nreturn {bundle}, {last_read}",
    # Gradients.
    "outputs": "dy, {writes} = run.taken_apart({d[0]!r}, dy, {d[1]!r})",
    "sum": """{w[0]} = {r[0]} + {r[1]} if type({r[0]}) is type({r[1]}) is Tensor else {r[0]} if {r[1]} is None else \
add({r[0]}, {r[1]})""",
    "meet": "run.meet({d[0]!r}, {d[1]!r}, {r[0]}, {r[1]})",
    "split": "{d[0]} = {r[0]} if type({r[0]}) is tuple and len({r[0]}) == {d[1]} else run.parts_of({r[0]}, {d[2]!r})",
    "nested split": "{d[0]} = run.parts_of({r[0]}, {d[2]!r})",
    "join": "{w[0]} = None if {absent} else {bundle}",
    "part": "{w[0]} = None if {r[0]} is None else {r[0]}{d[0]}",
    "parts": "{writes} = {d[0]!r} if {r[0]} is None else {r[0]}",
    # Trees.
    "open outer residuals": "K{i} = K; del K\nt{i} = K{i}.donated",
    # a node that passes the test is opened without a call; `scope_of` opens or refuses any other
    "open residuals": """K{i} = K{outer}[{name}]
if type(K{i}) is not {KeptTree} or K{i}.cfg is not {scope_cfg} or K{i}.gone or K{i}.had: \
K{i} = run.scope_of({d[0]!r}, K{outer}, {name}, {KeptTree}, {scope_cfg})
elif t{outer}: K{outer}[{name}] = None; K{i} = K{i}.give()
t{i} = K{i}.donated""",
    "open outer pending": "W{i} = W; del W\nt{i} = W{i} is not None and W{i}.donated",
    "open pending": """W{i} = None if W{outer} is None else W{outer}[{name}]
if W{i} is None: pass
elif type(W{i}) is not {PendingTree} or W{i}.cfg is not {scope_cfg} or W{i}.gone or W{i}.had: \
W{i} = run.opened({d[0]!r}, W{outer}, {name}, {PendingTree}, {scope_cfg})
elif t{outer}: W{outer}[{name}] = None; W{i} = W{i}.give()
t{i} = W{i} is not None and W{i}.donated""",
    # without `into` the names serve in its place: a dict with None for each step
    "accumulators": "I{i} = {into} or {names}",
    "tied accumulators": "if I{i} is not {names}: I{i} = run.tied({d[0]!r}, I{i}, {ties}, 'into')",
    "whole tree": "{w[0]} = {d[0]}; del {d[0]}",
    "residuals": "{w[0]} = {node}\nif t{outer}: {node} = None",
    "give": "if t{outer} and {w[0]} is not None: {w[0]} = run.donate({w[0]})",
    "empty": "if t{outer}: {r[0]}.empty()",
    "pending": "{w[0]} = None if W{outer} is None else run.part(W{outer}, {name})",
    "own pending": "{w[0]} = None if W{outer} is None else W{outer}[{name}]\nif t{outer}: W{outer}[{name}] = None",
    "waiting": _TEST % ("{OwnPending}", " and not {n}.needs.drop") + "if ok:",
    # Of what was given away a copy: the piece empties it, and a recomputation reads it afterwards.
    "held": "{w[0]} = {node}.twin() if {donated} and type({node}) is {Residuals} else {node}",
    # The backward of a call.
    "unwanted": "{w[0]} = {wgrad}(None, {cfg}, into={into})",
    "call": _TEST % ("{Residuals}", " and {r[1]} is not None") + "if ok:",
    "twin": """t = new({Unwatched}); {copies}; t.cfg = {cfg}; t.needs = {needs}; t._marks = None; t.__class__ = {Residuals}
if {donated}: {r[0]}.empty()
{r[0]} = t; del t""",
    "put": "put({r[0]}, {d[0]!r}, {r[1]})",
    "filled": "if {r[0]} is not None: {r[0]} = run.filled({r[0]}, {d[0]!r}, {r[1]}, {needs})",
    "bwd": f"{{writes}} = {_ENDED['bwd']} if {{r[0]}} is None else {{bwd}}({{reads}}, {{cfg}}, into={{into}})",
    "dgrad": f"{{writes}} = {_ENDED['dgrad']} if {{r[0]}} is None else {{dgrad}}({{reads}}, {{cfg}})",
    "pausing bwd": f"{{writes}} = {_ENDED['bwd']} if {{r[0]}} is None else (yield from {_PAUSING_BWD})",
    "pausing dgrad": f"{{writes}} = {_ENDED['dgrad']} if {{r[0]}} is None else (yield from {_PAUSING_DGRAD})",
    "named pausing bwd": f"{{writes}} = {_ENDED['bwd']} if {{r[0]}} is None else "
    f"(yield from scopes.resumed({{path}}, 'bwd', {_PAUSING_BWD}))",
    "named pausing dgrad": f"{{writes}} = {_ENDED['dgrad']} if {{r[0]}} is None else "
    f"(yield from scopes.resumed({{path}}, 'dgrad', {_PAUSING_DGRAD}))",
    # The backward of a call that begins before its turn, and whose weight gradients are sums in flight after it.
    "begin backward": "{w[0]} = None if {r[0]} is None else {begin}({r[0]}, {cfg})",
    "begun bwd": "{writes} = ({begun_wgrad}(None, {cfg}, {into}), None) if {r[0]} is None else \
{begun_bwd}({r[0]}.ready(), {r[1]}, {cfg}, {into})",
    "begun dgrad": "{writes} = (None, None) if {r[0]} is None else {dgrad}({r[0]}.ready(), {r[1]}, {cfg})",
    "begun wgrad": "{w[0]} = {begun_wgrad}({r[0]}, {cfg}, {into})",
    "advance sums": "{w[0]} = {advanced}({r[0]}, {into})",
    "settle sums": "{w[0]} = {settled}({r[0]}, {into})",
    "raw bwd": "{writes} = {raw}({reads}, {cfg}, into={into})",
    "raw dgrad": "{writes} = {raw}({reads}, {cfg})",
    "raw dgrad of bwd": "{writes} = {raw}({reads}, {cfg})",
    "raw wgrad of bwd": "{w[0]} = {wgrad}(None, {cfg}, into={into}) if {r[0]} is None else {raw_wgrad}({r[0]}, {cfg}, into={into})",
    # Recomputation.
    "node": "h = {node}",
    "recompute": "{w[0]} = {recompute}(h, {cfg})\ndel h",
    "recompute unchecked": _TEST % ("{Residuals}", "") + "{w[0]} = ({raw_recompute} if ok else {recompute})(h, {cfg})\ndel h",
    "twin to fill": "h = h.twin(); put(h, '_marks', None)",
    "raw recompute": "{w[0]} = {raw_recompute}(h, {cfg})\ndel h",
    "recompute from x": "{w[0]} = run.recomputed_from({recompute}, h, {d[0]!r}, {r[1]}, {cfg})\ndel h",
    "joined": "{w[0]} = {{{d[0]}}}",
    "recompute from a recipe": "{w[0]} = run.recomputed({recompute}, W{outer}, {name}, {cfg}{filling})",
    "recipe": "{w[0]} = run.recipe({op}, {node}) if {some} else None",
    "fill": "if {r[0]} is not None and {r[1]} is not None: {r[0]} = run.completed({r[0]}, {r[1]}, {needs})",
    "fill own": """if {r[0]} is not None and {r[1]} is not None:
    t = {r[0]}; {r[0]} = run.completed(t, {r[1]}, {needs})
    if t{outer} and t is not {r[0]}: t.empty()
    del t""",
    # Pieces.
    "backward piece": "{w[0]} = run.backward_piece({rule}, {calls}, {{{trees}}}, {bundle}, G{i}, {d[4]!r}{ys})",
    "settle": "{w[0]} = {rule}.settle({calls}, {r[0]})",
    "given": "{w[0]} = {r[0]}.pop({d[0]})",
    "gradient": "{w[0]} = {r[0]}.get({d[0]})",
    # Weight gradients.
    "joint wgrads": "{w[0]} = run.wgrads({joint}, {own}, ({all_pending}), ({all_into}))",
    "joint products": "{w[0]} = run.wgrads({joint}, {own}, ({all_pending}), ({all_into}), found)",
    "wgrad": "{w[0]} = {wgrad}({r[0]}, {cfg}, into={into})",
    "raw wgrad": "{w[0]} = {raw_wgrad}({r[0]}, {cfg}, into={into})",
    "no products": "found = []",
    "products": "found += {products}({r[0]}, {cfg}, into={into})",
    # Results.
    "dict": "{{{d[0]}}}",
    "tied gradients": "run.collected({{{d[0]}}}, {ties})",
    "pending tree": "run.pending_of({Pending}, {{{d[0]}}}, {scope_cfg}, {scope_needs})",
    "return backward": "return {gradients}, {bundle}",
    "return dgrad": "return {bundle}, {pending}",
    "return wgrad": "return {gradients}",
    "return products": "return found",
}


# The half that a row computes for the step that it names, in a program whose steps are named. The others run no operator.
HALVES = dict.fromkeys(("fwd", "raw fwd", "begun fwd", "forward piece", "sum of skip", "fold"), "fwd")
HALVES |= dict.fromkeys(("dgrad", "raw dgrad", "begun dgrad", "backward piece", "settle", "sum"), "dgrad")
HALVES |= dict.fromkeys(("bwd", "raw bwd", "raw dgrad of bwd", "raw wgrad of bwd", "begun bwd", "return backward"), "bwd")
HALVES |= dict.fromkeys(("wgrad", "raw wgrad", "unwanted", "joint wgrads", "joint products", "products", "return wgrad"), "wgrad")
HALVES |= dict.fromkeys(("begun wgrad", "advance sums", "settle sums"), "wgrad")
HALVES |= {kind: "recompute" for kind in LINES if "recompute" in kind}


def half_of(row: Row) -> str | None:
    """The half that a row computes, or None if it runs no operator."""
    half = HALVES.get(row.kind)
    # a row that writes dparams, too, computes both halves at once
    return "bwd" if half == "dgrad" and any(is_a(name, "dparams") for name in row.writes) else half


def number(of: Any) -> int:
    """The number in the names of a call, a scope or a piece."""
    return of.index if isinstance(of, (Call, Scope)) else of.calls[0].index  # type: ignore[no-any-return]


def part(tree: str, place: Place | None) -> str:
    """A part of the trees with that name, as an expression: `P1['up']`; the whole tree is `P`."""
    if place is None:
        return "None"
    return tree if place.scope is None else f"{tree}{place.scope.index}[{place.name!r}]"


def _is_node(name: str) -> bool:
    """Whether a local holds residuals from which a y is recomputed: `h`, or held before under a name with a number."""
    return name == "h" or is_a(name, "held")


def _bundle(main: Any, takes: Iterable[Any], labels: tuple[str, ...]) -> str:
    """A main value with others, as an expression."""
    if labels:
        return f"WithExtras({main}, {{{', '.join(f'{name!r}: {one}' for name, one in zip(labels, takes, strict=True))}}})"
    return f"({', '.join(map(str, (main, *takes)))})" if takes else str(main)


def _marks(fields: Any, row: Row) -> str:
    cls = row.of.op.pending if row.kind == "waiting" else row.of.residuals
    marks = f"type(m) is tuple and m == ({cls.marks_source})" if cls.guarded else "type(m) is tuple and not m"
    return marks.replace("n.", f"{fields['n']}.")


EXPRESSIONS: dict[str, Callable[[Any, Row], Any]] = {
    "i": lambda fields, row: number(row.of),
    "reads": lambda fields, row: ", ".join(row.reads),
    "writes": lambda fields, row: ", ".join(row.writes),
    "last": lambda fields, row: row.writes[-1],
    "last_read": lambda fields, row: row.reads[-1],
    "copies": lambda fields, row: "; ".join(
        f"t.{n} = {row.reads[1] if n in row.of.fields else f'{row.reads[0]}.{n}'}" for n in row.of.residuals.names
    ),
    "outer": lambda fields, row: row.of.place.scope.index,
    "name": lambda fields, row: repr(row.of.place.name),
    "path": lambda fields, row: repr(row.of.path),
    "donated": lambda fields, row: f"t{row.of.place.scope.index}" if row.of.place.scope is not None else "False",
    "node": lambda fields, row: row.reads[0] if row.reads and _is_node(row.reads[0]) else part("K", row.of.place),
    "n": lambda fields, row: row.reads[0] if row.reads else "h",
    "marks": _marks,
    "into": lambda fields, row: part("I", row.of.place),
    "params": lambda fields, row: part("P", row.of.place),
    "absent": lambda fields, row: " and ".join(f"{one} is None" for one in row.reads if one != "None"),
    "bundle": lambda fields, row: _bundle(*row.data[:3]),
    "y": lambda fields, row: _bundle(row.writes[0], row.writes[1:-1], ()),
    "some": lambda fields, row: " or ".join(f"{one} is not None" for one in row.data[0]) or "False",
    "items": lambda fields, row: ", ".join(f"{v}: {one}" for v, one in zip(row.data[0], row.reads, strict=True)),
    "trees": lambda fields, row: ", ".join(f"{scope}: K{scope}" for scope in row.data[3]),
    "filling": lambda fields, row: f", {row.of.fields!r}, {row.reads[0]}" if row.reads else "",
    "ys": lambda fields, row: (
        f", {{{', '.join(f'{one.number}: {one}' for one in row.reads if is_a(one, 'recomputed'))}}}" * bool(row.data[5])
    ),
    "all_params": lambda fields, row: "".join(f"{part('P', call.place)}, " for call in row.of.calls),
    "all_pending": lambda fields, row: "".join(f"{one}, " for one in row.reads),
    "all_into": lambda fields, row: "".join(f"{part('I', call.place)}, " for call in row.of.calls),
    "kept": lambda fields, row: ", ".join(f"{name!r}: {one}" for name, one in zip(row.of.parts, row.reads, strict=True)),
    "pending": lambda fields, row: fields.tree("pending", "pending tree", row.of),
    "gradients": lambda fields, row: fields.tree("dparams", "gradients", row.of),
}
