"""Programs, made once for all that they depend on, then found."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import scopes, select, wants_triton
from funcops.engine.backend.source import compile_source
from funcops.engine.contract import functions
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Mask, Needs
from funcops.engine.contract.op import Op, with_raw
from funcops.engine.contract.pausing import Pauses, ran
from funcops.engine.contract.schema import Donated, open_node
from funcops.engine.contract.trace_safe_cache import reading, remember
from funcops.engine.contract.walk import steps
from funcops.engine.errors import describe, fail
from funcops.engine.program import compiled_programs, rules, run
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.backward import Backward
from funcops.engine.program.forward import Forward
from funcops.engine.program.lower import Lowered, lower
from funcops.engine.program.rows import Row, Rows
from funcops.engine.program.rules import Cover, changes, cover
from funcops.engine.program.source import Source
from funcops.engine.program.weights import SecondHalf
from funcops.engine.residuals.nested import needs_of
from funcops.engine.trees import WithExtras

_compiling = torch.compiler.is_dynamo_compiling


def forward(op: Op, cfg: Any, needs: Needs, main: Any, pausing: bool = False) -> Any:
    """The forward; if it is `pausing` and a call may pause, it returns a generator."""
    return _found("forward", op, cfg, needs, main, pausing)


def forwards(
    bodies: Sequence[tuple[Op, Any]], needs: Sequence[Needs], params: Sequence[Any], main: Any, pausing: bool = False
) -> list[Any] | None:
    """The forwards of layers in a row, each an op and its config. None if each is by itself, as no kernel computes the sum that
    ends a layer with what reads it in the next one; else they pass on its addends."""
    lowered = all([op.lower is not None for op, _ in bodies]) and all([type(own) is dict for own in params])
    if len(needs) < 2 or not lowered or functions.any_autocast():
        return None  # the op's own function runs, or raises the error
    parts = ("forward_ends", *["forward_between"] * (len(needs) - 2), "forward_begins")
    # a layer between two others decides; False is cached, too, so a repeat that does not join stops here
    found = [_found("forward_between", *bodies[-1], needs[-1], main, pausing)]
    if found[0]:
        found = [_found(which, *of, own, main, pausing) for which, of, own in zip(parts, bodies, needs, strict=True)]
    return found if all(found) else None


def backward(which: str, op: Op, cfg: Any, needs: Needs, dy: Any, pausing: bool = False) -> Any:
    """The whole backward or, if `which` is "dgrad", its first half; `pausing` as in `forward`."""
    main = dy.main if type(dy) is WithExtras else dy
    # the dy of a parallel is a tuple, whose first part tells device and dtype
    return _found(which, op, cfg, needs, main[0] if type(main) is tuple and main else main, pausing)


def _found(which: str, op: Op, cfg: Any, needs: Needs, main: Any, pausing: bool = False) -> Any:
    """The program for these arguments. Rules apply by the device and dtype of `main`; on the CPU, only if it is not small; never
    where a function chooses for every kernel, as in the mode of `funcops.invariant`."""
    device_type = dtype = None
    if type(main) is Tensor and not (select.chosen_anywhere and select.choice()[2]):
        if (select.chosen_anywhere or not main.is_cpu) and wants_triton(main):
            device_type = "cuda"
        elif _compiling() or main.numel() >= rules.FEW:
            # a tracer would guard on the size
            device_type = "cpu"
        dtype = main.dtype if device_type else None
    if _compiling():
        id(cfg)  # the tracer guards on it: a method that gives a constant has no guard on its object
        return getattr(compiled_programs, cfg.program_while_tracing(which, needs.x, needs.params, device_type, dtype, scopes.on))
    # the number of changes stands for the rules and for `checking`, of which a program is made
    key = which, needs, device_type, dtype, len(changes), scopes.on, pausing
    found = cfg.programs.get(key)
    if found is None:
        found = remember(cfg.programs, key, _made(which, op, cfg, needs, device_type, dtype, scopes.on, pausing=pausing))
    return found


_traced: dict[Any, str] = {}


def program_while_tracing(cfg: Any, which: str, x: Mask, params: Mask, device_type: str | None, dtype: Any, named: int) -> str:
    """The name of a program in the module `compiled_programs`: a tracer reads a module's attributes as they are, but a dict in an
    older state. A method of configs: the tracer of torch 2.11 wants every argument to be a constant, except the object of a
    method."""
    key = which, cfg, x, params, device_type, dtype, len(changes), named
    if key not in _traced:
        name = f"{which}_{len(_traced)}"
        # the tracer has begun, and may have noted what the memos lack
        with reading():
            setattr(compiled_programs, name, _made(which, cfg.lowered_by, cfg, Needs(x, params), device_type, dtype, named, True))
        _traced[key] = name
    return _traced[key]


def lowers(config: Any, op: Op) -> None:
    """Note on a combinator's class of configs that `op` lowers them to programs; and on the bwd of a scope what it runs after its
    checks of residuals."""
    config.lowered_by, config.program_while_tracing = op, program_while_tracing
    if op.keeps is not None:
        with_raw(op.bwd, functools.partial(_raw_bwd, op))


# As `torch.compiler.assume_constant_result` does, which would import the compiler: the tracer takes its result as a constant.
program_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _made(
    which: str,
    op: Op,
    cfg: Any,
    needs: Needs,
    device_type: str | None,
    dtype: Any,
    named: int,
    for_tracer: bool = False,
    pausing: bool = False,
) -> Any:
    lowered = lower(op, cfg, needs)
    which, _, part = which.partition("_")
    if part and not (joins(lowered, device_type, dtype) if part == "between" else lowered.cut(part == "begins", part == "ends")):
        return False
    if which == "wgrad":  # no tensor tells them here: rules decide when it runs
        device_type, dtype = "cuda", torch.bfloat16
    found = cover(lowered, device_type, dtype, which == "backward")
    rows = rows_of(which, lowered, found, for_tracer, pausing)
    # While one pauses another may run, which must not end its memo; a tracer reads none.
    shares = not pausing and not for_tracer and any([part.cfg.derives for part in steps(cfg, op=op)])
    text, names = Source(named, shares, lowered.calls[0] if lowered.begins else None).function(which, rows, for_tracer)
    return compile_source(f"program: {which} of {op.name}", text, names)[which]


def joins(lowered: Lowered, device_type: str | None, dtype: Any) -> bool:
    """Cut the forward as a layer between two others. Whether that is cheaper than a layer by itself."""
    apart = cover(lowered, device_type, dtype)
    return lowered.cut(True, True) and cover(lowered, device_type, dtype).forward_saves > apart.forward_saves


def rows_of(which: str, lowered: Lowered, found: Cover, for_tracer: bool = False, pausing: bool = False) -> tuple[Row, ...]:
    """The rows of a program's function, after all passes."""
    rows = Rows(lowered, found, for_tracer, pausing)
    if which == "forward":
        return Forward(rows).write()
    return (SecondHalf if which in ("wgrad", "products") else Backward)(rows, which).write()


