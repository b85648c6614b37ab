"""Kinds of GPUs as data, and how long a matrix product takes on one."""

from __future__ import annotations

import dataclasses
import math

from funcops.engine.errors import fail, require, require_count, require_number, require_type
from funcops.schedule.collectives import Link

TILE = (256, 128)  # tile of cuBLAS's fastest kernels, from NVIDIA's guide to the performance of matrix products


@dataclasses.dataclass(frozen=True)
class GPU:
    """A kind of GPU and of the machine around it, in seconds and bytes. `flops`: per second, of dense 16-bit products; `flops8`: of
    8-bit ones, 0 if it has none; `efficiency`: the fraction of them that a product reaches if its tiles fill every wave of the
    `sms`, fitted; `attention`: the fraction of that which fused attention reaches; `memory_bandwidth`: of its own memory;
    `near_...`: within a node, the others over the network, for each GPU.

    >>> import dataclasses
    >>> from funcops.schedule import GPU, GPUS
    >>> sorted(GPUS), isinstance(GPUS["H100"], GPU)
    (['A100', 'H100'], True)
    >>> dataclasses.replace(GPUS["H100"], bandwidth=20e9).bandwidth
    20000000000.0
    """

    name: str
    flops: float
    efficiency: float
    sms: int
    memory_bandwidth: float
    near_bandwidth: float
    bandwidth: float
    near_latency: float = 5e-6
    latency: float = 15e-6
    per_node: int = 8
    attention: float = 0.75
    flops8: float = 0.0

    def __post_init__(self) -> None:
        require_type("GPU", "name", self.name, str)
        require_count("GPU", sms=self.sms, per_node=self.per_node)
        require_number("GPU", 0, near_latency=self.near_latency, latency=self.latency)
        require_number("GPU", 0, flops=self.flops, memory_bandwidth=self.memory_bandwidth)
        require_number("GPU", 0, near_bandwidth=self.near_bandwidth, bandwidth=self.bandwidth)
        require_number("GPU", 0, efficiency=self.efficiency, attention=self.attention, flops8=self.flops8)
        for name in ("flops", "memory_bandwidth", "near_bandwidth", "bandwidth", "efficiency", "attention"):
            require(getattr(self, name) > 0, "GPU", name, "above 0", getattr(self, name))
        for name in ("efficiency", "attention"):
            require(getattr(self, name) <= 1, "GPU", name, "at most 1", getattr(self, name))

    def product(self, m: int, n: int, k: int, out_bytes: float = 2, low: bool = False, groups: int = 1) -> float:
        """The seconds of [m, k] x [k, n] in 16 bits, or `low`, in 8; or of `groups` of them at once. The output is cut into tiles,
        one per SM, in waves of all SMs; partial tiles and waves take the time of full ones. If moving the operands and the output
        takes longer, that time."""
        waves = min(math.ceil(groups * math.ceil(m / a) * math.ceil(n / b) / self.sms) for a, b in (TILE, TILE[::-1]))
        arithmetic = waves * self.sms * 2 * math.prod(TILE) * k / ((self.flops8 if low else self.flops) * self.efficiency)
        return max(arithmetic, groups * ((1 if low else 2) * (m * k + n * k) + out_bytes * m * n) / self.memory_bandwidth)

    def moved(self, nbytes: float) -> float:
        """The seconds of elementwise work that reads and writes `nbytes` in all."""
        return nbytes / self.memory_bandwidth

    def link(self, axis: str, size: int, stride: int, direct: bool = False) -> Link:
        """The link of a mesh axis whose neighbours are `stride` GPUs apart. Within a node it has the `near_` latency and bandwidth;
        across nodes, the axis's ranks of one node use their GPUs' network ports together. `direct`: for messages between any two
        ranks, in which each rank has its own port alone, beside the messages within its node."""
        inside = max(1, self.per_node // stride)
        if size <= inside:
            return Link(axis, size, self.near_latency, self.near_bandwidth)
        together = min(self.near_bandwidth, inside * self.bandwidth)
        if direct:
            together = (size - 1) / max((size - inside) / self.bandwidth, (inside - 1) / self.near_bandwidth)
        return Link(axis, size, self.latency, together)


# Peaks, SMs and memory: NVIDIA's data sheets (A100 80GB SXM, H100 SXM). Bandwidths are what collectives reach out of NVLink's 300
# and 450 GB/s each way, and the network's 25 (HDR InfiniBand) and 50 GB/s (400 Gb/s). Efficiencies: fitted to benchmarks.published.
# `flops8`: three quarters of the peak, 1979e12, fitted to a block's time with FP8 over its time without (benchmarks.recipes).
GPUS = {
    "A100": GPU("A100", 312e12, 0.72, 108, 2.039e12, near_bandwidth=230e9, bandwidth=25e9),
    "H100": GPU("H100", 989e12, 0.58, 132, 3.35e12, near_bandwidth=370e9, bandwidth=45e9, flops8=1484e12),
}


def gpu_of(where: str, gpu: GPU | str) -> GPU:
    """Return the GPU, looked up in `GPUS` if given by name. Raises `ValueError` for an unknown name."""
    require_type(where, "gpu", gpu, str, GPU)
    if isinstance(gpu, GPU):
        return gpu
    if gpu not in GPUS:
        fail(where, "gpu", f"{' or '.join(GPUS)}, or a GPU of your own", repr(gpu))
    return GPUS[gpu]
