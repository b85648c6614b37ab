"""A profiler's chrome trace, joined with the steps whose names it has: which operator or kernel belongs to which step.

Ranges are the `user_annotation` events of named steps, or the marks of a compiled step (`engine.backend.scopes`). A kernel belongs
to the step that was running when it was launched; one that a CUDA graph launched, to the step that its node's annotation names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label

NONE = Label()
MARKS = ("funcops::scope_begin", "funcops::scope_end")
LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class Spent(NamedTuple):
    """The sums of a trace by label: seconds of operators and of kernels, and the number of kernels and of operators' calls."""

    operators: dict[Label, float]
    kernels: dict[Label, float]
    launches: Counter[Label]
    calls: Counter[Label]


Span = tuple[Label, float, float, str]


class Timeline:
    """The labels of one thread: from each time on, until the next."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.labels: list[Label] = []

    def at(self, time: float) -> Label:
        i = bisect_right(self.times, time)
        return self.labels[i - 1] if i else NONE


def is_operator(event: Mapping[str, Any]) -> bool:
    """Whether an event is an operator that ran, or a compiled graph, and not the work of a compiler or a mark."""
    name = event["name"]
    return event.get("cat") == "cpu_op" and ("::" in name or name.startswith("## Call")) and name not in MARKS


def is_compiled(events: Iterable[Mapping[str, Any]]) -> bool:
    return any(event.get("name") in MARKS for event in events)


def spent(events: Iterable[Mapping[str, Any]], labels: Mapping[str, Label], nodes: Mapping[int, Label]) -> Spent:
    """The time by label. `labels`: the ranges' labels by name; `nodes`: the labels of graph nodes by their id."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    device: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("ph") == "X":
            (device if event.get("cat") in KERNELS else by_thread[event.get("tid")]).append(event)
    operators: dict[Label, float] = defaultdict(float)
    calls: Counter[Label] = Counter()
    launched: dict[Any, Label] = {}
    for own in by_thread.values():
        timeline = _swept(own, labels, operators, calls)
        launches = [event for event in own if event.get("cat") in LAUNCHES]
        launched.update({event["args"]["correlation"]: timeline.at(event["ts"]) for event in launches})
    kernels: dict[Label, float] = defaultdict(float)
    counts: Counter[Label] = Counter()
    for event in device:
        label = _of_kernel(event["args"], launched, nodes)
        kernels[label] += event["dur"] / 1e6
        counts[label] += 1
    return Spent(dict(operators), dict(kernels), counts, calls)


def spans(events: Iterable[Mapping[str, Any]], labels: Mapping[str, Label], nodes: Mapping[int, Label]) -> list[Span]:
    """Every kernel, or every operator of a trace without kernels, with its label, start and end in seconds, and name."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    device: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("ph") == "X":
            (device if event.get("cat") in KERNELS else by_thread[event.get("tid")]).append(event)
    launched: dict[Any, Label] = {}
    found: list[Span] = []
    for own in by_thread.values():
        timeline = _swept(own, labels, defaultdict(float), Counter())
        launched.update({e["args"]["correlation"]: timeline.at(e["ts"]) for e in own if e.get("cat") in LAUNCHES})
        found += [_span(timeline.at(event["ts"]), event) for event in own if is_operator(event)]
    return [_span(_of_kernel(event["args"], launched, nodes), event) for event in device] or found


def _span(label: Label, event: Mapping[str, Any]) -> Span:
    return label, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["name"]


def _of_kernel(args: Mapping[str, Any], launched: Mapping[Any, Label], nodes: Mapping[int, Label]) -> Label:
    node = args.get("graph node id", 0)
    for key in (node, args.get("graph id", 0) << 32 | node):
        if node and key in nodes:
            return nodes[key]
    return launched.get(args.get("correlation"), NONE)


def _swept(
    events: list[Mapping[str, Any]], labels: Mapping[str, Label], operators: dict[Label, float], calls: Counter[Label]
) -> Timeline:
    """Go through a thread's events in time, and add to each label the time in which an operator runs under it."""
    points = []
    for event in events:
        start = event["ts"]
        points += [(start, 1, -event["dur"], event), (start + event["dur"], 0, -start, event)]
    found, open_, running, marks, last = Timeline(), [NONE], 0, 0, 0.0
    for time, begins, _, event in sorted(points, key=lambda point: point[:3]):
        if running and not marks:
            operators[open_[-1]] += (time - last) / 1e6
        last, name, step = time, event["name"], 1 if begins else -1
        if is_operator(event):
            running += step
            calls[open_[-1]] += begins
        elif name in MARKS:
            marks += step
        elif begins and name.startswith(scopes.BEGIN):
            open_.append(labels[name.removeprefix(scopes.BEGIN)])
        elif (begins and name == scopes.END) or (not begins and name in labels and event["cat"] == "user_annotation"):
            open_[1:] = open_[1:-1]
        elif begins and name in labels and event["cat"] == "user_annotation":
            open_.append(labels[name])
        else:
            continue
        found.times.append(time)
        found.labels.append(open_[-1])
    return found


def ranges(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events for a viewer: the ranges that the marks of compiled steps begin and end."""
    found: list[dict[str, Any]] = []
    open_: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted([e for e in events if e.get("ph") == "X"], key=lambda e: e["ts"]):
        stack = open_[event.get("tid")]
        if event["name"].startswith(scopes.BEGIN):
            stack.append(event)
        elif event["name"] == scopes.END and stack:
            begun = stack.pop()
            end = event["ts"] + event["dur"]
            found.append({**begun, "name": begun["name"].removeprefix(scopes.BEGIN), "dur": end - begun["ts"]})
    return found