def bwd(op: Op, residuals: Any, dy: Any, cfg: Any, into: Any) -> tuple[Any, Any]:
    """The `bwd` of an op that is lowered to a program."""
    # a skip that kept nothing has no program: its body answers, or refuses anything but residuals
    if op.keeps is None and not needs_of(residuals):
        return cfg.op.bwd(residuals, dy, cfg.cfg, into=into)  # type: ignore[no-any-return]
    node, program, sums = _whole(op, residuals, dy, cfg, into)
    dparams, dx = program(node, dy, sums)
    return (dparams if into is None else into), dx


def pausing_bwd(op: Op, residuals: Any, dy: Any, cfg: Any, into: Any) -> Pauses:
    """`bwd`, with the pauses of its calls."""
    if op.keeps is None and not needs_of(residuals):
        return cfg.op.bwd(residuals, dy, cfg.cfg, into=into)
    node, program, sums = _whole(op, residuals, dy, cfg, into, pausing=True)
    dparams, dx = yield from ran(program(node, dy, sums))
    return (dparams if into is None else into), dx


def _whole(op: Op, residuals: Any, dy: Any, cfg: Any, into: Any, pausing: bool = False) -> tuple[Any, Any, Any]:
    """The residuals after every check, the program of the whole backward, and its accumulators."""
    where = f"{op.name}_bwd"
    node, own, own_cfg = _opened(where, op, residuals, cfg)
    # a body that is a single call checks its accumulators by itself
    sums = into if into is None or own.lower is None else accumulators(where, own, into, node, own_cfg, dy)
    needs = needs_of(node) if own.lower is None else node.needs
    return node, backward("backward", op, cfg, needs, dy, pausing), sums


