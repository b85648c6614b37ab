"""`graph_memory`: the memory that a captured function will hold, from a run without a capture; `schedule_memory`: the slots of a
captured schedule, from one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import require_callable, require_type, size_of
from funcops.engine.trees import tensors
from funcops.schedule.actions import Schedule
from funcops.schedule.measure import measure_stages
from funcops.schedule.simulate import simulate
from funcops.schedule.stage import check_staged

BLOCK = 512  # bytes: torch's allocator rounds each tensor's memory up to a multiple


class GraphMemory(NamedTuple):
    """Bytes of the buffers for copied inputs; of the outputs; and of the workspace, which is the most that a call holds besides."""

    inputs: int
    outputs: int
    workspace: int

    @property
    def pool(self) -> int:
        """The most that the graph's pool holds at once: outputs and workspace."""
        return self.outputs + self.workspace

    def __str__(self) -> str:
        return f"inputs {size_of(self.inputs)}, outputs {size_of(self.outputs)}, workspace {size_of(self.workspace)}"


def graph_memory(fn: Callable[..., Any], *examples: Any) -> GraphMemory:
    """Run `fn(*examples)` once and return the memory that `graphed(fn, *examples)` will hold for a slot: on a device, its pool will
    hold as much, rounded up to the allocator's segments. Raises `TypeError` if `fn` is not callable.

    >>> import torch
    >>> from funcops.graphs import graph_memory
    >>> graph_memory(lambda x: (x.double() + 1).float(), torch.ones(1024))
    GraphMemory(inputs=4096, outputs=4096, workspace=12288)
    """
    require_callable("graph_memory", fn=fn)
    inputs = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(examples)}
    with torch.no_grad(), _Peak() as peak:
        result = fn(*examples)
    outputs = {t.untyped_storage()._cdata: _rounded(t) for t in tensors(result) if t.untyped_storage()._cdata in peak.alive}
    held = sum(outputs.values())
    return GraphMemory(sum(inputs.values()), held, max(peak.most, held) - held)


class ScheduleMemory(NamedTuple):
    """The slots of a schedule: by stage, how many microbatches have residuals or a pending there at once, and the bytes of the
    larger of the two; by rank, the most bytes of all its residuals and pendings at one time, between actions."""

    slots: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    def __str__(self) -> str:
        stages = enumerate(zip(self.slots, self.slot_bytes, strict=True))
        rows = [f"stage {i}: {n} slots of {size_of(size)}" for i, (n, size) in stages]
        return "; ".join([*rows, *(f"rank {i}: at most {size_of(peak)}" for i, peak in enumerate(self.peak_bytes))])


def schedule_memory(
    schedule: Schedule, params: dict[str, Any], x: Any, cfg: ChainConfig, *, needs: Needs = Needs.ALL
) -> ScheduleMemory:
    """Run one microbatch x, and return the slots that `run_beside` will need: their number follows from the schedule, their bytes
    from the stages, rounded up as torch's allocator does. Each rank's branch takes its memory again and again, so on a device the
    graph's pool holds `peak_bytes` of all ranks, besides messages on their way, sums and what an action itself needs. Raises
    `ValueError` or `TypeError` as `measure_stages` does, and for a chain of another number of stages than the schedule's.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.graphs import ScheduleMemory, schedule_memory
    >>> from funcops.schedule import zb_h1
    >>> cfg = ChainConfig(steps=tuple(Step(name, linear, LinearConfig(8, 8)) for name in "ab"))
    >>> found = schedule_memory(zb_h1(2, 4), chain.init(cfg, key=random.key(0)), torch.ones(4, 8), cfg)
    >>> isinstance(found, ScheduleMemory), found
    (True, ScheduleMemory(slots=(2, 2), slot_bytes=(512, 1024), peak_bytes=(512, 2048)))
    """
    require_type("schedule_memory", "schedule", schedule, Schedule)
    check_staged("schedule_memory", cfg, schedule.stages)
    costs = measure_stages(params, x, cfg, needs=needs, repeats=1, block=BLOCK)
    held, most = [0] * schedule.stages, [0] * schedule.stages
    for _, (stage, kind, _) in schedule.order():
        held[stage] += {"F": 1, "I": 0, "W": -1, "B": -1}[kind]
        most[stage] = max(most[stage], held[stage])
    sizes = [int(max(cost.residual_bytes, cost.pending_bytes)) for cost in costs]
    return ScheduleMemory(tuple(most), tuple(sizes), tuple(map(int, simulate(schedule, costs).peak_bytes)))


def _rounded(t: torch.Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // BLOCK) * BLOCK


class _Peak(TorchDispatchMode):
    """The most memory of tensors made under it that are alive at once."""

    runs = True  # it runs every operator unchanged, so kernels need not be opaque

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for t in tensors(out):
            key = t.untyped_storage()._cdata
            if key not in given and key not in self.alive:
                self.alive[key] = StorageWeakRef(t.untyped_storage()), _rounded(t)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out
