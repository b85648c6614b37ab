"""`batch_wgrads` against one accumulating wgrad after another, fp32 accumulators, in one run, taking turns.

The table in `funcops.library.ops.linear_wgrads` comes from these rows: joining pays off where the ratio stays below 1.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.measure import BenchError, Row, interleaved
from funcops import ChainConfig, LinearConfig, Step, batch_wgrads, chain, linear, random
from funcops.engine.contract.op import Op
from funcops.engine.errors import short
from funcops.engine.trees import cast, tree_map_tensors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FEATURES = 512
ROWS = (8, 16, 64, 256, 1024)
COUNT = 8  # microbatches for one weight, or weights for one microbatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="tokens of each microbatch")
    parser.add_argument("--features", type=int, default=FEATURES, help="in and out features of the layer")
    parser.add_argument("--device", default="cpu")


def run(dtypes: list[str], rows: list[int], features: int, device: str) -> list[Row]:
    if device != "cpu" and not torch.cuda.is_available():
        raise BenchError(f"--device: there is no {device} here")
    found = []
    for name in dtypes:
        for tokens in rows:
            found += _microbatches(DTYPES[name], tokens, features, device)
            found += _weights(DTYPES[name], tokens, features, device)
    return found


def _microbatches(dtype: torch.dtype, tokens: int, features: int, device: str) -> list[Row]:
    cfg = LinearConfig(features, features)
    return _ratios(
        f"{COUNT} microbatches of one weight, {tokens} tokens",
        linear,
        cfg,
        [tokens] * COUNT,
        dtype,
        features,
        ("concatenate", None),
        device,
    )


def _weights(dtype: torch.dtype, tokens: int, features: int, device: str) -> list[Row]:
    cfg = ChainConfig(steps=tuple(Step(f"l{i}", linear, LinearConfig(features, features)) for i in range(COUNT)))
    return _ratios(
        f"{COUNT} weights of one shape, {tokens} tokens", chain, cfg, [tokens], dtype, features, ("batch", "group", None), device
    )


def _ratios(case: str, op: Op, cfg: Any, tokens: list[int], dtype: torch.dtype, features: int, ways: Any, device: str) -> list[Row]:
    params = cast(op.init(cfg, key=random.key(0), device=device), dtype)
    into = tree_map_tensors(lambda t: torch.zeros_like(t, dtype=torch.float32), params)
    pendings = []
    for rows in tokens:
        y, residuals = op.fwd(params, torch.randn(rows, features, dtype=dtype, device=device), cfg)
        pendings.append(op.dgrad(residuals, torch.randn_like(y), cfg)[1])

    def one_by_one() -> None:
        for pending in pendings:
            op.wgrad(pending, cfg, into=into)

    functions: dict[str, Any] = {"one by one": one_by_one}
    for how in ways:
        functions[how or "as measured"] = lambda how=how: batch_wgrads(op, pendings, cfg, into=into, how=how)
    if device != "cpu":
        functions = {name: _synchronized(fn, device) for name, fn in functions.items()}
    samples = interleaved(functions, rounds=40, calls=2)
    rows_found = [Row("wgrads", f"{case}, {short(dtype)}", "one by one", "median", statistics.median(samples["one by one"]), "us")]
    for name, values in samples.items():
        if name != "one by one":
            ratio = statistics.median(a / b for a, b in zip(values, samples["one by one"], strict=True))
            rows_found.append(Row("wgrads", f"{case}, {short(dtype)}", name, "ratio to one by one", ratio, ""))
    return rows_found


def _synchronized(fn: Any, device: str) -> Any:
    def call() -> None:
        fn()
        torch.accelerator.synchronize(device)

    return call
