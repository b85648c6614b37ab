"""What this adapter uses of torch.distributed.pipelining that torch does not call public, and a check that it is there."""

from __future__ import annotations

import inspect
import types
import warnings
from typing import Any

import torch

TRIED = ("2.13",)  # versions of torch that the tests have passed with

USED: dict[str, tuple[str, ...]] = {
    "schedules": ("_wait_batch_p2p", "FORWARD", "BACKWARD_INPUT", "FULL_BACKWARD", "BACKWARD_WEIGHT", "OVERLAP_F_B"),
    "schedules._Action": ("from_str", "stage_index", "microbatch_index", "computation_type", "sub_actions"),
    "schedules._PipelineScheduleRuntime": (
        "scale_grads", "backward_requires_autograd", "pipeline_order", "_prepare_schedule_with_comms", "_comp_type_to_function_map",
        "_n_microbatches", "_step_microbatches", "return_outputs", "fwd_recv_ops", "bwd_recv_ops",
    ),
    "PipelineStage": (
        "is_first", "is_last", "has_backward", "clear_runtime_states", "_retrieve_recv_activations", "_retrieve_recv_grads",
        "args_recv_info", "set_local_fwd_input", "set_local_bwd_input", "fwd_cache", "bwd_cache", "backward_one_chunk",
        "dw_builder",
    ),
}  # fmt: skip


def check_names(pipelining: Any) -> None:
    """Raises `RuntimeError` naming what the package lacks of `USED`; warns where torch is of no version in `TRIED`."""
    lacking = []
    for owner, names in USED.items():
        found: Any = pipelining
        for name in owner.split("."):
            found = getattr(found, name, None)
        lacking += [f"{owner}.{name}" for name in names if name not in _words(found)]
    if lacking:
        raise RuntimeError(
            f"funcops.adapters.pipelining: torch must have torch.distributed.pipelining.{', '.join(lacking)}, "
            f"got {torch.__version__}"
        )
    if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
        warnings.warn(
            f"funcops.adapters.pipelining: has all names that it uses of torch {torch.__version__}, but was tried with "
            f"{', '.join(TRIED)} alone",
            stacklevel=3,
        )


def _words(owner: Any) -> set[str]:
    """The attributes of a module or a class, and every name that the class's methods take or set on self."""
    if not isinstance(owner, type):
        return set(dir(owner))
    found = set(dir(owner))
    for base in owner.__mro__:
        for function in vars(base).values():
            function = inspect.unwrap(getattr(function, "__func__", function))
            if isinstance(function, types.FunctionType):
                found.update(function.__code__.co_names, function.__code__.co_varnames)
    return found
