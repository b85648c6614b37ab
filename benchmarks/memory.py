"""Peak live bytes over forward + backward of four Llama blocks, against autograd, and of a decoder with its loss, and the bytes
that policies keep by place. CPU, exact: every storage is counted."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.measure import Row
from benchmarks.plain import PlainBlock, as_on_a_gpu
from benchmarks.residuals import sixteenth
from funcops import Compress, Disk, Offload, Policy, RepeatConfig, WithExtras, chain, donate, random, repeat, report, with_policy
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import short
from funcops.engine.residuals.offload import copies
from funcops.engine.trees import tree_map_tensors
from funcops.lora import lora_init, lora_needs, with_lora
from funcops.low_precision import NF4, quantize_weights, with_weight_only
from funcops.models import decoder
from funcops.models.blocks import block_config

DIM, HEADS, HIDDEN, LENGTH, LAYERS = 256, 4, 704, 512, 4
CASES = ((1, torch.float32), (16, torch.float32), (16, torch.bfloat16))  # 512 tokens, where gradients weigh most, and 8,192


class Live(TorchDispatchMode):
    """Counts the bytes of all live storages that operators made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = WeakIdKeyDictionary()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(tree) if _takes_memory(t)] for tree in ((args, kwargs), out))
        held = {t.untyped_storage()._cdata for t in given}
        for t in made:
            storage = t.untyped_storage()
            if storage._cdata not in held and storage not in self.seen:
                self.seen[storage] = storage.nbytes()
        self.live = sum(self.seen.values())
        self.peak = max(self.peak, self.live)
        return out


def _takes_memory(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, FakeTensor) and not t.is_meta


def peak_of(fn: Callable[[], Any]) -> int:
    with Live() as counter:
        kept = fn()
    del kept
    return counter.peak


def run() -> list[Row]:
    return [*(row for case in CASES for row in _measure(*case)), *_decoder(), *_adapters(), *_places()]


def _decoder() -> list[Row]:
    """The peak of a decoder whose logits are never whole, and of the one that keeps them."""
    cfg, params, x = sixteenth(layers=2, rows=32)
    model = decoder(cfg, loss=True)

    def step(one: Any) -> Any:
        y, residuals = chain.fwd(params, x, one, needs=Needs(x=False))
        return chain.bwd(donate(residuals), torch.ones_like(y), one)

    cases = {"funcops": model, "funcops, logits kept": dataclasses.replace(model, joined=())}
    case = "two layers of a sixteenth of Llama 3.2 1B, 8192 tokens"
    return [
        Row("memory", case, name, "peak live", peak_of(functools.partial(step, one)) / 2**20, "MiB") for name, one in cases.items()
    ]


def _adapters() -> list[Row]:
    """The peak of a step of adapters of rank 8 beside frozen layers in bfloat16, and in NF4, which are decoded one at a time."""
    cfg = RepeatConfig(chain, block_config(DIM, HEADS, HIDDEN), LAYERS)
    params = repeat.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    x = WithExtras(torch.randn(16, LENGTH, DIM).bfloat16(), {"positions": torch.arange(LENGTH)})
    rows = []
    for name, format in (("funcops", None), ("funcops, NF4", NF4(double=True))):
        frozen = cfg if format is None else with_weight_only(cfg, format)
        lora = with_lora(frozen, 8, ("*",), alpha=16.0)
        given = lora_init(params if format is None else quantize_weights(params, frozen), lora, key=random.key(1))

        def step(given: Any = given, lora: Any = lora) -> Any:
            y, residuals = repeat.fwd(given, x, lora, needs=lora_needs(lora))
            return repeat.bwd(donate(residuals), torch.ones_like(y), lora)

        case = f"adapters of {LAYERS} llama blocks, {16 * LENGTH} tokens, bfloat16"
        rows.append(Row("memory", case, name, "peak live", peak_of(step) / 2**20, "MiB"))
    return rows


def _places() -> list[Row]:
    """The bytes that a codec and a place keep, by place, as a report on shapes says them before a run on a device."""
    cfg = RepeatConfig(chain, block_config(DIM, HEADS, HIDDEN), LAYERS)
    params = repeat.init(cfg, device="cpu", key=random.key(0), dtype=torch.bfloat16)
    x = WithExtras(torch.zeros(16, LENGTH, DIM).bfloat16(), {"positions": torch.arange(LENGTH)})
    case = f"{LAYERS} llama blocks, {16 * LENGTH} tokens, bfloat16"
    rows = []
    # on the CPU nothing would leave for the host's memory
    with mock.patch.object(copies, "leaves", lambda t: True), FakeTensorMode() as mode, tempfile.TemporaryDirectory() as folder:
        like, given = (tree_map_tensors(mode.from_tensor, tree) for tree in (params, x))
        for name, place in (("Offload", Offload()), ("Disk", Disk(folder))):
            op = with_policy(repeat, Policy({"*[xqkvy]": Compress("mxfp8") | place}, optional=True))
            found = report(op.fwd(like, given, cfg)[1], like, given).places
            provider = f"funcops, mxfp8 and {name}"
            rows += [Row("memory", case, provider, f"kept: {where}", size / 2**20, "MiB") for where, size in found.items() if size]
    return rows


def _measure(batch: int, dtype: torch.dtype) -> list[Row]:
    torch.manual_seed(0)
    data, dy = torch.randn(2, batch, LENGTH, DIM, dtype=dtype).unbind()
    cfg = RepeatConfig(chain, block_config(DIM, HEADS, HIDDEN), LAYERS)
    params = repeat.init(cfg, key=random.key(0), dtype=dtype)
    x = WithExtras(data, {"positions": torch.arange(LENGTH)})
    module = nn.Sequential(*(PlainBlock(DIM, HEADS, HIDDEN, LENGTH) for _ in range(LAYERS))).to(dtype)

    def ours() -> Any:
        _, residuals = repeat.fwd(params, x, cfg, needs=Needs(x=False))
        return repeat.bwd(donate(residuals), dy, cfg)

    def autograd() -> Any:
        return torch.autograd.grad(module(data), list(module.parameters()), dy)

    case, grads = f"{LAYERS} llama blocks, {batch * LENGTH} tokens, {short(dtype)}", sum(p.nbytes for p in module.parameters())
    peaks = {"funcops": peak_of(ours), "autograd": peak_of(autograd)}
    as_on_a_gpu(module)
    peaks["autograd, as on a GPU"] = peak_of(autograd)
    rows = [Row("memory", case, name, "peak live", peak / 2**20, "MiB") for name, peak in peaks.items()]
    rows += [Row("memory", case, name, "net of gradients", (peak - grads) / 2**20, "MiB") for name, peak in peaks.items()]
    gross, net = peaks["funcops"] / peaks["autograd"], (peaks["funcops"] - grads) / (peaks["autograd"] - grads)
    ratios = [("ratio to autograd", gross), ("ratio to autograd, net", net)]
    return [*rows, *(Row("memory", case, "funcops", name, value, "") for name, value in ratios)]
