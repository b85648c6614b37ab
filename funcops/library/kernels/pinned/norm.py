"""The gradient of an RMSNorm by one order of its sums, whatever the number of rows."""

from __future__ import annotations

import math
from typing import Optional

from torch import Tensor

from funcops.library.kernels.norm import rms_norm_bwd, rms_norm_gradients
from funcops.library.kernels.pins import Pins, pinned


@pinned(rms_norm_bwd)
def _pinned_bwd(
    pins: Pins, dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    d_x, d_w = rms_norm_gradients(dy, x, w, rstd, centred, dx, dw, math.inf)  # never a product of matrix and vector
    return d_x, None if d_w is None else d_w.unsqueeze(0)
