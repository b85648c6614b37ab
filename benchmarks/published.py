"""Published training runs, as data, and the simulator's predictions for them.

The values that the tables state are in `layout` and `published`. The others are assumed here:

- Korthikanti et al. write scores out (no fused attention) and recompute them in the backward: selective recomputation.
- Llama 3 405B: eight stages on each rank (V = 8), each of one layer; the embedding and the head each replace one layer, as 126
  layers on 16 ranks suggest; ZeRO-1. FLOPs are `Decoder.flops`, which counts half of the pairs of attention.

One efficiency for each kind of GPU is fitted, `GPU.efficiency`: the multiple of 0.01 that minimises the largest error over its
rows of `PUBLISHED`. Nothing is fitted to `HELD_OUT`, `RECOMPUTED`, `EXPERTS` and `MESSAGES`. Assumed there: Narayanan et al. run
1F1B with the fastest microbatch of 1, 2, 4 and 8, and recompute whole layers. Mixtral reaches its TFLOP/s, which count all pairs of
attention, in the layout that the same page recommends for it, with ZeRO-1; its page counts 1 of 8 experts a GPU. Qwen3 recomputes
whole layers, as its config file says, and has ZeRO-3.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from benchmarks.measure import Row
from funcops.schedule import GPU, GPUS, Decoder, Layout, Mixture, Predicted, predict
from funcops.schedule.predict import bound


class Published(NamedTuple):
    """A step of `published` seconds, or of as many seconds as give that many TFLOP/s of the model per GPU, by `unit`."""

    name: str
    model: Decoder
    layout: Layout
    gpu: str
    published: float
    unit: str
    source: str

    @property
    def seconds(self) -> float:
        if self.unit == "s":
            return self.published
        return self.model.flops / (self.published * 1e12 * self.layout.gpus)

    def predicted(self) -> Predicted:
        return predict(self.model, self.layout, self.gpu)

    def error(self) -> float:
        """The error of the predicted time, relative to the published one."""
        return self.predicted().time / self.seconds - 1.0


def _gpt(hidden: int, layers: int, heads: int, batch: int) -> Decoder:
    return Decoder(hidden, 4 * hidden, layers, heads, 51200, 2048, batch, gated=False, flash=False)


def _llama(seq: int, batch: int) -> Decoder:
    return Decoder(16384, 53248, 126, 128, 128256, seq, batch, kv_heads=8)


_K, _L = "arXiv:2205.05198, tables 3 and 5", "arXiv:2407.21783, table 4"
PUBLISHED = (
    Published("GPT 22B, 8 A100", _gpt(6144, 48, 64, 4), Layout(tp=8, microbatch=4), "A100", 1.10, "s", _K),
    Published("GPT 175B, 64 A100", _gpt(12288, 96, 96, 64), Layout(tp=8, pp=8, chunks=3), "A100", 13.75, "s", _K),
    Published("GPT 530B, 280 A100", _gpt(20480, 105, 128, 280), Layout(tp=8, pp=35, chunks=3), "A100", 37.83, "s", _K),
    Published("GPT 1T, 512 A100", _gpt(25600, 128, 160, 512), Layout(tp=8, pp=64), "A100", 71.49, "s", _K),
    *(
        Published(name, _llama(seq, batch), Layout(dp, 8, 16, cp, chunks=8, zero=1), "H100", tflops, "TFLOP/s", _L)
        for name, seq, batch, dp, cp, tflops in (
            ("Llama 3 405B, 8,192 H100", 8192, 2048, 64, 1, 430),
            ("Llama 3 405B, 16,384 H100", 8192, 2048, 128, 1, 400),
            ("Llama 3 405B, 16,384 H100, 131,072 tokens", 131072, 128, 8, 16, 380),
        )
    ),
)


def _narayanan(
    billions: float, heads: int, hidden: int, layers: int, tp: int, pp: int, gpus: int, batch: int, tflops: int
) -> Published:
    """A row of the table, whose FLOPs count the recomputation, by the paper's formula."""
    model = _gpt(hidden, layers, heads, batch)
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    layouts = [Layout(gpus // tp // pp, tp, pp, microbatch=b, recompute="block") for b in (1, 2, 4, 8)]
    fastest = min(layouts, key=lambda layout: bound(model, layout, GPUS["A100"]).time)
    seconds = flops / (tflops * 1e12 * gpus)
    return Published(f"GPT {billions}B, {gpus:,} A100", model, fastest, "A100", seconds, "s", "arXiv:2104.04473, table 1")


HELD_OUT = (
    _narayanan(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    _narayanan(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    _narayanan(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    _narayanan(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    _narayanan(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    _narayanan(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    _narayanan(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    _narayanan(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    _narayanan(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    _narayanan(1008, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
RECOMPUTED = tuple(zip(PUBLISHED[:4], (1.42, 18.13, 49.05, 94.42), strict=True))
"""The four GPT rows of `PUBLISHED`, each with the seconds of the same step if whole layers are recomputed, by the same table."""

_MIXTRAL = Decoder(4096, 14336, 32, 32, 32000, 4096, 256, kv_heads=8, mixture=Mixture(8, 2))
_QWEN = Decoder(2048, 768, 48, 32, 151936, 4096, 512, kv_heads=4, head_size=128, mixture=Mixture(128, 8))
_ALL_PAIRS = 12 * (_MIXTRAL.seq - _MIXTRAL.keys) * _MIXTRAL.width * _MIXTRAL.layers * _MIXTRAL.batch * _MIXTRAL.seq
EXPERTS = (
    Published(
        "Mixtral 8x7B, 64 H100",
        _MIXTRAL,
        Layout(dp=2, ep=8, pp=4, chunks=8, zero=1),
        "H100",
        (_MIXTRAL.flops + _ALL_PAIRS) / (468e12 * 64),
        "s",
        "NVIDIA/Megatron-LM@022bcb5, megatron/core/transformer/moe/README.md",
    ),
    Published(
        "Qwen3 30B-A3B, 8 H100",
        _QWEN,
        Layout(ep=8, microbatch=4, zero=3, recompute="block"),
        "H100",
        21.773,
        "s",
        "NVIDIA-NeMo/Automodel@01926a5, docs/performance-summary.md",
    ),
)


class Messages(NamedTuple):
    """Seconds of collectives over the 8 GPUs of a node that nothing hides: a gather and a reduce-scatter of `tokens` rows of
    `hidden` features in 16 bits."""

    gpu: GPU
    tokens: int
    hidden: int
    gather: float
    scatter: float
    source: str


def narrow(gpu: GPU) -> GPU:
    """The variant of a GPU whose NVLink is cut to 400 GB/s (A800, H800), of which collectives reach the same part."""
    whole = {"A100": 600e9, "H100": 900e9}[gpu.name]
    return dataclasses.replace(gpu, name=gpu.name.replace("100", "800"), near_bandwidth=gpu.near_bandwidth * 400e9 / whole)


_F = "bytedance/flux@79807b7, docs/performance_report.md: torch and NCCL"
MESSAGES = (
    Messages(narrow(GPUS["A100"]), 4096, 12288, 0.662e-3, 0.646e-3, _F),
    Messages(narrow(GPUS["H100"]), 4096, 12288, 0.583e-3, 0.590e-3, _F),
)
DISPATCH_BANDWIDTHS = {8: 153e9, 16: 43e9, 32: 58e9, 64: 51e9}
"""Bytes a second that the exchange of tokens between so many H800 reaches on its slowest link, 8 of them in a node: NVLink there,
and InfiniBand beyond. deepseek-ai/DeepEP@0297fc8, docs/legacy.md."""


def exposed_of_layer(given: Messages) -> tuple[float, float]:
    """Seconds a layer of exposed communication of tensor parallelism, predicted and by the published messages, in Megatron's order:
    two gathers and two reduce-scatters forward, two gathers backward; the other messages of the backward are behind a product."""
    model = Decoder(given.hidden, 4 * given.hidden, 2, 96, 51200, given.tokens, 1, gated=False)
    said = predict(model, Layout(tp=8), given.gpu)
    return said.spent.exposed / model.layers, 4 * given.gather + 2 * given.scatter


def ratio_of_recomputing(row: Published) -> float:
    """The predicted time with whole layers recomputed, over the time with scores recomputed alone."""
    whole = dataclasses.replace(row.layout, recompute="block")
    return predict(row.model, whole, row.gpu).time / row.predicted().time


def largest_error(gpu: str, efficiency: float) -> float:
    """The largest error over the rows of a kind of GPU, by the closed form."""
    kind = dataclasses.replace(GPUS[gpu], efficiency=efficiency)
    rows = [row for row in PUBLISHED if row.gpu == gpu]
    return max(abs(bound(row.model, row.layout, kind).time / row.seconds - 1.0) for row in rows)


def rows() -> list[Row]:
    """Predicted and published seconds of a step, and the shares of exposed communication and of waiting."""
    found = []
    for row in (*PUBLISHED, *HELD_OUT, *EXPERTS):
        said = row.predicted()
        spent = {"communication exposed": said.spent.exposed, "waiting": said.spent.waiting}
        found.append(Row("schedule", row.name, "published", "seconds per step", row.seconds, "s"))
        found.append(Row("schedule", row.name, "funcops.schedule.predict", "seconds per step", said.time, "s"))
        for what, seconds in spent.items():
            found.append(Row("schedule", row.name, "funcops.schedule.predict", what, 100 * seconds / said.time, "%"))
    return found
