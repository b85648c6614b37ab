"""`split_stage`: a stage of torch.distributed.pipelining for an `nn.Module` made of `funcops.nn`, driven by autograd, whose weight
gradients run where the schedule says W."""

from __future__ import annotations

from typing import Any


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
    from funcops.adapters.pipelining.torch_stages import SplitStage

    return SplitStage(module, stage_index, num_stages, device, input_args, output_args, group=group)
