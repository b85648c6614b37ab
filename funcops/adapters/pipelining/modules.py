"""`split_stage`: a stage of torch.distributed.pipelining for an `nn.Module` of `funcops.nn` layers, driven by autograd, whose
weight gradients run at the schedule's W."""

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
    """Make a `torch.distributed.pipelining.PipelineStage` for any of torch's schedules. Its backward computes input gradients and
    leaves weight gradients in a store; torch's `dw_builder` takes them out after each backward and runs them at that microbatch's W
    (or immediately, in a B).

    Only weight gradients of `funcops.nn` modules and `differentiable` ops are delayed; other modules compute theirs with the input
    gradients. `input_args` and `output_args`: examples for one microbatch (with the `requires_grad` that they will have); without
    them torch infers the shapes in a dry run, forward and backward, on dummy values. The store is not open in a dry run, whose
    weight gradients the first microbatch's W would otherwise add.
    """
    from funcops.adapters.pipelining.torch_stages import SplitStage

    return SplitStage(module, stage_index, num_stages, device, input_args, output_args, group=group)
