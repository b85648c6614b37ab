"""A whole training step of the example's decoder: forward, backward, clipping, AdamW; against plain PyTorch.

Every provider does the same work in the same precision. With bfloat16 the master weights, the gradients that are clipped and
AdamW are float32: funcops casts its params tree; the plain version keeps a bfloat16 copy of the module, written by one
`_foreach_copy_` a step, which is faster on CPU than autocast. PyTorch runs `F.rms_norm`, SDPA, rotation tables made once,
`clip_grad_norm_(foreach=True)` and `AdamW(fused=True)`. "funcops" runs its norms and GLUs twice, as a chain does by default;
"save_all" keeps what PyTorch keeps, and computes nothing twice; "unfused" is the first with `fuse=False`; "packed" has the
weights of q, k and v in one memory (`pack_qkv`), and "graphed" is a CUDA graph of the whole packed step; "cudnn" is the first
with cuDNN's attention; "compiled" has forward and backward in one graph of torch.compile, as "torch.compile" has the plain
model's. If jax and optax are installed, they jit the same step (`jax_step`).

Steps without a compiler are measured first, in every dtype, and profiled with `--profile`; then compiled steps, which take most of
the time, in turns with the steps that they are compared with. `--part` takes one of the two alone. `--seconds` bounds the time:
slow steps get fewer rounds, and a compilation that would not end in time is not started. Steps that are left out, or fail, are
named.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import moe_step
from benchmarks.jax_step import jax_step
from benchmarks.measure import BenchError, NoDevice, Row, interleaved, interval
from benchmarks.plain import PlainLlama, plain_name
from benchmarks.profiled import profiled
from benchmarks.settings import BETAS, CLIP, DECAY, LR, Step, finished, runs
from funcops import RopeConfig, WithExtras, chain, donate, rope_table, with_policy
from funcops.adapters.graphs import graphed
from funcops.engine.contract.configs import Composite
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import cast, tree_map_with_path
from funcops.library.fused import pack_qkv
from funcops.models.blocks import Sizes, decoder_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_factor, global_norm

# for a GPU: large enough that the device, not the host, takes the time
LARGE, LARGE_ROUNDS = Sizes(dim=1536, layers=4, heads=12, kv_heads=4, hidden=4096, vocab=32000, context=1024, batch=16), 15
ROUNDS, FEWEST = 40, 3
SECONDS = 110.0  # for all steps; the rounds of one group get a twentieth
PARTS = ("all", "eager", "compiled")
EAGER = "funcops", "funcops, save_all", "funcops, unfused", "funcops, packed", "torch eager", "funcops, cudnn", "funcops, graphed"
COMPILED = "torch.compile", "funcops, compiled"
COMPARED = "funcops", "funcops, save_all", "funcops, graphed", "jax, jitted"
PAIRS = (
    *itertools.product(("funcops",), ("funcops, unfused", "funcops, packed", "funcops, cudnn", "funcops, graphed")),
    *itertools.product(("funcops", "funcops, save_all", "funcops, graphed"), ("torch eager", "torch.compile")),
    ("funcops, compiled", "torch.compile"),
    *itertools.product(("funcops", "funcops, compiled"), ("jax, jitted",)),
)


def funcops_step(
    sizes: Sizes,
    plain: PlainLlama,
    x: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    policy: str = "recompute_elementwise",
    fuse: bool = True,
    compiled: bool = False,
    packed: bool = False,
    captured: bool = False,
) -> Step:
    """A step of ours on the plain module's weights; each call does one more training step and returns the loss. The first call
    captures its graph."""
    op = with_policy(chain, policy)
    cfg, adamw = (
        decoder_config(sizes) if fuse else unfused(decoder_config(sizes)),
        AdamWConfig(lr=LR, betas=BETAS, weight_decay=DECAY),
    )
    weights = {name: t.detach().clone() for name, t in plain.named_parameters()}
    params = tree_map_with_path(
        lambda path, t: None if t is None else weights[plain_name(path)], chain.init(cfg, key=None, device="meta")
    )
    table = rope_table(torch.arange(x.shape[1], device=x.device), RopeConfig(sizes.dim // sizes.heads))
    if packed:
        params = pack_qkv(params, cfg)
    # the weights that the passes read: AdamW writes them in the pass in which it updates the params
    work = params if dtype is torch.float32 else cast(params, dtype)
    if packed and work is not params:
        work = pack_qkv(work, cfg)
    given = [params, adamw_init(params, adamw), None if work is params else work, x, labels, table]

    def passes(work: Any, x: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Any]:
        loss, residuals = op.fwd(work, WithExtras(x, {"positions": table, "labels": labels}), cfg, needs=Needs(x=False))
        grads, _ = op.bwd(donate(residuals), torch.ones_like(loss), cfg)
        return loss, grads

    gradients: Any = torch.compile(passes, fullgraph=True, dynamic=False) if compiled else passes

    def step(params: Any, state: Any, work: Any, x: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        loss, grads = gradients(params if work is None else work, x, labels, table)
        factor = clip_factor(global_norm(grads), CLIP)
        adamw_update(params, grads, state, adamw, factor=factor, into=work, in_place=True)
        return loss

    captures = functools.cache(lambda: graphed(step, *given, inputs=dict.fromkeys("012", "donated")) if captured else step)
    return lambda: captures()(*given)


def by_cudnn(step: Step) -> Step:
    """The step with flash attention forbidden: cuDNN's takes its place where torch's chooser allows."""

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return step()

    return run


def unfused(cfg: Any) -> Any:
    """The config with `fuse=False` in every chain and parallel."""
    if not isinstance(cfg, Composite):
        return cfg
    parts: Any = cfg.with_parts(lambda name, op, inner: (op, unfused(inner)))
    return dataclasses.replace(parts, fuse=False) if "fuse" in {f.name for f in dataclasses.fields(parts)} else parts


def torch_step(
    module: PlainLlama, x: Tensor, labels: Tensor, dtype: torch.dtype, compiled: bool = False, mode: str | None = None
) -> Step:
    """A step of plain PyTorch; each call does one more training step and returns the loss."""
    master = copy.deepcopy(module)
    compute = master if dtype is torch.float32 else copy.deepcopy(module).to(dtype)
    weights: list[Tensor] = list(master.parameters())
    copies: list[Tensor] = list(compute.parameters())
    optimiser = torch.optim.AdamW(weights, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    compute.cos_sin(next(compute.parameters()))  # make its tables now: a compiled call would put them in a graph's memory
    run: Any = torch.compile(compute, dynamic=False, mode=mode) if compiled else compute

    def step() -> Tensor:
        if compute is not master:
            with torch.no_grad():
                torch._foreach_copy_(copies, weights)
        loss = run(x, labels)
        compute.zero_grad(set_to_none=True)
        loss.backward()
        if compute is not master:
            for weight, narrow in zip(weights, copies, strict=True):
                assert narrow.grad is not None
                weight.grad = narrow.grad.float()
        torch.nn.utils.clip_grad_norm_(weights, CLIP, foreach=True)
        optimiser.step()
        return loss.detach()

    return step


def steps(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> dict[str, Step]:
    """The providers' steps, all from the same weights on the same batch."""
    torch.manual_seed(0)
    module = PlainLlama(
        dim=sizes.dim,
        n_layers=sizes.layers,
        n_heads=sizes.heads,
        n_kv_heads=sizes.kv_heads,
        hidden=sizes.hidden,
        context=sizes.context,
        vocab=sizes.vocab,
    ).to(device)
    x, labels = torch.randint(0, sizes.vocab, (2, sizes.batch, sizes.context)).to(device)
    jitted = jax_step(sizes, dict(module.named_parameters()), x, labels, dtype, adamw=(LR, CLIP, BETAS, DECAY))
    ours = functools.partial(funcops_step, sizes, module, x, labels, dtype)
    return {
        "funcops": ours(),
        "funcops, save_all": ours("save_all"),
        "funcops, unfused": ours(fuse=False),
        "funcops, packed": ours(packed=True),
        "torch eager": torch_step(module, x, labels, dtype),
        # a CPU has no graphs, nor cuDNN: there the step would be recorded, and run as it is
        **({} if device == "cpu" else {"funcops, cudnn": by_cudnn(ours()), "funcops, graphed": ours(packed=True, captured=True)}),
        "torch.compile": torch_step(module, x, labels, dtype, compiled=True),
        "funcops, compiled": ours(compiled=True),
    } | ({} if jitted is None else {"jax, jitted": jitted})