def _raw_bwd(op: Op, node: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
    sums = None if into is None else accumulators(f"{op.name}_bwd", op, into, node, cfg, dy)
    dparams, dx = backward("backward", op, cfg, node.needs, dy)(node, dy, sums)
    return (dparams if into is None else into), dx


def dgrad(op: Op, residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
    """The `dgrad` of an op that is lowered to a program."""
    if op.keeps is None and not needs_of(residuals):
        return cfg.op.dgrad(residuals, dy, cfg.cfg)  # type: ignore[no-any-return]
    node, _, _ = _opened(f"{op.name}_dgrad", op, residuals, cfg)
    return backward("dgrad", op, cfg, needs_of(node), dy)(node, dy)  # type: ignore[no-any-return]


def pausing_dgrad(op: Op, residuals: Any, dy: Any, cfg: Any) -> Pauses:
    """`dgrad`, with the pauses of its calls."""
    if op.keeps is None and not needs_of(residuals):
        return cfg.op.dgrad(residuals, dy, cfg.cfg)
    node, _, _ = _opened(f"{op.name}_dgrad", op, residuals, cfg)
    return (yield from ran(backward("dgrad", op, cfg, needs_of(node), dy, pausing=True)(node, dy)))


def _opened(where: str, op: Op, residuals: Any, cfg: Any) -> tuple[Any, Op, Any]:
    """The residuals after every check, and the op and config that made them: for a skip, its body's. Residuals of a body that
    is one call are not opened."""
    # a skip, perhaps of a skip, has no trees of its own
    while op.lower is not None and op.keeps is None:
        op, cfg = cfg.op, cfg.cfg
    node, cls = residuals, op.keeps
    if op.lower is None:  # its own function takes the cell: held here, the leaves would outlive their last reader
        return node, op, cfg
    if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
        node, residuals._node = node._node, None
    # what `open_node` would accept at once passes without the call
    if type(node) is not cls or node.cfg is not cfg or node.gone or node.had:
        node = open_node(where, node, cls, cfg)
    return node, op, cfg


def wgrad(op: Op, cls: Any, pending: Any, cfg: Any, into: Any, which: str = "wgrad") -> Any:
    """The `wgrad` of an op that is lowered to a scope, or its `products`; `cls`: the class of its pending."""
    where = f"{op.name}_wgrad"
    require_config(where, cfg, op.config)
    node = pending
    if type(node) is Donated and node._node is not None:  # as in `_opened`
        node, pending._node = node._node, None
    if node is not None and (type(node) is not cls or node.cfg is not cfg or node.gone or node.had):
        node = open_node(where, node, cls, cfg)
    sums = None if into is None else accumulators(where, op, into, node, cfg)
    found = _found(which, op, cfg, Needs.NONE if node is None else node.needs, None)(node, sums)
    return found if into is None or which == "products" else into


def accumulators(where: str, op: Op, into: Any, node: Any, cfg: Any, dy: Any = None) -> Any:
    """Return `into` after a check of every leaf; a tied path gets its source's accumulator."""
    if cfg.names:
        run.check_names(where, "into", into, cfg)
    check_into_tree(where, into, op, cfg, node, dy)
    ties = cfg.ties
    seen: dict[tuple[str, str], str] = {}
    for path, source in (*[(source, source) for source in {source for _, source in ties}], *ties):
        first = seen.setdefault((source, path.partition(".")[0]), path)
        if first != path:  # refused here, before the step of both refuses it
            one = f"{first} and {path} of one step are one tensor"
            fail(where, "into", f"None: {one}, whose gradients only a wgrad or bwd without into adds up", describe(into))
    return run.tied(where, into, ties, "into") if ties else into
