"""The law Frugal: exactly the fields that the requested gradients read are saved, and only these gradients are computed.

The fields to save under a mask follow from the run under `Needs.ALL` and the declarations of the fields (`Field.wanted`). The needs
of a combinator's parts are derived here independently, from the definition: a value needs a gradient if something that needs one
led to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.step import Step, live_inputs
from funcops.engine.contract.checking import aliases_said
from funcops.engine.contract.configs import Composite, fields_of
from funcops.engine.contract.needs import Mask, Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Field, Saved
from funcops.engine.contract.walk import Inside, rewrite
from funcops.engine.errors import join_path
from funcops.engine.program.values import abstract_params
from funcops.engine.trees import dense, paths, tensors, tree_map
from funcops.testing.case import Case
from funcops.testing.checks import run, same_bits
from funcops.testing.tolerances import assert_close


def law_frugal(case: Case, dtype: torch.dtype) -> None:
    """Under every mask of needs exactly the fields declared for it are saved, in residuals and in pending, and the requested
    gradients are as under `Needs.ALL`, the others None."""
    op, cfg = case.op, case.cfg
    params, x, y, residuals, dy, full = run(case, dtype)
    assert op.fwd(params, x, cfg, needs=Needs.NONE)[1] is None, "Needs.NONE keeps nothing"
    if op.recompute is not None:
        _, kept = op.fwd(params, x, cfg, needs=Needs.NONE.with_recompute())
        with _naming_what_lacks("recompute", Needs.NONE.with_recompute(), kept, residuals):
            same_bits(op.recompute(kept, cfg), y, "y recomputed without gradients")
    if not (isinstance(cfg, Composite) and cfg.side_by_side):  # whose residuals are views of the rows of x
        _aliases_are_inputs(residuals, (params, x))
    for name, alias in aliases_said(residuals, {"params": params, "x": x, "y": y}):
        raise AssertionError(f"residuals.{name} must be {alias} itself, got another tensor")
    _, pending = op.dgrad(residuals, dy, cfg)
    if op.lower is not None:
        _shares_as_alone(op, cfg, {"params": params, "x": x}, dy)
    for needs in masks(*dense((params, x))):
        _, kept = op.fwd(params, x, cfg, needs=needs)
        _keeps(kept, residuals, needs, "residuals")
        want = _masked(full, needs)
        with _naming_what_lacks("bwd", needs, kept, residuals):
            got = op.bwd(kept, dy, cfg)
        for path, g in paths(got[0]).items():
            wanted, found = ("None" if part is None else "a gradient" for part in (paths(want[0])[path], g))
            assert wanted == found, f"dparams.{path} under {needs} must be {wanted}, got {found}"
        same_bits(got[1], want[1], f"dx under {needs}")
        assert_close(got[0], want[0], dtype=dtype, by_leaf=True, what=f"dparams under {needs}")
        dx, waiting = op.dgrad(kept, dy, cfg)
        _keeps(waiting, pending, needs, "pending")
        same_bits((op.wgrad(waiting, cfg), dx), got, f"dgrad and wgrad under {needs}")
        if tensors(params):
            into = tree_map(lambda g: None if g is None else torch.ones_like(g), got[0])
            total, _ = op.bwd(kept, dy, cfg, into=into)
            assert_close(total, tree_map(lambda g: None if g is None else g + 1, got[0]), dtype=dtype, what=f"into under {needs}")


@contextlib.contextmanager
def _naming_what_lacks(what: str, needs: Needs, kept: Any, full: Any) -> Iterator[None]:
    """Name the fields that were not saved, and why, if reading one raises: the error says only that None has no such attribute."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        lacks = [
            name for name in getattr(full, "fields", ()) if getattr(full, name) is not None and getattr(kept, name, None) is None
        ]
        if not lacks:
            raise
        said = "; ".join(f"residuals.{name} is None there: {_declared(full.fields[name])}" for name in lacks)
        raise AssertionError(f"{what} under {needs} raised {type(error).__name__}: {error}; {said}") from error


def _declared(field: Field) -> str:
    """Say why a field is saved, by its declaration."""
    phases = "|".join(str(phase.name) for phase in (DGRAD, WGRAD, RECOMPUTE) if phase in field.needed_by)
    usual = tuple(side for phase, side in ((DGRAD, "x"), (WGRAD, "params")) if phase in field.needed_by)
    return f"needed_by={phases}" + (f", of={field.of}" if field.of != usual else "")