class Measured:
    """The steps of a dtype, measured one group at a time: up to `most` rounds in `share` seconds, but at least `FEWEST`."""

    def __init__(self, dtype: torch.dtype, sizes: Sizes, most: int, share: float, device: str = "cpu") -> None:
        self.case = str(dtype).removeprefix("torch.") + ("" if device == "cpu" else f", {device}")
        self.most, self.share, self.known = most, share, set[str]()
        self.steps = steps(sizes, dtype, device)
        self.timed = self.steps if device == "cpu" else {name: finished(step) for name, step in self.steps.items()}

    def eager(self) -> Iterator[Row]:
        yield from self._rows([name for name in self.steps if name not in COMPILED and self._runs(name)])

    def compiled(self, stop: float, expected: float) -> Iterator[Row]:
        """Rows of compiled steps. `expected`: the seconds that a compilation takes. None that would end after `stop` is started."""
        done = []
        for name in COMPILED:
            begun = time.monotonic()
            if begun + expected > stop:
                say(f"{self.case}: {name} is left out, for want of time (see --seconds)")
            elif self._runs(name):
                done.append(name)
                expected = time.monotonic() - begun
                say(f"{self.case}: {name} compiled in {expected:.0f} s")
                # as soon as there is one: the next compilation may not end in time
                yield from self._rows([*(other for other in COMPARED if other in self.steps and self._runs(other)), *done])
        self.compilation = expected

    def profiled(self, known: set[str]) -> Iterator[Row]:
        """Profiles of the steps that have rows, but did not when these were known."""
        for name in [name for name in self.steps if name in self.known - known]:
            found: list[Row] = []

            def profile(name: str = name, found: list[Row] = found) -> None:
                found += profiled("step", self.case, {name: self.steps[name]})

            if runs(f"{self.case}: the profile of {name}", profile, say):
                yield from found

    def _runs(self, name: str) -> bool:
        return runs(f"{self.case}: {name}", self.timed[name], say)

    def _rows(self, names: list[str]) -> Iterator[Row]:
        """Time these steps in turns: rows with the medians that are not known yet, and the ratios of pairs with such a step."""
        of = {name: self.timed[name] for name in names}
        few = min(self.most, FEWEST)
        samples = interleaved(of, rounds=few, calls=1)
        spent = sum(map(sum, samples.values())) / 1e6
        more = min(self.most - few, int((self.share - spent) / spent * few))
        if more > 0:
            samples = {name: samples[name] + values for name, values in interleaved(of, rounds=more, calls=1).items()}
        new = set(names) - self.known
        for name in sorted(new, key=names.index):
            low, middle, high = statistics.quantiles(samples[name], n=4)
            yield Row("step", self.case, name, "median", middle / 1e3, "ms")
            yield Row("step", self.case, name, "quartile spread", (high - low) / 1e3, "ms")
        for ours, rival in PAIRS:
            if {ours, rival} <= set(names) and {ours, rival} & new:
                ratios = [a / b for a, b in zip(samples[ours], samples[rival], strict=True)]
                for label, value in zip(("median", "95 % low", "95 % high"), interval(ratios), strict=True):
                    yield Row("step", self.case, ours, f"ratio to {rival}, {label}", value, "")
        self.known |= new


