"""All that is not public in torch.distributed.pipelining: its runtime executes a schedule's actions and sends what lies between
stages; what the actions do comes from here. `private.USED` lists the names, which are looked for when this file is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from funcops.adapters.pipelining.private import check_names
from funcops.schedule import Schedule

check_names(pipelining)

Values = tuple[Any, ...]


class Work(Protocol):
    """What a rank does in its stages; values are the tensors of a stage boundary."""

    def forward(self, stage: int, m: int, values: Values | None) -> Values: ...
    def dgrad(self, stage: int, m: int, gradients: Values | None) -> Values: ...
    def wgrad(self, stage: int, m: int) -> None: ...
    def backward(self, stage: int, m: int, gradients: Values | None) -> Values: ...


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("the last stage computes its own loss")


class Runtime:
    """The schedule on torch's runtime, for this rank. `boundaries[s]`: examples of what stage s is given and, at s + 1, of what it
    gives; of the first and the last nothing is sent."""

    def __init__(self, schedule: Schedule, boundaries: Sequence[Values], device: torch.device, group: Any) -> None:
        self._wait = schedules._wait_batch_p2p
        last, rank = schedule.stages - 1, dist.get_rank(group)
        self._stages = {}
        for index in sorted(stage for stage, owner in schedule.rank_of.items() if owner == rank):
            given, gives = (
                tuple(t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in boundaries[i])
                for i in (index, index + 1)
            )
            self._stages[index] = PipelineStage(torch.nn.Module(), index, last + 1, device, given, gives, group=group)
        self._runtime = schedules._PipelineScheduleRuntime(
            list(self._stages.values()),
            schedule.microbatches,
            loss_fn=_no_loss,
            scale_grads=False,
            backward_requires_autograd=False,
        )
        parse = schedules._Action.from_str
        actions = {r: [parse(cell) for cell in line.split(",")] for r, line in enumerate(schedule.to_csv().splitlines())}
        self._runtime.pipeline_order = actions
        self._runtime._prepare_schedule_with_comms({r: list(row) for r, row in actions.items()})
        self._handlers: dict[Any, Callable[[Any, Work], None]] = {
            schedules.FORWARD: self._forward,
            schedules.BACKWARD_INPUT: lambda action, work: self._backward(action, work.dgrad),
            schedules.FULL_BACKWARD: lambda action, work: self._backward(action, work.backward),
            schedules.BACKWARD_WEIGHT: lambda action, work: work.wgrad(action.stage_index, action.microbatch_index),
            schedules.OVERLAP_F_B: self._pair,
        }

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of this rank."""
        return tuple(self._stages)

    def step(self, work: Work) -> None:
        """All actions of this rank, once."""
        for kind, handler in self._handlers.items():
            self._runtime._comp_type_to_function_map[kind] = lambda action, _, handler=handler: handler(action, work)
        for stage in self._stages.values():
            stage.has_backward = True
            stage.clear_runtime_states()
        count = self._runtime._n_microbatches
        try:
            self._runtime._step_microbatches([()] * count, [{}] * count, return_outputs=False)
        finally:
            self._runtime._comp_type_to_function_map.clear()  # they hold the work, and it the params

    def _pair(self, action: Any, work: Work) -> None:
        for one in action.sub_actions:
            self._handlers[one.computation_type](one, work)

    def _forward(self, action: Any, work: Work) -> None:
        index, m = action.stage_index, action.microbatch_index
        stage, after, given = self._stages[index], self._stages.get(index + 1), None
        if not stage.is_first:
            if index - 1 not in self._stages:
                self._wait(self._runtime.fwd_recv_ops.pop((index, m)))
            given = tuple(stage._retrieve_recv_activations(m))
            if index - 1 in self._stages:  # the runtime would hold them until the next step
                for info in stage.args_recv_info[m]:
                    info.buffer = None
        gives = work.forward(index, m, given)
        if after is not None:
            after.set_local_fwd_input(gives, m)
        elif not stage.is_last:
            stage.fwd_cache[m] = gives, []

    def _backward(self, action: Any, half: Callable[[int, int, Values | None], Values]) -> None:
        index, m = action.stage_index, action.microbatch_index
        stage, before, gradients = self._stages[index], self._stages.get(index - 1), None
        stage.fwd_cache.pop(m, None)
        if not stage.is_last:
            if index + 1 not in self._stages:
                self._wait(self._runtime.bwd_recv_ops.pop((index, m)))
            gradients = tuple(stage._retrieve_recv_grads(m))
        found = half(index, m, gradients)
        if before is not None:
            before.set_local_bwd_input(found, m)
        elif not stage.is_first:
            stage.bwd_cache[m] = found
