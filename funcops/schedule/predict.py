"""`predict`: the time of a decoder's step in a layout, and the bytes of each GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from funcops.engine.errors import in_html, on_screen, require_type, size_of
from funcops.schedule.actions import Schedule
from funcops.schedule.chunked import interleaved_1f1b
from funcops.schedule.decoder import Decoder
from funcops.schedule.generators import one_f_one_b
from funcops.schedule.gpus import GPU, gpu_of
from funcops.schedule.layout import (
    STATE,
    Layout,
    Memory,
    Stages,
    check_layout,
    layer_times,
    least_layers,
    microbatches,
    network_of,
    peak,
    plain_stages,
    stages_of,
)
from funcops.schedule.simulate import ROUNDING, Model, Network, Simulated, simulate

UPDATE = 28  # bytes that the optimiser moves per param: gradient, float32 param and two moments read, param and two moments written


class Spent(NamedTuple):
    """The seconds of a step by cause, on the busiest pipeline rank."""

    compute: float
    exposed: float
    waiting: float
    update: float


@dataclasses.dataclass(frozen=True, repr=False)
class Predicted:
    """A step of `time` seconds and at most `memory.total` bytes a GPU, which pipeline rank `rank` needs. `simulated`: the
    pipeline's first microbatches, by `simulate`; each of the others takes as long as the last of these."""

    model: Decoder
    layout: Layout
    gpu: GPU
    time: float
    rank: int
    memory: Memory
    spent: Spent
    simulated: Simulated

    @property
    def peak_bytes(self) -> float:
        return self.memory.total

    @property
    def tokens_per_second(self) -> float:
        return self.model.batch * self.model.seq / self.time

    @property
    def flops(self) -> float:
        """The model's flops per second and GPU."""
        return self.model.flops / self.time / self.layout.gpus

    @property
    def mfu(self) -> float:
        """`flops` as a fraction of the GPU's peak."""
        return self.flops / self.gpu.flops

    def __str__(self) -> str:
        layout, memory = self.layout, self.memory
        parts = ", ".join(f"{name} {size_of(value)}" for name, value in memory._asdict().items() if value)
        spent = ", ".join(f"{name} {100 * value / self.time:.1f} %" for name, value in self.spent._asdict().items())
        return "\n".join(
            [
                f"{layout} on {layout.gpus:,} {self.gpu.name}",
                f"{self.time:.4g} s per step: {spent}",
                f"{self.flops / 1e12:.0f} TFLOP/s a GPU, {100 * self.mfu:.1f} % of its peak, "
                f"{self.tokens_per_second:,.0f} tokens/s",
                f"{size_of(memory.total)} on pipeline rank {self.rank}: {parts}",
                *self._experts(),
            ]
        )

    def _experts(self) -> list[str]:
        mixture, layout = self.model.mixture, self.layout
        if mixture is None:
            return []
        own = mixture.experts // layout.ep
        tokens = layout.microbatch * self.model.seq // layout.cp // layout.tp
        sent = f"; a token is sent to {mixture.ranks(layout.ep) * (1 - 1 / layout.ep):.2f} other ranks" if layout.ep > 1 else ""
        return [f"{own} experts of a layer on a GPU, of {tokens * mixture.choices / own:,.0f} rows each{sent}"]

    def __repr__(self) -> str:
        return on_screen(str(self), columns=140)

    def _repr_html_(self) -> str:
        return in_html(repr(self))


def predict(model: Decoder, layout: Layout, gpu: GPU | str = "H100") -> Predicted:
    """Predict the time of a step, and the bytes of the GPU that needs most. The pipeline runs 1F1B, interleaved if a rank has
    several chunks. Raises `ValueError` for a layout that does not divide the model.

    >>> from funcops.schedule import Decoder, Layout, predict
    >>> model = Decoder(hidden=1024, ffn=4096, layers=4, heads=16, vocab=32000, seq=1024, batch=8)
    >>> one, two = predict(model, Layout()), predict(model, Layout(dp=2))
    >>> one.time > two.time > one.time / 2, one.layout
    (True, Layout(dp=1, tp=1, pp=1, cp=1, chunks=1, microbatch=1, zero=0, recompute='none', ep=1))
    """
    require_type("predict", "model", model, Decoder)
    require_type("predict", "layout", layout, Layout)
    kind = gpu_of("predict", gpu)
    check_layout("predict", model, layout, kind)
    return simulated(model, layout, kind)


class Loads(NamedTuple):
    """Seconds, exposed communication included, by pipeline rank: `own` of a microbatch; `there` and `there_and_back` of the first
    stages of the ranks before, forward alone and with the backward; `after` once a step."""

    own: list[float]
    there: list[float]
    there_and_back: list[float]
    after: list[float]


def loads_of(layout: Layout, model: Model) -> Loads:
    p, v = layout.pp, layout.chunks
    costs, tails = model.costs, model.after
    both = [c.forward + c.dgrad + c.wgrad for c in costs]
    own = [sum(both[r::p]) for r in range(p)]
    after = [sum(tails[r::p][:v]) for r in range(p)]
    there, back = [0.0], [0.0]
    for stage in range(p - 1):
        there.append(there[-1] + costs[stage].forward)
        back.append(back[-1] + both[stage])
    return Loads(own, there, back, after)