def masks(params: Any, x: Any) -> Iterator[Needs]:
    """Make the masks to test: each gradient alone, all but the last, each side alone, and each part of x beside all params, even if
    a side has no gradient. A bare x is requested as True, a part of it by its path."""
    given = {"x": {p for p, t in paths(x).items() if _float(t)}, "params": {p for p, t in paths(params).items() if _float(t)}}
    every = [(side, path) for side, found in given.items() for path in sorted(found)]
    wanted = [{one} for one in every] + [set(every[:-1])] + [{one for one in every if one[0] == side} for side in given]
    asked = [{side: _mask(one, side, given[side]) for side in given} for one in wanted]
    asked += [{"x": True, "params": False}, {"x": False, "params": True}]
    asked += [{"x": one["x"], "params": True} for one in asked if one["x"] is not False]
    found = dict.fromkeys(Needs(**one) for one in asked)
    return (needs for needs in found if needs and needs is not Needs.ALL)


def _mask(asked: set[tuple[str, str]], side: str, given: set[str]) -> Any:
    chosen = {path for name, path in asked if name == side}
    return bool(chosen) if chosen == given or "" in chosen else sorted(chosen)


def _float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _masked(full: Any, needs: Needs) -> Any:
    dparams, dx = full
    parts = iter(paths(dx))
    wanted_x = needs.x if isinstance(needs.x, bool) else None
    masked_x = tree_map(lambda d, p=parts: d if (needs.input(next(p)) if wanted_x is None else wanted_x) else None, dx)
    names = iter(paths(dparams))
    return tree_map(lambda d: d if needs.param(next(names)) else None, dparams), masked_x


def _aliases_are_inputs(residuals: Any, given: Any) -> None:
    same = {id(t) for t in tensors(given)}
    storages = {t.untyped_storage()._cdata for t in tensors(given) if t.numel()}
    for t in tensors(residuals):
        shares = t.numel() > 0 and t.untyped_storage()._cdata in storages
        assert not shares or id(t) in same, "a residual that aliases an input must be that same object"


def _shares_as_alone(op: Op, cfg: Any, given: dict[str, Any], dy: Any) -> None:
    """Check that a tensor which the steps share when they run one by one is shared if rules of fusion run them: a copy would cost
    bytes that a report does not count, and a write to the tensor would go unnoticed."""
    alone = rewrite(cfg, lambda part: Inside(changes=lambda parts: {"fuse": False}) if "fuse" in fields_of(part.cfg) else None)[1]
    found, wanted = (_shared(op, one, given, dy) for one in (cfg, alone))
    for path, first in wanted.items():
        same = found.get(path, first) == first
        assert same, f"{path} must be {first} itself, as without rules of fusion (fuse=False), got another tensor"


def _shared(op: Op, cfg: Any, given: dict[str, Any], dy: Any) -> dict[str, str]:
    """The first path with the very same tensor, by the path of each tensor of a forward and a dgrad."""
    y, residuals = op.fwd(given["params"], given["x"], cfg)
    trees = {**given, "y": y, "dy": dy, "residuals": residuals, "pending": op.dgrad(residuals, dy, cfg)[1]}
    first: dict[int, str] = {}
    held = [pair for side, tree in trees.items() for pair in paths({side: tree}).items()]
    return {path: first.setdefault(id(t), path) for path, t in held if isinstance(t, Tensor)}


def _keeps(kept: Any, full: Any, needs: Needs, what: str) -> None:
    """Check that `kept` holds the declared part of `full`, which was saved under `Needs.ALL`."""
    got, want = held(kept), expected(full, needs)
    loose = {path.partition(".{")[0] for path in want if ".{" in path}  # fields that hold names of the op's choice
    more = {p for p in got - want if not any(p.startswith(f"{field}.") for field in loose)}
    less = {p for p in want - got if ".{" not in p}
    assert not more and not less, f"{what} under {needs}: keeps {sorted(more)} too many, lacks {sorted(less)}"
    assert what == "pending" or len(tensors(kept)) <= len(tensors(full)), f"{what} under {needs}: more than under Needs.ALL"


def held(node: Any) -> set[str]:
    """The paths of the tensors that residuals or pending hold."""
    return {path for path, t in paths(node).items() if t is not None}


def expected(full: Any, needs: Needs) -> set[str]:
    """The paths that residuals or pending must hold under `needs`, given the same node under `Needs.ALL`, `full`."""
    if full is None or not (needs.params if full.kind == "pending" else needs):
        return set()
    if isinstance(full, Saved):
        return {
            path for name, field in full.fields.items() if field.wanted(needs) for path in _under(name, field, getattr(full, name))
        }
    parts = parts_needs(full.cfg, needs)
    found = {join_path(str(name), path) for name, own in parts.items() for path in expected(full[name], own)}
    if full.cfg.as_chain is not None:
        found |= _recomputed(full, parts)
    return found


def _under(name: str, field: Any, value: Any) -> Iterator[str]:
    if value is not None and field.shape.startswith("{"):
        yield f"{name}.{{"
        return
    for path, t in paths(value).items():
        if t is not None:
            yield join_path(name, path)


