"""The processes of a run that torchrun starts: each one's rows of a batch and part of the params, and their communication.

    --dp    rows of the batch, and with --zero parts of the optimiser's state, gradients and params
    --ep    some of the experts of each layer, and rows of the batch
    --pp    some of the layers
    --cp    some of the positions of a row
    --tp    a part of every projection, and rows of the batch between projections (sequence parallelism)

A process that runs alone is the only rank of a mesh of ones, and sends nothing. All ranks have the same seed and read the same
text; only the first one prints and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed
from torch import Tensor

from funcops import ChainConfig, CrossEntropyConfig, chain, dist, random
from funcops.dist import Axis, Mesh, Spec, parallel, specs_of
from funcops.models import DecoderConfig
from funcops.optim import AdamWState, balance, clip_by_global_norm
from funcops.trees import tensors, tree_map_tensors
from lm.model import init, model
from lm.piped import Stages, roles

AXES = ("pp", "dp", "ep", "cp", "tp")  # neighbours along the last axis are nearest to each other
IGNORED = CrossEntropyConfig().ignore_index
TIMEOUT = timedelta(minutes=5)


def sizes_of(args: Any) -> dict[str, int]:
    """The sizes of the mesh that the flags select; without --dp its size is what the others leave. Raises `ValueError`."""
    sizes = {name: getattr(args, name) for name in AXES}
    world, others = int(os.environ.get("WORLD_SIZE") or 1), math.prod(n for n in sizes.values() if n)
    sizes["dp"] = max(1, world // max(1, others)) if sizes["dp"] is None else sizes["dp"]
    for name, n in sizes.items():
        if n < 1:
            raise ValueError(f"--{name}: expected at least 1, got {n}")
    product = math.prod(sizes.values())
    said = " ".join(f"--{name} {n}" for name, n in sizes.items())
    if product != world:
        raise ValueError(f"{said}: expected a product of {world}, the number of processes that torchrun started, got {product}")
    args.microbatches = args.microbatches or (2 * sizes["pp"] if sizes["pp"] > 1 else 1)
    parts = sizes["dp"] * sizes["ep"] * sizes["tp"] * args.microbatches
    if args.batch % parts:
        said += f" --microbatches {args.microbatches}" if sizes["pp"] > 1 else ""
        raise ValueError(f"--batch: expected a multiple of {parts} ({said}), got {args.batch}")
    if not 1 <= sizes["pp"] <= args.layers:
        raise ValueError(f"--pp: expected 1 to {args.layers}, as there are --layers {args.layers}, got {sizes['pp']}")
    if args.context % (2 * sizes["cp"]) and sizes["cp"] > 1:
        raise ValueError(f"--context: expected a multiple of {2 * sizes['cp']}, twice --cp, got {args.context}")
    if (args.experts or 1) % sizes["ep"]:
        got = "none" if args.experts is None else args.experts
        raise ValueError(f"--experts: expected a multiple of --ep {sizes['ep']}, got {got}")
    for name in ("heads", "kv_heads", "hidden")[: 2 if args.experts and not args.shared else 3]:
        if getattr(args, name) % sizes["tp"]:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: expected a multiple of --tp {sizes['tp']}, got {getattr(args, name)}")
    return sizes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print nothing in this process, unless it is the first of its run."""
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("RANK") or 0):
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@contextlib.contextmanager
def started(args: Any) -> Iterator[Ranks]:
    """This process among those that torchrun started. All but the first print nothing."""
    if math.prod(args.mesh.values()) == 1:
        yield Ranks.one(args)
        return
    if args.device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(torch.distributed.rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # on one machine a restart finds the store of the start
        store = torch.distributed.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if args.device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    ranks = Ranks.of(Mesh.of(args.mesh, args.device.type), args)
    with contextlib.ExitStack() as stack:
        if not ranks.first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield ranks
    torch.distributed.barrier()  # no rank closes its connections while another one still reads
    torch.distributed.destroy_process_group()


def leave(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end the process with the code that it returns. One of several processes skips Python's own exit, which aborts
    if a thread of Gloo still holds a tensor; it prints the traceback of an error itself."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        sys.exit(main())
    try:
        code = main()
    except SystemExit as end:  # of a wrong flag, which is said already
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process among others, and its part of the model. `specs`: how the ranks hold each leaf of the params, by path; `like`: this
    rank's part of the params, before ZeRO; `stages`: given if the layers are sharded, too; `zero`: what ranks along "dp" also
    shard, 1: the optimiser's state, 2: gradients, 3: params; `within`: whether the backward itself sums over "dp"; `casts`: whether
    layers cast params to the dtype of products, one by one."""

    mesh: Mesh
    decoder: DecoderConfig
    model: ChainConfig
    specs: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    like: Any = None
    stages: Stages | None = None
    zero: int = 0
    within: bool = False
    casts: bool = False

    @staticmethod
    def of(mesh: Mesh, args: Any) -> Ranks:
        if mesh["pp"].size > 1:
            stages = Stages(mesh, args)
            specs = {path: spec for path, spec in specs_of(chain, stages.cfg).items() if path.startswith(f"{stages.name}.")}
            like = {stages.name: chain.init(stages.cfg, device="meta")[stages.name]}
            return Ranks(mesh, args.decoder, stages.cfg, specs, like, stages, args.zero)
        room = 1.0 if args.compile else None  # a compiled step has room for all tokens: its sizes cannot depend on the routing
        cfg = parallel(model(args.decoder, args.recipe), roles(mesh, args.decoder), mesh, overlap=args.overlap, capacity=room)
        like, recipe, dp, shared = chain.init(cfg, device="meta"), args.recipe, mesh["dp"], cfg
        within = args.zero == 3 or (dp.size > 1 and (recipe is None or not recipe.delayed))
        casts = within and (args.zero == 3 or recipe is None)  # else params come as `quantize_params` makes them
        dtype, grads = args.dtype if casts else None, torch.promote_types(args.dtype, torch.float32)
        if args.zero == 3:
            shared = dist.zero3(cfg, dp, dtype=dtype)
        elif within:
            shared = dist.data_parallel(cfg, dp, dtype=dtype, grad_dtype=grads, shard=args.zero > 0)
        return Ranks(mesh, args.decoder, shared, specs_of(chain, cfg), like, None, args.zero, within, casts)

    @staticmethod
    def one(args: Any) -> Ranks:
        return Ranks(Mesh.abstract(dict.fromkeys(AXES, 1), 0), args.decoder, model(args.decoder, args.recipe))

    def __post_init__(self) -> None:  # plain values, for torch.compile
        put, mesh = functools.partial(object.__setattr__, self), self.mesh
        put("alone", mesh.size == 1)
        put("first", mesh.rank == 0)
        put("groups", mesh["dp"].size * mesh["ep"].size * mesh["tp"].size)
        put("shares", mesh.size // mesh["pp"].size)
        put("cp", mesh["cp"] if mesh["cp"].size > 1 else None)

    alone: ClassVar[bool]
    first: ClassVar[bool]
    groups: ClassVar[int]  # into how many parts the rows of a batch are split
    shares: ClassVar[int]  # into how many parts its tokens are split
    cp: ClassVar[Axis | None]

    @property
    def group(self) -> int:
        """Which of the `groups` parts of a batch this rank has."""
        dp, ep, tp = (self.mesh[name] for name in ("dp", "ep", "tp"))
        return (dp.rank * ep.size + ep.rank) * tp.size + tp.rank

    def rows(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of a batch; `groups` must divide the number of rows."""
        return tuple(dist.zigzag(t.chunk(self.groups)[self.group], self.mesh["cp"]) for t in batch)

    def key(self, seed: int, step: int, device: Any) -> Tensor:
        """The random key of a step, another for each part of the tokens: ranks do not round alike."""
        drawn = random.fold_in(random.key(seed, device=device), step)
        part = self.group * self.mesh["cp"].size + self.mesh["cp"].rank
        return random.fold_in(drawn, part) if self.shares > 1 else drawn

    def padded(self, x: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], float]:
        """This rank's part of any number of rows, and how many rows it counts for: rows without labels only pad the parts."""
        missing = -len(x) % self.groups
        if missing:
            x = torch.cat((x, x[:1].expand(missing, -1)))
            labels = torch.cat((labels, torch.full_like(labels[:1], IGNORED).expand(missing, -1)))
        rows = self.rows(x, labels)
        counting = int((rows[1][:, 0] != IGNORED).sum()) if missing else len(rows[0])
        return rows, counting if self.cp is None else counting / self.cp.size

    def of_first(self, text: str) -> str:
        """The first rank's text, on all ranks."""
        data = text.encode() if self.first else b""
        sent = torch.zeros(int(self.total(len(data))), dtype=torch.int32)
        sent[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
        return bytes(self.summed(sent.to(self.mesh.device)).tolist()).decode()

    def total(self, value: float) -> float:
        """The sum of a number over all ranks, as a float."""
        return value if self.alone else float(self.summed(torch.tensor(value, dtype=torch.float64, device=self.mesh.device)))

    def summed(self, t: Tensor) -> Tensor:
        """The sum over all ranks."""
        for axis in self.mesh.axes:
            t = dist.finish(dist.sum_over_start(t, axis))
        return t

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank, so that all ranks decide alike."""
        return flag if self.alone else bool(self.summed(torch.tensor([float(flag)], device=self.mesh.device)))

    @functools.cached_property
    def summed_over(self) -> dict[str, tuple[Axis, ...]]:
        """The axes over which each gradient must be summed, by path."""
        dp, over = self.mesh["dp"], dist.sum_axes(self.like, self.specs, self.mesh)
        return {path: tuple(axis for axis in axes if axis != dp) if self.within else axes for path, axes in over.items()}

    def largest(self, amaxes: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The largest amaxes of delayed scaling over all ranks."""
        return dist.amaxes_over(amaxes, tuple(axis for axis in self.mesh.axes if axis.size > 1))

    def load_of_all(self, load: Tensor) -> Tensor:
        """The experts' load from the tokens of all ranks, which balancing needs; `load` is from this rank's tokens."""
        return load if self.alone else self.summed(load)

    def balanced(self, bias: Tensor, load: Tensor, rate: float) -> Tensor:
        """`optim.balance` of a router's bias, which is whole on this rank, or with `zero` 3 its part."""
        if self.zero < 3:
            return balance(bias, load, rate)
        moves = balance(bias.new_zeros(load.shape), load, rate)
        return bias + dist.own_shards(moves, self.mesh["dp"])

    def reduced(self, loss: Tensor, grads: Any) -> tuple[Tensor, Any]:
        """The mean loss of all rows and its gradients, from this rank's, whose sum may have started already."""
        if self.alone:
            return loss, grads
        flying = grads if isinstance(grads, dist.Reducing) else self.reduce_start(grads)
        return self.summed(loss.detach() / self.shares), dist.finish(flying)

    def reduce_start(self, grads: Any) -> dist.Reducing:
        """Start to sum the gradients of this rank's rows over the ranks."""
        shard = self.mesh["dp"] if self.zero in (1, 2) and not self.within else None
        return dist.reduce_start(grads, self.summed_over, shard=shard)

    def clip(self, grads: Any, most: float, *, in_place: bool) -> tuple[Any, Tensor]:
        """`clip_by_global_norm` with the norm of the whole gradients, on this rank's parts."""
        if self.alone:
            return clip_by_global_norm(grads, most, in_place=in_place)
        over = tuple(self.mesh[name] for name in ("pp", "dp")[: 2 if self.zero else 1])
        norm = dist.global_norm(grads, over, dist.part_axes(self.like, self.specs, self.mesh))
        return clip_by_global_norm(grads, most, in_place=in_place, norm=norm)

    def shards(self, params: Any) -> Any:
        """The part of its params that this rank updates."""
        return dist.own_shards(params, self.mesh["dp"]) if self.zero in (1, 2) else params

    def gathered(self, shards: Any, like: Any) -> Any:
        """The params, gathered from the parts that each rank has updated."""
        return dist.finish(dist.gather_shards_start(shards, like, self.mesh["dp"])) if self.zero in (1, 2) else shards

    @functools.cached_property
    def held(self) -> Mapping[str, Spec]:
        """How the ranks hold each leaf of the params between steps."""
        return dist.fsdp_specs(self.like, self.specs, self.mesh) if self.zero == 3 else self.specs

    def init(self, args: Any, dtype: torch.dtype) -> Any:
        """This rank's part of one process's params; it draws no other."""

        def make() -> Any:
            whole = init(args.decoder, seed=args.seed, dtype=dtype)
            return whole if self.stages is None else self.stages.own(whole)

        return tree_map_tensors(lambda t: t.to(args.device), make() if self.alone else dist.init_tree(make, self.held, self.mesh))

    def kept(self, params: Any, state: AdamWState) -> tuple[Any, dict[str, Spec]]:
        """This rank's parts of params and state at the paths of one process's, and their specs."""
        means: Mapping[str, Spec] = dist.fsdp_specs(self.like, self.specs, self.mesh) if self.zero else self.specs
        named, path = (self.stages.named, self.stages.path) if self.stages is not None else (lambda tree: tree, lambda path: path)
        specs = {f"params.{path(leaf)}": spec for leaf, spec in self.held.items()}
        for name in ("exp_avg", "exp_avg_sq"):
            specs |= {f"state.{name}.{path(leaf)}": spec for leaf, spec in means.items()}
        return {"params": named(params), "state": AdamWState(state.step, named(state.exp_avg), named(state.exp_avg_sq))}, specs

    def unkept(self, tree: Any) -> tuple[Any, AdamWState]:
        """Params and state from what `kept` returned."""
        back, state = self.stages.unnamed if self.stages is not None else lambda tree: tree, tree["state"]
        return back(tree["params"]), AdamWState(state.step, back(state.exp_avg), back(state.exp_avg_sq))

    def own(self, params: Any, zero: bool = True) -> Any:
        """This rank's part of one process's params."""
        if self.alone:
            return params
        params = dist.shard(params if self.stages is None else self.stages.own(params), self.specs, self.mesh)
        return dist.own_shards(params, self.mesh["dp"]) if zero and self.zero == 3 else params

    def whole(self, params: Any, zero: bool = False) -> Any:
        """One process's params, gathered from every rank's part; all ranks must call it."""
        if self.alone:
            return params
        if zero or self.zero == 3:
            params = dist.finish(dist.gather_shards_start(params, self.like, self.mesh["dp"]))
        params = dist.unshard(params, self.specs, self.mesh)
        return params if self.stages is None else self.stages.whole(params)

    def own_state(self, state: AdamWState) -> AdamWState:
        """This rank's part of the optimiser's state, from the state for all params."""
        means = [self.own(tree, zero=False) for tree in (state.exp_avg, state.exp_avg_sq)]
        if self.zero:
            means = [dist.own_shards(tree, self.mesh["dp"]) for tree in means]
        return AdamWState(state.step[: len(tensors(means[0]))].clone(), *means)
