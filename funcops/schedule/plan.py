"""`plan_parallel`: the fastest layouts of a decoder on a number of GPUs, and why the others are impossible."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from funcops.engine.errors import fail, in_html, on_screen, require, require_count, require_number, require_type, size_of
from funcops.schedule.decoder import Decoder
from funcops.schedule.draw import draw
from funcops.schedule.gpus import GPU, gpu_of
from funcops.schedule.layout import RECOMPUTE, Layout, Problem, mesh_problem, microbatches, peak, problem, split_layers
from funcops.schedule.predict import Bound, Predicted, bound, simulated, without_communication, without_replicas

AXES = ("pp", "dp", "ep", "cp", "tp")
MOST_ROWS = 16  # sequences in a microbatch


class Refused(NamedTuple):
    """A mesh without a layout that divides the model and fits, and why; if memory is the reason, for the layout that needs
    least."""

    layout: Layout
    why: str

    def __str__(self) -> str:
        return f"{self.layout.mesh()}: {self.why}"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan_parallel`. `rows`: the fastest layouts that leave `margin` of the `memory` bytes of a GPU free;
    `refused`: the meshes without a layout; `counted`: the number of layouts that were examined; `fixed`: as given."""

    model: Decoder
    gpus: int
    memory: float
    gpu: GPU
    rows: tuple[Predicted, ...]
    refused: tuple[Refused, ...]
    counted: int
    fixed: Mapping[str, Any]
    margin: float

    @property
    def best(self) -> Predicted:
        return self.rows[0]

    def why_not(self, **sizes: int) -> tuple[Refused, ...]:
        """Say why the meshes of these sizes are not listed: `plan.why_not(tp=8, pp=16)`. Of each that fits, the fastest layout is
        searched. Raises `ValueError` for a name that is not an axis."""
        axes = _axes(self.model)
        for name, value in sizes.items():
            require(name in axes, "Plan.why_not", "sizes", f"of the axes {', '.join(axes)}", repr(name))
            require_count("Plan.why_not", **{name: value})
        known = {one.layout: one for one in self.refused}
        meshes = [Layout(**at) for at in _meshes(self.gpus, self.model) if sizes.items() <= at.items()]
        if not meshes:
            wanted, got = f"a divisor of gpus {self.gpus}", math.prod(sizes.values())
            return (Refused(Layout(**dict[str, Any](sizes)), str(Problem(" x ".join(sizes), wanted, got))),)
        return tuple(known.get(mesh) or Refused(mesh, self._why_unlisted(mesh)) for mesh in meshes)

    def _why_unlisted(self, mesh: Layout) -> str:
        sizes = {name: getattr(mesh, name) for name in AXES}
        for name, size in sizes.items():
            if self.fixed.get(name, size) != size:
                return str(Problem(name, f"{self.fixed[name]} (fixed)", size))
        for i, one in enumerate(self.rows, 1):
            if one.layout.mesh() == mesh.mesh():
                return f"it is listed: row {i}, {one.time:.4g} s"
        fixed = {**self.fixed, **sizes}
        best = plan_parallel(self.model, self.gpus, self.memory, self.gpu, fixed=fixed, show=1, margin=self.margin).best
        return f"it fits, and is slower: {best.time:.4g} s (row {len(self.rows)}, the last: {self.rows[-1].time:.4g} s)"

    def draw(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the first microbatches of the best layout's pipeline with `funcops.schedule.draw`; the title says how many, and
        gives the time of the whole step."""
        shown = self.best.simulated
        count = len({slot.action.microbatch for slots in shown.slots for slot in slots})
        of = microbatches(self.model, self.best.layout)
        title = f"{count} of {of} microbatches, without the update, {shown.time:.4g} s; the whole step {self.best.time:.4g} s"
        return draw(shown, path, title=title, unit="seconds")

    def __str__(self) -> str:
        mixed = self.model.mixture is not None
        of_experts = f" {'ep':>3}" * mixed
        head = f"{'':2}{'pp':>4} {'dp':>5}{of_experts} {'cp':>4} {'tp':>3} {'V':>3} {'microbatch':>10} {'zero':>4} {'recompute':>9}"
        lines = [head + f" {'s/step':>9} {'TFLOP/s':>8} {'MFU':>6} {'waiting':>8} {'exposed':>8} {'peak':>11}"]
        for i, one in enumerate(self.rows):
            at, mark, spent = one.layout, "> " if i == 0 else "  ", one.spent
            sizes = f"{mark}{at.pp:>4} {at.dp:>5}" + f" {at.ep:>3}" * mixed
            sizes += f" {at.cp:>4} {at.tp:>3} {at.chunks:>3} {at.microbatch:>10}"
            sizes += f" {at.zero:>4} {at.recompute:>9}"
            shares = f"{100 * spent.waiting / one.time:>6.1f} % {100 * spent.exposed / one.time:>6.1f} %"
            lines.append(
                f"{sizes} {one.time:>9.4g} {one.flops / 1e12:>8.0f} {100 * one.mfu:>4.0f} % {shares} {size_of(one.peak_bytes):>11}"
            )
        said = f"{self.counted:,} layouts on {self.gpus:,} {self.gpu.name} of {size_of(self.memory)}"
        said += f", {100 * self.margin:g} % left free" * (self.margin > 0)
        return "\n".join([*lines, f"{said}; {len(self.refused)} meshes are out"])

    def __repr__(self) -> str:
        return on_screen(str(self), columns=120)

    def _repr_html_(self) -> str:
        return in_html(repr(self))


def plan_parallel(
    model: Decoder,
    gpus: int,
    memory: float,
    gpu: GPU | str = "H100",
    *,
    fixed: Mapping[str, Any] | None = None,
    show: int = 10,
    margin: float = 0.05,
) -> Plan:
    """Find the `show` fastest layouts of a decoder on `gpus` GPUs of `memory` bytes each. Each mesh (pp, dp, cp, tp, and ep with
    experts) with each number of chunks and microbatch size counts once, under its fastest ZeRO stage and recomputation that fit.
    `fixed`: given fields of `Layout`, such as {"tp": 8}. `margin`: the part of the memory that a layout leaves free, for what is
    not predicted: buffers of communication, fragmentation, a context of CUDA.

    A closed form bounds each layout's time from below; the layouts that can be among the fastest are simulated, stage by stage.
    Raises `ValueError` if no layout divides the model, and if none fits, with the least bytes.

    >>> from funcops.schedule import Decoder, plan_parallel
    >>> model = Decoder(hidden=1024, ffn=4096, layers=4, heads=16, vocab=32000, seq=1024, batch=8)
    >>> plan = plan_parallel(model, gpus=2, memory=70 * 2**30, fixed={"pp": 1, "cp": 1})
    >>> plan.best.layout.gpus, plan.best.peak_bytes < 70 * 2**30
    (2, True)
    """
    where = "plan_parallel"
    require_type(where, "model", model, Decoder)
    require_count(where, gpus=gpus, show=show)
    require_number(where, 0, memory=memory)
    require(memory > 0, where, "memory", "above 0", memory)
    require_number(where, 0, margin=margin)
    require(margin < 1, where, "margin", "below 1", margin)
    kind, given = gpu_of(where, gpu), _fixed(where, fixed)
    require(model.mixture is not None or given.get("ep", 1) == 1, where, "fixed", "without ep for a model without experts", given)
    search = _Search(model, memory, kind, given, margin)
    for sizes in _meshes(gpus, model):
        if all(given.get(name, size) == size for name, size in sizes.items()):
            search.mesh(Layout(**sizes))
    if not search.found:
        search.nothing(where, gpus)
    rows = search.fastest(show)
    return Plan(model, gpus, memory, kind, tuple(rows), tuple(search.refused), search.counted, given, margin)


def _fixed(where: str, fixed: Mapping[str, Any] | None) -> dict[str, Any]:
    if fixed is None:
        return {}
    require_type(where, "fixed", fixed, Mapping)
    names = [field.name for field in dataclasses.fields(Layout)]
    for name in fixed:
        require(name in names, where, "fixed", f"of the fields {', '.join(names)}", repr(name))
    Layout(**fixed)
    return dict(fixed)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _axes(model: Decoder) -> tuple[str, ...]:
    return tuple([name for name in AXES if name != "ep" or model.mixture is not None])


def _meshes(gpus: int, model: Decoder) -> Iterator[dict[str, Any]]:
    for tp in _divisors(gpus):
        for cp in _divisors(gpus // tp):
            for ep in [1] if model.mixture is None else _divisors(gpus // tp // cp):
                for pp in _divisors(gpus // tp // cp // ep):
                    yield {"pp": pp, "dp": gpus // tp // cp // ep // pp, "ep": ep, "cp": cp, "tp": tp}


def _variant(layout: Layout) -> str:
    return f"zero {layout.zero}, recompute {layout.recompute}, V {layout.chunks}, microbatch {layout.microbatch}"


class _Search:
    """`found`: for each mesh, chunks, microbatch and ZeRO stage the layout that fits with the least recomputation, as (lower bound
    of its time, bytes, layout); `refused`: meshes without a layout."""

    def __init__(self, model: Decoder, memory: float, gpu: GPU, fixed: Mapping[str, Any], margin: float) -> None:
        self.model, self.memory, self.gpu, self.fixed, self.used = model, memory, gpu, fixed, 1.0 - margin
        self.found: list[tuple[float, float, Layout]] = []
        self.refused: list[Refused] = []
        self.least: tuple[float, Layout] | None = None  # the least bytes of meshes that divide and do not fit
        self.counted = 0

    def mesh(self, mesh: Layout) -> None:
        problem_of_mesh = mesh_problem(self.model, mesh, self.gpu)
        if problem_of_mesh is not None:
            self.refused.append(Refused(mesh, str(problem_of_mesh)))
            return
        before, first, least = len(self.found), None, None
        for chunks, rows in itertools.product(self._chunks(mesh), self._rows(mesh)):
            shape = Layout(mesh.dp, mesh.tp, mesh.pp, mesh.cp, chunks, rows, ep=mesh.ep)
            wrong = problem(self.model, shape, self.gpu)
            if wrong is not None:
                first = first or wrong
                continue
            smallest = self._variants(shape)
            if smallest is not None and (least is None or smallest < least):
                least = smallest
        if len(self.found) > before:
            return
        if least is not None:
            why = f"memory must be at least {size_of(least[0] / self.used)}, got {size_of(self.memory)} ({least[1]})"
            if self.least is None or least[0] < self.least[0]:
                self.least = least[0], dataclasses.replace(mesh)
            self.refused.append(Refused(mesh, why))
        else:  # without a wrong size, the fixed ZeRO stage is left
            wrong = first or Problem("zero", "0 if params have one replica", self.fixed["zero"])
            self.refused.append(Refused(mesh, str(wrong)))

    def _chunks(self, mesh: Layout) -> list[int]:
        """The numbers of chunks to try: those that divide, after 1, so that if none is possible the reason refers to 1."""
        if "chunks" in self.fixed:
            return [self.fixed["chunks"]]
        most = max(1, (self.model.layers + 2) // mesh.pp) if mesh.pp > 1 else 1
        divides = [v for v in range(2, most + 1) if split_layers(self.model.layers, mesh.pp * v) is not None]
        return [1, *divides]

    def _rows(self, mesh: Layout) -> list[int]:
        if "microbatch" in self.fixed:
            return [self.fixed["microbatch"]]
        return [rows for rows in _divisors(self.model.batch // mesh.rows) if rows <= MOST_ROWS]

    def _variants(self, shape: Layout) -> tuple[float, str] | None:
        """Put the layouts that fit into `found`; if none does, return the least bytes, and the variant that needs them."""
        stages = [zero for zero in ([0] if shape.replicas == 1 else range(4)) if self.fixed.get("zero", zero) == zero]
        ways = [way for way in RECOMPUTE if self.fixed.get("recompute", way) == way]
        if not stages:
            return None
        frugal = dataclasses.replace(shape, zero=stages[-1], recompute=ways[-1])
        memory = peak(self.model, frugal)[1]
        if memory.total - memory.workspace > self.used * self.memory:  # all other variants need more
            self.counted += len(stages) * len(ways)
            return memory.total, _variant(frugal)
        before, least = len(self.found), (memory.total, frugal)
        for zero in stages:
            for recompute in ways:
                sizes = shape.dp, shape.tp, shape.pp, shape.cp, shape.chunks, shape.microbatch
                layout = Layout(*sizes, zero, recompute, shape.ep)
                self.counted += 1
                nbytes = peak(self.model, layout)[1].total
                if nbytes <= self.used * self.memory:
                    self.found.append((without_communication(self.model, layout, self.gpu), nbytes, layout))
                    break
                least = min(least, (nbytes, layout), key=lambda one: one[0])
        return (least[0], _variant(least[1])) if len(self.found) == before else None

    def nothing(self, where: str, gpus: int) -> None:
        if self.least is not None:
            least = self.least[0] / self.used
            wanted = f"at least {least:,.0f} bytes ({size_of(least)}, {self.least[1].mesh()})"
            fail(where, "memory", wanted, f"{self.memory:,.0f}")
        if not self.refused:
            fail(where, "fixed", f"sizes whose product divides gpus {gpus}", dict(self.fixed))
        closest = self.refused[0]
        fail(where, "gpus", f"a product of sizes that divide the model ({closest})", gpus)

    def fastest(self, count: int) -> list[Predicted]:
        """Refine the layout with the least bound, and in the end simulate it, until no other can be among the fastest. Of layouts
        that differ in ZeRO and recomputation alone, keep the fastest."""
        heap: list[tuple[float, float, int, bool, Bound | None]] = []
        for i, (least, nbytes, _) in enumerate(self.found):
            heap.append((least, nbytes, i, False, None))
        heapq.heapify(heap)
        done: dict[Layout, Predicted] = {}
        slowest = math.inf
        while heap and heap[0][0] < slowest:
            _, nbytes, i, closer, known = heapq.heappop(heap)
            layout = self.found[i][2]
            if not closer:
                heapq.heappush(heap, (without_replicas(self.model, layout, self.gpu), nbytes, i, True, None))
                continue
            if known is None:
                known = bound(self.model, layout, self.gpu)
                heapq.heappush(heap, (known.time, nbytes, i, True, known))
                continue
            shape = dataclasses.replace(layout, zero=0, recompute="none")
            if shape in done and known.time >= done[shape].time:
                continue
            found = simulated(self.model, layout, self.gpu, known)
            done[shape] = min(found, done.get(shape, found), key=lambda one: one.time)
            if len(done) >= count:
                slowest = sorted(one.time for one in done.values())[count - 1]
        return sorted(done.values(), key=lambda one: (one.time, one.peak_bytes))[:count]