def _recomputed(full: Any, parts: dict[Any, Needs]) -> set[str]:
    """The paths held for the outputs of a chain's recomputed steps: the fields that an output is recomputed from if its producer
    reads its x anyway, saved or recomputed, otherwise the output itself."""
    cfg, found, left_out = full.cfg, set[str](), False
    ending = "()" if full.kind == "pending" else ""  # of the names of residuals that recompute
    for before, step in reversed(list(itertools.pairwise(cfg.steps))):
        places = {join_path(step.name, place) for place in _reads_main(step.op, step.cfg, full[step.name], parts[step.name])}
        if left_out:  # the step reads main to recompute its own output
            places |= {
                f"{step.name}{ending}.{name}" for name, field in step.op.fields(step.cfg).items() if field.alias in ("x", "x.0")
            }
        fields = before.op.fields(before.cfg)
        of_x = [field for field in fields.values() if (field.alias or "").partition(".")[0] == "x"]
        left_out = before.name in cfg.recomputed and bool(places) and all(field.wanted(parts[before.name]) for field in of_x)
        if left_out:
            name = f"{before.name}{ending}"
            node = full.get(name) if ending else full[name]
            found |= {
                join_path(name, field)
                for field in fields
                if RECOMPUTE in fields[field].needed_by and getattr(node, field) is not None
            }
        else:
            found |= places if before.name in cfg.recomputed else places & held(full)  # recomputed outputs are not in `full`
    return found


def _reads_main(op: Op, cfg: Any, full: Any, needs: Needs) -> Iterator[str]:
    """The paths where residuals or pending hold the main input, if `needs` requires it there."""
    if full is None or not (needs.params if full.kind == "pending" else needs):
        return
    if isinstance(full, Saved):
        while op.lower is not None:  # a skip
            op, cfg = cfg.op, cfg.cfg
        alias = [name for name, field in op.fields(cfg).items() if field.alias in ("x", "x.0")]
        yield from (name for name in alias if name in full.fields and full.fields[name].wanted(needs))
    elif op.lower is not None:
        parts = parts_needs(full.cfg, needs)
        for name, inner, inner_cfg in first_parts(cfg):
            if name is None:
                yield from _reads_main(inner, inner_cfg, full, needs)
            else:
                yield from (join_path(str(name), path) for path in _reads_main(inner, inner_cfg, full[name], parts[name]))


def first_parts(cfg: Any) -> Iterator[tuple[Any, Op, Any]]:
    """The name, op and config of each part whose input is x; a skip's body has the name None."""
    found = cfg.parts()
    if cfg.times is not None:
        found = [(0, *found[0][1:])]
    yield from found if cfg.branching else found[:1]


def parts_needs(cfg: Any, needs: Needs) -> dict[Any, Needs]:
    """The needs of each part of a combinator, by its name."""
    live = live_inputs(needs.x, cfg.extras)
    if cfg.side_by_side is not None:
        return dict.fromkeys(range(cfg.side_by_side), needs)
    if cfg.branching:
        return {branch.name: _step_needs(branch, live, needs) for branch in cfg.branches}
    found: dict[Any, Needs] = {}
    if cfg.times is not None:
        for i in range(cfg.times):
            asked = _asked(cfg.op, cfg.cfg, needs, "" if cfg.stacked else f"{i}.")
            found[i] = Needs(
                x=_labels({"": "main", **{n: f"extras.{n}" for n in cfg.extras}}, live, bool(cfg.extras)), params=asked
            )
            live[""] = bool(found[i])
        return found
    assert isinstance(cfg, ChainConfig), f"the law does not know how needs reach the parts of this combinator: {cfg}"
    tied = {path for path, source in cfg.ties if needs.param(source)}
    for step in cfg.steps:
        found[step.name] = _step_needs(step, live, needs, tied)
        live.update(dict.fromkeys(("", *step.given), bool(found[step.name])))
    return found


def _step_needs(step: Step, live: dict[str, Mask], needs: Needs, tied: Any = ()) -> Needs:
    labels = {"": "main" if step.passes else "0"}
    labels |= {name: f"extras.{name}" if step.passes else str(i + 1) for i, name in enumerate(step.names)}
    asked = _asked(step.op, step.cfg, needs, f"{step.name}.", tied)
    return Needs(x=_labels(labels, live, bool(step.names)), params=asked)


def _labels(labels: dict[str, str], live: dict[str, Mask], several: bool) -> Any:
    if not several:
        return live[""]
    wanted = [label for name, label in labels.items() if live[name]]
    return True if len(wanted) == len(labels) else wanted


def _asked(op: Op, cfg: Any, needs: Needs, prefix: str, tied: Any = ()) -> Any:
    every = [path for path, t in paths(abstract_params(op, cfg)).items() if t is not None]
    wanted = [p for p in every if needs.param((prefix + p).rstrip(".")) or prefix + p in tied]
    return bool(every) if wanted == every else wanted
