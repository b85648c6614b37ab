"""`profile`: where a function's time goes, by the path of the step and the half of it that runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.adapters.profiler import trace
from funcops.adapters.profiler.actions import ScheduleTimes, times_of
from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.errors import in_html, on_screen, require_callable, require_count, require_flag, size_of
from funcops.engine.residuals.report import report
from funcops.engine.trees import at, tensors
from funcops.schedule.actions import Schedule

_HEAD = ("step", "half", "time", "share", "launches", "moved", "kept")


class ProfileRow(NamedTuple):
    """A half of a step in one call: `seconds` of the device, or of operators without one; `launches` of kernels, or of operators
    that compute; bytes `moved`, which operators read and write, and `kept` for the backward. None where it is not known: in
    compiled code, and for `moved` in a CUDA graph."""

    path: str
    half: str
    seconds: float
    launches: int | None
    moved: int | None
    kept: int


class Profile:
    """The table of `profile`. `rows`: by path and half, in the order in which they ran; the row without a path has what no step
    names. `device`: "cuda" if kernels were timed, else "cpu"."""

    def __init__(
        self, rows: list[ProfileRow], device: str, events: dict[str, Any], spans: Sequence[trace.Span] = (), calls: int = 1
    ) -> None:
        self.rows, self.device, self._trace, self._spans, self._calls = rows, device, events, spans, calls
        self.seconds = sum(row.seconds for row in rows)

    @property
    def named(self) -> float:
        """The share of the time that has a path."""
        return sum(row.seconds for row in self.rows if row.path) / self.seconds if self.seconds else 1.0

    def by_step(self, depth: int) -> list[ProfileRow]:
        """The rows with paths cut to `depth` names, summed."""
        require_count("by_step", 1, depth=depth)
        return self._summed(lambda path: ".".join(path.split(".")[:depth]))

    def _summed(self, rename: Callable[[str], str]) -> list[ProfileRow]:
        found: dict[tuple[str, str], list[ProfileRow]] = defaultdict(list)
        for row in self.rows:
            found[rename(row.path), row.half].append(row)
        return [ProfileRow(*key, *map(_sum, zip(*[row[2:] for row in rows], strict=True))) for key, rows in found.items()]

    def dicts(self) -> list[dict[str, Any]]:
        return [row._asdict() for row in self.rows]

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for a viewer (Perfetto, chrome://tracing), gzipped if the path ends in .gz. Its ranges have the names
        of the steps, also in compiled code."""
        text = json.dumps(self._trace).encode()
        Path(path).write_bytes(gzip.compress(text) if str(path).endswith(".gz") else text)

    def of_schedule(self, schedule: Schedule, cfg: ChainConfig) -> ScheduleTimes:
        """When each action of a schedule ran, beside when `simulate` says that it would, with the medians of these actions' times.
        The profile is of `run`, or of `run_beside` graphed in `named_steps()`, with accumulators (`into`). On a device actions of
        several ranks run at once; elsewhere they take turns.

        Raises `ValueError` for a stage without operators, or with others for one microbatch than for the next, and for one with
        both B and I. `ran` is the measured `Simulated`, `predicted` the other; `draw()` shows both."""
        return times_of(self._spans, self._calls, schedule, cfg)

    def plot(self, path: str | None = None, *, depth: int = 1) -> Any:
        """Plot a group of bars for every step, `depth` names deep: the milliseconds of each half. Writes PNG, SVG, ... to `path` if
        given, and returns matplotlib's figure. Raises `ImportError` without matplotlib (the extra `docs`)."""
        from funcops.engine.residuals.picture import grouped_bars

        halves = list(dict.fromkeys(row.half for row in self.rows))
        bars: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(halves, 0.0))
        for row in self.by_step(depth):
            bars[row.path or "(no step)"][row.half] += 1e3 * row.seconds
        return grouped_bars(bars, "milliseconds", self.totals(), path, "Profile.plot")

    def totals(self) -> str:
        return f"{self.device}: {1e3 * self.seconds:.3f} ms, {self.named:.1%} of it in named steps"

    def __str__(self) -> str:
        """The table, with the layers of a repeat as one row, `*` in place of their numbers."""
        table = [_HEAD, *map(self._cells, self._summed(lambda path: re.sub(r"(?<![^.+])\d+(?![^.])", "*", path)))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [[c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in table]
        return "\n".join([self.totals(), *("  ".join(line).rstrip() for line in lines)])

    def _cells(self, row: ProfileRow) -> tuple[str, ...]:
        time, share = f"{1e3 * row.seconds:.3f} ms", row.seconds / self.seconds if self.seconds else 0.0
        launches, moved = ("?" if n is None else show(n) for n, show in ((row.launches, str), (row.moved, size_of)))
        return row.path or "(no step)", row.half, time, f"{share:.1%}", launches, moved, size_of(row.kept) if row.kept else ""

    def __repr__(self) -> str:
        return on_screen(str(self), rows=60)

    def _repr_html_(self) -> str:
        return in_html(str(self))


def _sum(values: Any) -> Any:
    return None if any(v is None for v in values) else sum(values)


class _Counted(TorchDispatchMode):
    """Counts by label the operators that compute, and the bytes that they read and write: each argument and result once."""

    runs = True  # it runs every operator unchanged, so kernels need not be opaque

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[Label, int] = defaultdict(int)
        self.moved: dict[Label, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(out)
        views = {t.untyped_storage()._cdata for t in made} <= {t.untyped_storage()._cdata for t in given}
        if (func._schema.is_mutable or not views) and "empty" not in func.__name__ and func.namespace != "profiler":
            label = scopes.label()
            touched = {id(t): t for t in [*given, *made]}
            self.launches[label] += 1
            self.moved[label] += sum(t.numel() * t.element_size() for t in touched.values())
        return out


def profile(fn: Callable[..., Any], *args: Any, calls: int = 3, warmup: int = 1, count: bool = True) -> Profile:
    """Run `fn(*args)` and return its time, launches and bytes by the path of the step that runs.

    Steps of programs have names of their own; `named_scope` names anything else. `fn` may be eager, compiled by torch.compile
    (it is compiled once more, with marks between its kernels, which run in the order of the program; a kernel that computes for
    several steps counts for the one in which it runs), or graphed in `named_steps()`. It runs `warmup + calls` times, and once more
    to count operators and bytes, unless it is compiled or `count` is False; so it must not write to its arguments in a way that
    more calls would spoil. Times are a call's mean by `torch.profiler`: of kernels if there are any, else of operators.

    Raises `TypeError` if `fn` is not callable, `ValueError` if `calls` is not at least 1.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, SoftcapConfig, Step, chain, linear, profile, random, softcap
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("cap", softcap, SoftcapConfig(30.0))))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> def step(params, x):
    ...     y, residuals = chain.fwd(params, x, cfg)
    ...     return chain.bwd(residuals, y, cfg)
    ...
    >>> found = profile(step, params, torch.ones(2, 4))
    >>> [(row.path, row.half, row.kept) for row in found.rows]
    [('up', 'fwd', 0), ('cap', 'fwd', 64), ('cap', 'bwd', 0), ('up', 'bwd', 0)]
    """
    require_callable("profile", fn=fn)
    require_count("profile", 1, calls=calls)
    require_count("profile", 0, warmup=warmup)
    require_flag("profile", count=count)
    on_device = torch.cuda.is_available()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_device
    with scopes.named_steps():
        for _ in range(warmup):
            fn(*args)
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(calls):
                fn(*args)
            if on_device:
                torch.cuda.synchronize()
        found = _exported(profiler)
        compiled = trace.is_compiled(found["traceEvents"])
        counted = _Counted() if count and not compiled else None
        kept = {} if counted is None else _counted(fn, args, counted)
        labels = dict(scopes.names)
    times = trace.spent(found["traceEvents"], labels, scopes.node_labels())
    spans = trace.spans(found["traceEvents"], labels, scopes.node_labels())
    found["traceEvents"] += trace.ranges(found["traceEvents"])
    order = sorted({*(times.kernels or times.operators), *kept}, key=_order(labels))
    rows = [_row(label, times, counted, kept, calls) for label in order]
    return Profile(rows, "cuda" if times.kernels else "cpu", found, spans, calls)


def _row(label: Label, times: trace.Spent, counted: _Counted | None, kept: Mapping[Label, int], calls: int) -> ProfileRow:
    """The row of a label. The operators of a CUDA graph are not seen when it is replayed, so what they move is not known."""
    kernels = times.launches[label] // calls
    operators = None if counted is None else counted.launches.get(label, 0)
    moved = None if counted is None or (kernels and not operators) else counted.moved.get(label, 0)
    seconds = (times.kernels or times.operators).get(label, 0.0) / calls
    return ProfileRow(*label, seconds, kernels if times.kernels else operators, moved, kept.get(label, 0))


def _order(labels: Mapping[str, Label]) -> Callable[[Label], tuple[int, Label]]:
    places = {label: i for i, label in enumerate(labels.values())}
    return lambda label: (places.get(label, len(places)), label)


def _counted(fn: Callable[..., Any], args: Any, counted: _Counted) -> dict[Label, int]:
    """Run a call under the counting mode. Returns the bytes that each step's forward kept."""
    kept: dict[Label, int] = defaultdict(int)

    def note(outer: Label, residuals: Any) -> None:
        for row in report(residuals, args).rows:
            step = outer.inside(_step(residuals, row.path), "fwd")
            if row.bytes:
                kept[step] += row.bytes

    scopes.observers.append(note)
    try:
        with counted:
            fn(*args)
    finally:
        scopes.observers.remove(note)
    return dict(kept)


def _step(residuals: Any, path: str) -> str:
    """The step that keeps the tensor at a path; of an op that was traced the module, whose path is the tensor's name there."""
    names = path.split(".")
    for i in [i for i, name in enumerate(names) if name == "kept"][:1]:
        node = at(residuals, ".".join(names[:i]))
        if hasattr(node, "traced"):
            return ".".join([*names[:i], *filter(None, [node.traced.home(".".join(names[i + 1 :]))])])
    return ".".join(names[:-1])


def _exported(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        found: dict[str, Any] = json.loads(Path(path).read_text(errors="replace"))
    return found