def least_time(count: int, loads: Loads) -> float:
    """A time that no schedule of the stages can beat; if all stages cost the same, 1F1B and its interleaved form reach it. A rank
    begins when its first stage's x has passed the ranks before it, and its last gradient goes back through them."""
    turn = max(back + count * own for back, own in zip(loads.there_and_back, loads.own, strict=True)) + loads.after[0]
    rows = zip(loads.there, loads.own, loads.after, strict=True)
    return max(turn, max(there + count * own + after for there, own, after in rows))


class Bound(NamedTuple):
    """A lower bound of a layout's time, with the parts that it was computed from and the simulation reuses."""

    time: float
    update: float
    stages: Stages
    network: Network
    loads: Loads


def bound(model: Decoder, layout: Layout, gpu: GPU) -> Bound:
    """Bound the time of a step from below by a closed form, whose work grows neither with microbatches nor with replicas."""
    stages, network = stages_of(model, layout, gpu), network_of(layout, gpu)
    loads = loads_of(layout, _resolved(layout.stages, stages, network))
    _, memory = peak(model, layout)
    update = memory.optimiser / STATE * UPDATE / gpu.memory_bandwidth
    return Bound(least_time(microbatches(model, layout), loads) + update, update, stages, network, loads)


def without_communication(model: Decoder, layout: Layout, gpu: GPU) -> float:
    """A time below `bound`, for less work: the layers alone."""
    layer = layer_times(model, gpu, layout.tp, layout.cp, layout.microbatch, layout.recompute, layout.ep)
    return least_layers(model, layout) * (layer.forward + layer.dgrad + layer.wgrad)


def without_replicas(model: Decoder, layout: Layout, gpu: GPU) -> float:
    """A time below `bound`, the same for all ZeRO stages: without communication between replicas, and without the update."""
    bare = Layout(1, layout.tp, layout.pp, layout.cp, layout.chunks, layout.microbatch, 0, layout.recompute, layout.ep)
    return least_time(microbatches(model, layout), _plain_loads(model, bare, gpu))


@functools.lru_cache(maxsize=4096)
def _plain_loads(model: Decoder, layout: Layout, gpu: GPU) -> Loads:
    return loads_of(layout, _resolved(layout.stages, plain_stages(model, layout, gpu), network_of(layout, gpu)))


def _resolved(count: int, stages: Stages, network: Network) -> Model:
    """Make the same as `Model.of`, but resolve each of the three sorts of stages once."""
    links = {link.axis: link for link in network.axes}
    found = Stages(*(one.resolved("predict", links) for one in stages)).all(count)
    none = (0.0,) * len(found)
    return Model(tuple(one for one, _ in found), none, tuple(after for _, after in found), none)


@functools.lru_cache(maxsize=32)
def schedule_of(ranks: int, chunks: int, count: int) -> Schedule:
    return one_f_one_b(ranks, count) if chunks == 1 else interleaved_1f1b(ranks, count, chunks)


def simulate_few(layout: Layout, count: int, stages: Stages, network: Network) -> tuple[Simulated, float]:
    """Simulate the pipeline's first microbatches, and return that and the time of all `count`. Once a further microbatch, or group
    of p if a rank has several chunks, delays the last actions of each rank by the time that it adds or less, each one after it adds
    as much: no start grows faster later. Until then, more microbatches are simulated; in the end all."""
    p, group = layout.pp, layout.pp if layout.chunks > 1 else 1
    costs, few = stages.all(layout.stages), 2 * p if group == 1 else 3 * p
    while few < count:
        found, shorter = (simulate(schedule_of(p, layout.chunks, m), costs, network) for m in (few, few - group))
        added = found.time - shorter.time
        if _latest(found, shorter) <= added + ROUNDING * found.time:
            return found, found.time + (count - few) // group * added
        few *= 2
    found = simulate(schedule_of(p, layout.chunks, count), costs, network)
    return found, found.time


def _latest(found: Simulated, shorter: Simulated) -> float:
    """The most by which the last actions of a rank start later than in a shorter schedule: its cool-down, and before it the
    actions whose results are under way between ranks."""
    rows = zip(found.starts, shorter.starts, strict=True)
    return max(a - b for long, short in rows for a, b in zip(long[-(len(short) // 2) :], short[-(len(short) // 2) :], strict=True))


def simulated(model: Decoder, layout: Layout, gpu: GPU, known: Bound | None = None) -> Predicted:
    known = known or bound(model, layout, gpu)
    count = microbatches(model, layout)
    found, time = simulate_few(layout, count, known.stages, known.network)
    time += known.update
    loads = known.loads
    most = max(loads.own)
    rank, memory = peak(model, layout)
    busiest = loads.own.index(most)
    plain = count * sum(c.forward + c.dgrad + c.wgrad for c in known.stages.all(layout.stages)[busiest :: layout.pp])
    shown = count * most - plain + loads.after[busiest]
    spent = Spent(plain, shown, max(0.0, time - plain - shown - known.update), known.update)
    return Predicted(model, layout, gpu, time, rank, memory, spent, found)
