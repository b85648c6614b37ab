"""Counts of a training step under torch.compile, the same on every machine: the graphs that Inductor gets, and the code it writes.

The step is the one of `docs/functional-training-loops.md`: forward, backward, clipping and AdamW of a small model; beside it the
same of torch.nn, by autograd and torch.optim. "nodes" are the operators in the graphs, "loops" the loop nests that Inductor writes
for the CPU, "files" the sources that a C++ compiler gets, and "lines" their length, on which the time of a first call depends. Here
no source is compiled, and the graphs run as they are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.measure import Row
from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    GLUConfig,
    LinearConfig,
    RMSNormConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    embedding,
    glu,
    linear,
    random,
    rms_norm,
    value_and_grad,
)
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm

VOCAB, DIM, HIDDEN = 64, 32, 64


class _Written(Exception):
    """Inductor has written a graph's code, and need not compile it."""


def run() -> list[Row]:
    rows: list[Row] = []
    found = {}
    for provider, (step, args) in {"funcops": our_step(), "torch.nn": torch_step()}.items():
        found[provider] = counted(step, *args)
        rows += [Row("compiled", "training step", provider, metric, value, "") for metric, value in found[provider].items()]
    for metric in ("nodes", "loops", "lines"):
        ratio = found["funcops"][metric] / found["torch.nn"][metric]
        rows.append(Row("compiled", "training step", "funcops over torch.nn", metric, ratio, ""))
    return rows


def counted(step: Callable[..., Any], *args: Any) -> dict[str, int]:
    """The graphs, nodes, files, loops and lines of one call of `step` under torch.compile."""
    from torch._functorch import config as of_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering

    nodes: list[int] = []
    written: list[str] = []

    def stop(lowering: Any) -> None:
        written.append(lowering.codegen()[0].value)
        raise _Written

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        nodes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        try:
            compile_fx.compile_fx_inner(copy.deepcopy(graph), inputs, **options)
        except Exception as error:
            if len(written) < len(nodes):
                raise error
        return make_boxed_func(graph.forward)

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=inner)

    torch._dynamo.reset()
    uncached = config.patch(fx_graph_cache=False), of_autograd.patch(enable_autograd_cache=False)
    with mock.patch.object(GraphLowering, "compile_to_module", stop), uncached[0], uncached[1]:
        torch.compile(step, backend=backend, dynamic=False)(*args)
    files = [text for code in written for text in re.findall(r"cpp_pybinding\(.*?r'''(.*?)'''\)", code, re.DOTALL)]
    loops = sum(len(re.findall(r"^    \{$", text, re.MULTILINE)) for text in files)
    lines = sum(text.count("\n") for text in files)
    return {"graphs": len(nodes), "nodes": sum(nodes), "files": len(files), "loops": loops, "lines": lines}


def our_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of the page, and its arguments."""
    model = ChainConfig(
        steps=(
            Step("embed", embedding, EmbeddingConfig(VOCAB, DIM)),
            Step("norm", rms_norm, RMSNormConfig(DIM)),
            Step("up", linear, LinearConfig(DIM, 2 * HIDDEN, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("head", linear, LinearConfig(HIDDEN, VOCAB)),
            Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
        ),
        extras=("labels",),
    )
    params, adamw, step_of = chain.init(model, key=random.key(0)), AdamWConfig(lr=3e-2), value_and_grad(chain)

    def step(params: Any, state: Any, tokens: Tensor, labels: Tensor) -> Any:
        loss, grads = step_of(params, WithExtras(tokens, {"labels": labels}), model)
        grads, norm = clip_by_global_norm(grads, 1.0)
        params, state = adamw_update(params, grads, state, adamw)
        return params, state, loss

    tokens = torch.arange(VOCAB - 1)
    return step, (params, adamw_init(params, adamw), tokens, tokens + 1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.up, self.head = nn.Linear(DIM, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        gate, up = self.up(self.norm(self.embed(tokens))).chunk(2, -1)
        return nn.functional.cross_entropy(self.head(nn.functional.silu(gate) * up), labels)


def torch_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same step of torch.nn, and its arguments."""
    model = _Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(tokens, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return loss

    tokens = torch.arange(VOCAB - 1)
    return step, (tokens, tokens + 1)
