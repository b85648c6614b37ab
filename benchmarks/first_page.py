"""The bytes of README's table: what the blocks of named models keep of 8,192 tokens in bfloat16, by what runs them.

A block is run at its real size on `TOKENS` tokens: what it keeps grows with their number, and a model's blocks are alike. The
tables of rotations, which blocks share, do not count. PyTorch is counted as it decomposes a block on a CPU, and as on a GPU
(`plain.as_on_a_gpu`); compiled, by what torch.compile's partitioner saves of the graph that Inductor gets. Transformers'
modules are formulas in Python, the same on both; their dropouts and layer norms are counted as on a GPU. torch_remat runs the
plain block as on a GPU, with the annotation of `benchmarks.rematerialized`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import memory, schedule
from benchmarks.measure import Row
from benchmarks.plain import PlainBlock, PlainGPT2Block, as_on_a_gpu
from benchmarks.plot import draw_kept
from benchmarks.rematerialized import cost_of_torch_remat, in_blocks
from benchmarks.residuals import llama_of_transformers
from benchmarks.saved import saved_by, saved_by_autograd
from funcops import Op, WithExtras, chain, random, report, with_policy
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import tree_map_tensors
from funcops.lora import lora_init, lora_needs, with_lora
from funcops.models.blocks import block_config, gpt2_block_config

TOKENS, WHOLE, RANK = 16, 8192, 8
LLAMA: dict[str, Any] = dict(dim=4096, heads=32, hidden=14336, kv_heads=8)
GPT2: dict[str, Any] = dict(dim=1600, heads=25, hidden=6400, p=0.1)


class Model(NamedTuple):
    """The blocks of a model: their number and width, and how one is made here, of torch's modules, and of Transformers', with the
    arguments of its call. With `lora` their weights are frozen, beside adapters of rank 8 on all linear layers."""

    layers: int
    width: int
    config: Callable[[], Any]
    extras: dict[str, Tensor]
    plain: Callable[[], nn.Module]
    transformers: Callable[[], tuple[nn.Module, dict[str, Any]]]
    lora: bool = False


def _llama_of_transformers() -> tuple[nn.Module, dict[str, Any]]:
    block, tables = llama_of_transformers(*LLAMA.values(), TOKENS)
    return block, {"position_embeddings": tables}


def _gpt2_of_transformers() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    cfg = GPT2Config(n_embd=GPT2["dim"], n_head=GPT2["heads"], n_inner=GPT2["hidden"], attn_pdrop=0.0, resid_pdrop=GPT2["p"])
    cfg._attn_implementation = "sdpa"
    return GPT2Block(cfg, 0), {}


_LLAMA = Model(
    32,
    4096,
    lambda: block_config(*LLAMA.values()),
    {"positions": torch.arange(TOKENS)},
    lambda: PlainBlock(length=TOKENS, **LLAMA),
    _llama_of_transformers,
)
MODELS = {
    "blocks of Llama 3 8B": _LLAMA,
    "blocks of GPT-2 XL, dropout": Model(
        48, 1600, lambda: gpt2_block_config(**GPT2), {"key": random.key(0)}, lambda: PlainGPT2Block(**GPT2), _gpt2_of_transformers
    ),
    "frozen blocks of Llama 3 8B, LoRA": _LLAMA._replace(lora=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="also draw the bytes of the blocks (PNG or SVG)")


def of_funcops(model: Model, op: Op = chain) -> int:
    cfg, needs = model.config(), Needs()
    params = tree_map_tensors(lambda t: torch.zeros_like(t, device="cpu"), chain.init(cfg, device="meta", dtype=torch.bfloat16))
    if model.lora:
        cfg = with_lora(cfg, RANK, ("*",), alpha=16.0)
        params, needs = lora_init(params, cfg, key=random.key(0)), lora_needs(cfg, x=("main",))
    residuals = op.fwd(params, WithExtras(_x(model), model.extras), cfg, needs=needs)[1]
    return report(residuals, params, model.extras).kept_bytes  # a block's input counts


def of_torch(model: Model, on_a_gpu: bool) -> int:
    module = _module(model, model.plain)
    return saved_by_autograd(as_on_a_gpu(module) if on_a_gpu else module, _x(model))


def of_compiler(model: Model) -> int:
    """The bytes between the halves of a compiled block. This backend decomposes and cuts as Inductor does, and makes no code."""
    module = _module(model, model.plain)
    with torch.no_grad():
        module(_x(model))  # makes its tables, which blocks share
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager_decomp_partition", fullgraph=True)
    x = _x(model).requires_grad_()
    return saved_by(module, lambda: compiled(x))


def of_transformers(model: Model) -> int:
    arguments: dict[str, Any] = {}

    def build() -> nn.Module:
        module, given = model.transformers()
        arguments.update(given)
        return module

    module = as_on_a_gpu(_module(model, build))
    tables = [t for given in arguments.values() for t in given]
    return saved_by(module, lambda: module(_x(model).requires_grad_(), **arguments), tables)


def of_torch_remat(model: Model) -> int:
    """The bytes of a block whose input is the output of a step, and whose output is summed up."""
    module, scale = as_on_a_gpu(_module(model, model.plain)), nn.Parameter(torch.ones(model.width, dtype=torch.bfloat16))
    weights = [p for p in module.parameters() if p.requires_grad]
    with torch.no_grad():
        module(_x(model))  # makes its tables, which blocks share
    return cost_of_torch_remat(module, lambda: module(_x(model) * scale).float().sum(), [*weights, scale])[0]


PROVIDERS: dict[str, tuple[Callable[[Model], int], str | None]] = {  # and the package that it needs
    "funcops": (of_funcops, None),
    "funcops, compress_fp8": (lambda model: of_funcops(model, with_policy(chain, "compress_fp8")), None),
    "autograd": (lambda model: of_torch(model, False), None),
    "autograd, as on a GPU": (lambda model: of_torch(model, True), None),
    "torch.compile": (of_compiler, None),
    "transformers": (of_transformers, "transformers"),
    "torch_remat": (of_torch_remat, "torch_remat"),
}


def row(name: str, provider: str) -> Row:
    """The GB that all blocks of a model keep of 8,192 tokens."""
    model = MODELS[name]
    kept = PROVIDERS[provider][0](model)
    return Row("first_page", f"{name}, {WHOLE} tokens", provider, "kept", model.layers * WHOLE / TOKENS * kept / 1e9, "GB")


def peaks() -> Iterator[Row]:
    """The peaks of `bench memory` in bfloat16 by funcops and PyTorch, and by the others whose packages are installed."""
    batch, dtype = memory.CASES[-1]
    found = [one for one in memory._measure(batch, dtype) if one.metric == "peak live"]
    yield from found
    for provider, peak in {"transformers": _peak_of_transformers, "torch_remat": _peak_of_torch_remat}.items():
        if importlib.util.find_spec(provider):
            yield found[0]._replace(provider=provider, value=peak(batch, dtype) / 2**20)


def _peak_of_transformers(batch: int, dtype: torch.dtype) -> int:
    found = [
        llama_of_transformers(memory.DIM, memory.HEADS, memory.HIDDEN, memory.HEADS, memory.LENGTH) for _ in range(memory.LAYERS)
    ]
    blocks, tables = nn.ModuleList(block for block, _ in found).to(dtype), found[0][1]

    def whole(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, position_embeddings=tables)
        return x

    return _peak_of_step(whole, blocks, batch, dtype)


def _peak_of_torch_remat(batch: int, dtype: torch.dtype) -> int:
    sizes = memory.DIM, memory.HEADS, memory.HIDDEN, memory.LENGTH
    blocks = nn.Sequential(*(PlainBlock(*sizes) for _ in range(memory.LAYERS))).to(dtype)
    with in_blocks(blocks) as whole:
        return _peak_of_step(whole, as_on_a_gpu(blocks), batch, dtype)


def _peak_of_step(call: Callable[[Tensor], Tensor], module: nn.Module, batch: int, dtype: torch.dtype) -> int:
    x, dy = torch.randn(2, batch, memory.LENGTH, memory.DIM, dtype=dtype).unbind()
    return memory.peak_of(lambda: torch.autograd.grad(call(x), list(module.parameters()), dy))


def split_peaks() -> list[Row]:
    """The peaks of `bench schedule` with weight gradients that come last."""
    return [one for one in schedule._bytes() if one.metric == "live bytes peak"]


def run(rivals: bool = True, plot: str | None = None) -> list[Row]:
    """All rows; without `rivals` only what a model's blocks keep, as far as it needs torch alone."""
    found = []
    for name, model in MODELS.items():
        for provider, (_, package) in PROVIDERS.items():
            packages = [one for one in (package, "peft" if model.lora and "funcops" not in provider else None) if one]
            if not packages or rivals and all(map(importlib.util.find_spec, packages)):
                found.append(row(name, provider))
    if rivals:
        found += [one._replace(bench="first_page") for one in (*peaks(), *split_peaks())]
    if plot:
        draw_kept(plot, found)
    return found


def _x(model: Model) -> Tensor:
    return torch.zeros(1, TOKENS, model.width, dtype=torch.bfloat16)


def _module(model: Model, build: Callable[[], nn.Module]) -> nn.Module:
    """The module in bfloat16, with PEFT's adapters if the model has adapters. Its weights are zeros, as no value counts here."""
    with mock.patch.object(nn.Linear, "reset_parameters", lambda self: nn.init.zeros_(self.weight)):
        module = build().to(torch.bfloat16)
        if not model.lora:
            return module
        import peft

        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        found: Any = peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=names), module)
        return found
