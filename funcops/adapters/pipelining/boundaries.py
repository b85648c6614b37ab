"""The boundaries between stages, from an example of one microbatch, and a check that params and microbatches fit it. The check runs
before a step begins: an error in its middle would leave the other ranks waiting for a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.step import split_x
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, fail, short
from funcops.engine.program.run import tied
from funcops.engine.program.values import abstract_params
from funcops.engine.trees import WithExtras, fake, leaves, paths, tensors, tree_map_tensors
from funcops.library.formats.working import working_like

ERRORS = (ValueError, TypeError, RuntimeError)  # raised by operators and torch for tensors that do not fit


class Boundaries:
    """`trees`: the input of every stage and the output of the last, as fake tensors. `dtype`: the dtype of params."""

    def __init__(self, cfg: ChainConfig, x: Any, dtype: torch.dtype) -> None:
        self.cfg, self.dtype = cfg, dtype
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            self.main, self.extras = split_x("Pipeline", tree_map_tensors(fake, x), cfg)
            work = working_like(chain, cfg, tree_map_tensors(lambda t: fake(t, dtype), abstract_params(chain, cfg)))
            self.params = tied("Pipeline", work, cfg.ties)
        self.trees = self._of_example(x)
        self._fit = {looks(self._whole(self.main, self.extras))}
        self._fit_dtypes = {dtype}
        for i, tree in enumerate(self.trees[1:-1], 1):
            for t in leaves(tree):
                if not isinstance(t, Tensor):
                    fail("Pipeline", f"y of stage {i - 1}", "tensors, to be sent", describe(t), TypeError)

    def check_inputs(self, where: str, mains: Sequence[Any], extras: Sequence[dict[str, Any]], first: bool) -> None:
        """Raise for a microbatch for which a stage's output would differ from the example's in shape or dtype. `first`: whether
        this rank reads the main value."""
        for m, (main, more) in enumerate(zip(mains, extras, strict=True)):
            given = main if first else self.main
            found = looks(self._whole(given, more))
            if found in self._fit:
                continue
            if not self._same(given, more):
                self._name(where, m, self._whole(given, more))
            self._fit.add(found)

    def check_params(self, where: str, own: Mapping[str, Any]) -> None:
        """Raise if all params have another dtype than `dtype`, unless their stages' outputs are the same as the example's."""
        dtypes = {t.dtype for t in tensors(own) if t.is_floating_point()}
        if len(dtypes) != 1 or dtypes <= self._fit_dtypes:
            return
        (dtype,) = dtypes
        here = [tie for tie in self.cfg.ties if tie[0].partition(".")[0] in own]
        for index, step in enumerate(self.cfg.steps):
            if step.name in own:
                try:
                    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                        params = tied(where, tree_map_tensors(fake, dict(own)), here)
                        y = self._forward(index, params[step.name], self.trees[index], self.extras)
                except ERRORS:
                    y = None
                if y is None or looks(y) != looks(self.trees[index + 1]):
                    fail(where, "params", f"{short(self.dtype)}, Pipeline's dtype", f"{short(dtype)}: make it with dtype={dtype}")
        self._fit_dtypes.add(dtype)

    def _of_example(self, x: Any) -> list[Any]:
        """The boundaries of the example x. An error about dtypes names Pipeline's dtype, which a stage's operator does not know."""
        try:
            return self._through(self.main, self.extras)
        except ERRORS as error:
            others = {t.dtype for t in tensors(x) if t.is_floating_point()} - {self.dtype}
            if len(others) != 1:
                raise
            (dtype,) = others
            expected = f"such that the stages accept an x of {short(dtype)} (try dtype={dtype})"
            raise ValueError(f"Pipeline: dtype must be {expected}, got {short(self.dtype)}: {error}") from error

    def _forward(self, index: int, params: Any, main: Any, extras: dict[str, Any]) -> Any:
        step = self.cfg.steps[index]
        return step.split_y(step.op.fwd(params, step.x(main, extras), step.cfg, needs=Needs.NONE)[0])[0]

    def _through(self, main: Any, extras: dict[str, Any]) -> list[Any]:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            found = [tree_map_tensors(fake, main)]
            extras = tree_map_tensors(fake, extras)
            for index, step in enumerate(self.cfg.steps):
                found.append(self._forward(index, self.params[step.name], found[-1], extras))
        return found

    def _same(self, main: Any, extras: dict[str, Any]) -> bool:
        try:
            return looks(self._through(main, extras)[1:]) == looks(self.trees[1:])
        except ERRORS:
            return False

    def _whole(self, main: Any, extras: dict[str, Any]) -> Any:
        return WithExtras(main, extras) if self.cfg.extras else main

    def _name(self, where: str, m: int, given: Any) -> None:
        want, got = paths(self._whole(self.main, self.extras)), paths(given)
        path = next(path for path in (*want, *got) if _look(want.get(path)) != _look(got.get(path)))
        what = f"microbatch {m} of xs{', ' if path else ''}{path}"
        fail(where, what, f"{describe(want.get(path))}, as in the example x", describe(got.get(path)))


def looks(tree: Any) -> tuple[Any, ...]:
    """The shapes and dtypes of a tree, by path."""
    return tuple((path, _look(value)) for path, value in paths(tree).items())


def _look(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
