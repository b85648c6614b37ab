"""The plain nn.Module that `train_lm --check` and the tests hold funcops to. It shares no code with funcops."""

from funcops.bench.plain import PlainLlama as PlainLlama
