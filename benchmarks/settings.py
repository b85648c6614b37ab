"""Settings that all training steps of the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LR, CLIP, BETAS, DECAY = 1e-3, 1.0, (0.9, 0.95), 0.1
Step = Callable[[], Tensor]  # one step of training, which returns its loss


def runs(name: str, step: Callable[[], object], say: Callable[[str], None]) -> bool:
    """Run a provider's step once. One that fails is named and left out, as the others' rows are wanted all the same."""
    try:
        step()
    except Exception as error:
        say(f"{name} failed: {type(error).__name__}: {error}"[:500])
        return False
    return True


def finished(step: Step) -> Callable[[], None]:
    """The step, followed by a wait for the device."""

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run
