"""Requested launches, before Triton runs them: the kernel, the grid and the arguments."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from funcops.engine.backend.launch import compiled_launches
from funcops.engine.errors import short
from funcops.testing.aot import name_of, stubbed
from funcops.testing.fingerprint import source_of

OPTIONS = "num_warps", "num_stages"  # of a launch; the interpreter gets no others


class RequestedLaunch(NamedTuple):
    """A requested launch; `run` launches the kernel as Triton would have."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, int]
    run: Callable[[], Any]

    @property
    def name(self) -> str:
        return re.sub(r"^captured_\d+\.", "", name_of(self.kernel.fn))

    @property
    def specialised(self) -> str:
        """The launch as text that does not depend on addresses."""
        values = {name: short(v.dtype) if isinstance(v, Tensor) else repr(v) for name, v in self.arguments.items()}
        options = sorted((name, value) for name, value in self.options.items() if name in OPTIONS)
        return f"{self.grid} {values} {options}"


class Nothing:
    """The result of a launch that was intercepted; like a compiled kernel, it can be launched again."""

    function = packed_metadata = None

    @staticmethod
    def run(*_: Any) -> None:
        pass


@contextlib.contextmanager
def intercepted(instead: Callable[[RequestedLaunch], Any]) -> Iterator[None]:
    """Send every launch of the block to `instead`, whether or not Triton interprets its kernels."""

    def interceptor(launch: Any) -> Any:
        def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
            bound = inspect.signature(self.fn).bind(*args, **{name: named.pop(name) for name in self.arg_names if name in named})
            bound.apply_defaults()
            sizes = grid(bound.arguments) if callable(grid) else grid
            x, y, z = (*map(int, sizes), 1, 1)[:3]
            again = lambda: launch(self, *bound.args, grid=(x, y, z), warmup=warmup, **named)  # noqa: E731
            found = instead(RequestedLaunch(self, (x, y, z), dict(bound.arguments), named, again))
            return Nothing if found is None else found

        return run

    kinds = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]
    before = knobs.runtime.launch_enter_hook
    knobs.runtime.launch_enter_hook = Nothing.run  # with a hook set, every launch goes through Triton
    try:
        for kind, launch in kinds:
            kind.run = interceptor(launch)
        with stubbed(), compiled_launches():
            yield
    finally:
        knobs.runtime.launch_enter_hook = before
        for kind, launch in kinds:
            kind.run = launch


def fingerprint_of(calls: list[RequestedLaunch]) -> str:
    """A hash of the launches: the sources of the kernels and their helpers, and the arguments. It must be the same with Triton's
    interpreter, so the lines that differ with it are left out."""
    said = [line for call in calls for line in (*source_of(call.kernel), call.specialised) if " reads INTERPRETED: " not in line]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]
