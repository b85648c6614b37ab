"""Liger-Kernel for comparison: its functions, if it imports, and its CSV columns, so that plots of both can be overlaid."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kernel_calls import KernelCall, Prepared, direct
from benchmarks.measure import machine

COLUMNS = (
    "kernel_name",
    "kernel_provider",
    "kernel_operation_mode",
    "metric_name",
    "metric_unit",
    "x_name",
    "x_label",
    "x_value",
    "y_value_50",
    "y_value_20",
    "y_value_80",
    "extra_benchmark_config_str",
    "gpu_name",
    "timestamp",
    "liger_version",
)


def liger_call(call: KernelCall) -> Prepared | None:
    """Liger-Kernel's forward for the same arguments; None if it lacks one or is not installed."""
    try:
        import liger_kernel.transformers.functional as liger
    except ImportError:
        return None

    def gated(x: Any, scales: Any, kind: str, first: bool) -> Any:
        f = {"swiglu": liger.liger_swiglu, "geglu_tanh": liger.liger_geglu}[kind]
        return f(*x.chunk(2, -1))

    def loss(logits: Any, labels: Any, smoothing: float, ignored: int, z_loss: float) -> Any:
        return liger.liger_cross_entropy(
            logits, labels, ignore_index=ignored, reduction="none", label_smoothing=smoothing, lse_square_scale=z_loss
        )

    found = {
        "rms_norm_fwd": lambda x, w, eps, _: liger.liger_rms_norm(x, w, eps),
        "layer_norm_fwd": lambda x, w, b, eps, _: liger.liger_layer_norm(x, w, b, eps),
        "add_rms_norm_fwd": lambda x, stream, w, eps, _: liger.liger_fused_add_rms_norm(x, stream, w, eps),
        "glu_fwd": gated,
        "cross_entropy_fwd": loss,
    }.get(call.name)
    if found is None or (found is gated and call.args[2] not in ("swiglu", "geglu_tanh")):
        return None
    f: Any = found
    return direct(torch.no_grad()(f))


def write_liger_csv(path: str, rows: Sequence[Any]) -> None:
    """Write device times in milliseconds under Liger-Kernel's columns; one figure stands for its three quantiles."""
    about = machine()
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            mode = "backward" if row.kernel.endswith(("_bwd", "_dgrad", "_wgrad")) else "forward"
            ms = row.device_us / 1e3
            writer.writerow(
                (
                    row.kernel,
                    row.provider,
                    mode,
                    "speed",
                    "ms",
                    "shape",
                    "shape",
                    row.shape,
                    ms,
                    ms,
                    ms,
                    f"{{'dtype': '{row.dtype}'}}",
                    about["device"],
                    now,
                    about.get("liger_kernel", ""),
                )
            )