def say(line: str) -> None:
    print(f"bench step: {line}", file=sys.stderr, flush=True)


def measure(
    dtypes: Sequence[torch.dtype],
    sizes: Sizes,
    rounds: int,
    device: str = "cpu",
    seconds: float = SECONDS,
    profile: bool = False,
    part: str = "all",
) -> Iterator[Row]:
    """Rows as soon as they are measured. Each is also printed, when its reader is done with it, since the table is printed last."""
    stop = time.monotonic() + seconds

    def rows() -> Iterator[Row]:
        expected = seconds / 4  # until a compilation was timed
        of = [Measured(dtype, sizes, rounds, seconds / 20, device) for dtype in dtypes]
        for one in of if part != "compiled" else ():
            yield from one.eager()
            yield from one.profiled(set()) if profile else ()
        for one in of if part != "eager" else ():
            known = set(one.known)
            yield from one.compiled(stop, expected)
            yield from one.profiled(known) if profile else ()
            expected = one.compilation

    for row in rows():
        yield row
        say(f"{row.case}: {row.provider}, {row.metric}: {'unknown' if row.value is None else f'{row.value:.3f}'} {row.unit}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the step runs (default: %(default)s); a larger model on cuda",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="start no compilation that would end later (default: %(default)s)"
    )
    parser.add_argument("--part", choices=PARTS, default="all", help="steps without a compiler, or compiled ones (default: both)")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel of a step, on cuda")
    parser.add_argument("--mixture", action="store_true", help="a decoder with experts instead, against Hugging Face's Qwen3-MoE")


def run(
    device: str = "cpu", seconds: float = SECONDS, mixture: bool = False, profile: bool = False, part: str = "all"
) -> Iterator[Row]:
    """The rows, each as soon as it is measured."""
    if profile and device == "cpu":
        raise BenchError("--profile: expected --device cuda, whose kernels it times, got cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise NoDevice("--device: expected cpu, as there is no CUDA device, got cuda")
    if mixture:
        return moe_step.run(device=device)
    if device == "cuda":
        return measure([torch.bfloat16], LARGE, LARGE_ROUNDS, device, seconds, profile, part)
    return measure([torch.float32, torch.bfloat16], Sizes(), ROUNDS, device, seconds, part=part)
