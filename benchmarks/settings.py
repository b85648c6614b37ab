"""Settings that all training steps of the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LR, CLIP, BETAS, DECAY = 1e-3, 1.0, (0.9, 0.95), 0.1
Step = Callable[[], Tensor]  # one step of training, which returns its loss


def finished(step: Step) -> Callable[[], None]:
    """The step, followed by a wait for the device."""

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run
