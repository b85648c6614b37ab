"""`split_stage`: a stage of torch.distributed.pipelining for an `nn.Module` made of `funcops.nn`, driven by autograd, whose weight
gradients run where the schedule says W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage

from funcops.adapters.autograd.delayed import WgradStore, delayed_wgrad


def split_stage(
    module: Any,
    stage_index: int,
    num_stages: int,
    device: Any = "cpu",
    input_args: Any = None,
    output_args: Any = None,
    *,
    group: Any = None,
) -> Any:
    """A `torch.distributed.pipelining.PipelineStage` for any of torch's schedules. Its backward computes input gradients and leaves
    weight gradients in a store; torch's `dw_builder` takes them out after each, to be run at that microbatch's W (or at once, in a
    B).

    Weight gradients are those of `funcops.nn` modules and `differentiable` ops; those of other modules come with the input
    gradients. `input_args` and `output_args`: examples for one microbatch (with the `requires_grad` that they will have); without
    them torch finds the shapes in a dry run, forward and backward, on made-up values. The store is open in real backwards alone:
    what a dry run left there, the first microbatch's W would add to the gradients.
    """
    return SplitStage(module, stage_index, num_stages, device, input_args, output_args, group=group)


class SplitStage(PipelineStage):
    """The stage that `split_stage` makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.store = delayed_wgrad()
        super().__init__(*args, **kwargs | {"dw_builder": self.take})

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.store:
            return super().backward_one_chunk(*args, **kwargs)

    def take(self) -> Callable[[], None]:
        """What the backward that just ended left, to be run once."""
        own = WgradStore()
        own.waiting, self.store.waiting = self.store.waiting, []
        return own.run
