"""The values that a row's call reads and writes, as the line of a recorded program that tells them (`backend/notes.py`).

A value has one name however it was computed: y of the call that writes it; dy, what a call's backward is given; dx of the call
that reads it; dparams, or sums if they were added to accumulators. Gradients of a value with several readers are told as they are
added: `sum`, at the reader whose dx is added; and `tied`, of a param. What several calls run by a rule is told by the calls whose
values these are: both variants of a program tell the same.
"""

from __future__ import annotations

import itertools
from typing import Any

from funcops.engine.compose.fork import fork
from funcops.engine.contract.configs import Composite
from funcops.engine.program.lower import Call
from funcops.engine.program.rows import Row, is_a, local
from funcops.engine.program.rules import Piece
from funcops.engine.program.templates import part

FORWARD = ("fwd", "raw fwd", "begun fwd", "pausing fwd")
GIVEN = ("bwd", "dgrad", "raw bwd", "raw dgrad", "raw dgrad of bwd", "begun bwd", "begun dgrad", "pausing bwd", "pausing dgrad")
FLYING = ("begun bwd", "begun wgrad", "advance sums")  # whose weight gradients are in flight
OTHERS = ("raw wgrad of bwd", "wgrad", "raw wgrad", "settle sums")


def noted(row: Row, half: str | None, begins: Call | None) -> tuple[list[str], list[str]]:
    """A line for what a row is given, and one for what it computes; none if it computes nothing. `begins`: the program's first
    call, if it is the sum that ends the layer before."""
    before, after, kept, test = list[str](), list[str](), "", ""
    if row.kind in FORWARD:
        ys = row.writes[:-1]
        after, kept = [_item(None, "fwd", "y", ys[0] if len(ys) == 1 else f"({', '.join(ys)})")], f", {row.writes[-1]}"
    elif row.kind == "sum of skip":
        after = [_item(_in_layer(begins, begins) if row.of is begins and begins else None, "fwd", "y", row.writes[0])]
    elif half == "recompute":
        after = [_item(None, "recompute", "y", name) for name in row.writes if is_a(name, "recomputed")]
    elif row.kind == "forward piece":
        after, test = _of_forward(row.of, begins), row.writes[0]
    elif row.kind == "backward piece":
        before, after, test = *_of_backward(row), row.writes[0]
    elif row.kind == "joint wgrads":
        after = [_of_weights(call, call.path, f"{row.writes[0]}[{k}]") for k, call in enumerate(row.of.calls)]
        test = row.writes[0]
    elif row.kind == "settle":
        after = [_item(_read_by(row.of), "dgrad", "dx", row.writes[0])]
    elif row.kind == "sum":
        after = [_item(None, "dgrad", "dx" if isinstance(row.of, Call) else "sum", row.writes[0])]
    elif row.kind in (*GIVEN, *OTHERS):
        given = row.reads[1:2] if row.kind in GIVEN else ()
        before = [_item(None, "dgrad", "dy", name) for name in given if name != "None"]
        after = [_item(None, "dgrad", "dx", name) for name in row.writes if is_a(name, "dx")]
        if row.kind not in FLYING and not _tells(row.of):
            after += [_of_weights(row.of, None, name) for name in row.writes if is_a(name, "dparams")]
    first = [f"notes.tell(({''.join(before)}))"] if before else []
    last = [f"notes.tell(({''.join(after)}){kept})"] if after else []
    return first, [f"if {test} is not NotImplemented: {line}" if test else line for line in last]


def _item(path: str | None, half: str, name: str, value: str) -> str:
    return f"({path!r}, {half!r}, {name!r}, {value}), "


def _tells(call: Call) -> bool:
    """Whether the programs of a call's parts tell the gradients of its params."""
    # a part that is wrapped, as by a policy, runs the program of its config all the same
    return isinstance(call.cfg, Composite) and all(
        [op.lower is not None or isinstance(cfg, Composite) for _, op, cfg in call.cfg.parts()]
    )


def _of_weights(call: Call, path: str | None, value: str) -> str:
    """The gradients of a call's params; or their sums, with what the caller's accumulators had before."""
    into = part("I", call.place)
    return f"({path!r}, 'wgrad', 'dparams' if {into} is None else 'sums', {value}), "


def _in_layer(call: Call, begins: Call | None) -> str:
    """The path of a call, marked if it is in the layer before."""
    return f"<{call.path}" if call is begins else call.path


def _of_forward(piece: Piece, begins: Call | None) -> list[str]:
    """The outputs of calls that run as one: those at their ends, and the sums that other calls read, too."""
    i, found = piece.calls[0].index, list[str]()
    out = f"{local('result', i)}[0]"
    for call, nearby in itertools.pairwise(piece.calls):
        # the fork of the next skip gives the sum, which the rule puts among the values
        if nearby.op is fork and call.op is not fork and call.place is None:
            found.append(_item(_in_layer(call, begins), "fwd", "y", f"{local('values', i)}[{nearby.gives[0]}]"))
    for k, call in enumerate(piece.ends):
        values = [f"{out}[{k}]" if piece.siblings else out, *(f"{local('values', i)}[{v}]" for v in call.gives)]
        found.append(_item(call.path, "fwd", "y", values[0] if len(values) == 1 else f"({', '.join(values)})"))
    return found


def _of_backward(row: Row) -> tuple[list[str], list[str]]:
    """The items for the gradients that the backward of calls in a piece is given, told before, as a rule may write over them; and
    for its results."""
    piece, i = row.of, row.of.calls[0].index
    dys = [row.data[0], *row.data[1]] if piece.siblings else [row.data[0]]
    given = [_item(call.path, "dgrad", "dy", dy) for call, dy in zip(piece.ends, dys, strict=True) if dy != "None"]
    found = []
    if piece.rule.recompute:
        end = piece.calls[-1]
        found.append(_item(end.path, "recompute", "y", f"{local('gradients', i)}.get({end.out})"))
    if piece.rule.settle is None:
        found.append(_item(_read_by(piece), "dgrad", "dx", f"{row.writes[0]}[0]"))
    return given, found


def _read_by(piece: Any) -> str | None:
    """The call that reads what dx is the gradient of; of siblings, which read one value, all of them."""
    return None if piece.siblings else piece.calls[0].path
