"""`trainer_callback`: a swap of the model that a trainer of Hugging Face makes, by one argument of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from funcops.adapters.nn.from_torch import from_torch
from funcops.adapters.nn.report import Replaced
from funcops.engine.errors import require_callable


def trainer_callback(swap: Callable[[nn.Module], Any] = from_torch) -> Any:
    """A `TrainerCallback` of transformers that swaps the trainer's model: `Trainer(..., callbacks=[trainer_callback()])`, and so
    for the trainers of TRL.

    It calls `swap(model)` when the trainer has its model, which adapters may have joined, and before accelerate wraps it, and once
    more for each model that `model_init` makes. Parameters stay the same objects, so an optimiser may hold them already. What
    `swap` returns is the callback's `replaced`. For other arguments of `from_torch`, pass
    `functools.partial(from_torch, policy="minimal")`. Raises `TypeError` if `swap` is not a function, and `ImportError` without
    transformers.

    >>> from funcops import nn
    >>> arguments = {"callbacks": [nn.trainer_callback()]}
    """
    require_callable("trainer_callback", swap=swap)
    from transformers import TrainerCallback

    class SwapCallback(TrainerCallback):
        replaced: Replaced | Any = None
        swapped: nn.Module | None = None

        def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            model = given["model"]
            if model is not None and model is not self.swapped:
                self.replaced, self.swapped = swap(model), model

        on_train_begin = on_init_end

    return SwapCallback()
