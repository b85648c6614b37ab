"""Published training runs, as data, and the simulator's predictions for them.

The values that the tables state are in `layout` and `published`. The others are assumed here:

- Korthikanti et al. write scores out (no fused attention) and recompute them in the backward: selective recomputation.
- Llama 3 405B: eight stages on each rank (V = 8), each of one layer; the embedding and the head each replace one layer, as 126
  layers on 16 ranks suggest; ZeRO-1. FLOPs are `Decoder.flops`, which counts half of the pairs of attention.

One efficiency for each kind of GPU is fitted, `GPU.efficiency`: the multiple of 0.01 that minimises the largest error over its
rows.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from benchmarks.measure import Row
from funcops.schedule import GPUS, Decoder, Layout, Predicted, predict
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


def largest_error(gpu: str, efficiency: float) -> float:
    """The largest error over the rows of a kind of GPU, by the closed form."""
    kind = dataclasses.replace(GPUS[gpu], efficiency=efficiency)
    rows = [row for row in PUBLISHED if row.gpu == gpu]
    return max(abs(bound(row.model, row.layout, kind).time / row.seconds - 1.0) for row in rows)


def rows() -> list[Row]:
    """Predicted and published seconds of a step, and the shares of exposed communication and of waiting."""
    found = []
    for row in PUBLISHED:
        said = row.predicted()
        spent = {"communication exposed": said.spent.exposed, "waiting": said.spent.waiting}
        found.append(Row("schedule", row.name, "published", "seconds per step", row.seconds, "s"))
        found.append(Row("schedule", row.name, "funcops.schedule.predict", "seconds per step", said.time, "s"))
        for what, seconds in spent.items():
            found.append(Row("schedule", row.name, "funcops.schedule.predict", what, 100 * seconds / said.time, "%"))
    return found
