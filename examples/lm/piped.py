"""The stages of a model on the ranks of a pipeline: each rank has its own stage's params."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops import ChainConfig, WithExtras, chain, chain_fwd, dist, models, random
from funcops.adapters.pipelining import Pipeline
from funcops.contract import Needs
from funcops.dist import Mesh, parallel
from funcops.low_precision import quantize_params
from funcops.models import DecoderConfig
from funcops.schedule import gpipe, one_f_one_b, zb_h1, zb_h2
from funcops.trees import leaves, tree_map_tensors
from lm.model import model, model_x
from lm.stages import joined, layers_of, split, staged


def roles(mesh: Mesh, decoder: DecoderConfig) -> dict[str, str]:
    """The roles of a model's steps on a mesh, for `parallel`. The vocabulary is not sharded: ranks along tp have their own rows."""
    alone = {role for role, axis in (("expert", "ep"), ("context", "cp")) if mesh[axis].size == 1}
    return {glob: role for glob, role in models.roles(decoder).items() if role not in alone | {"vocab"}}


SCHEDULES = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}

NEEDS = Needs(x=False)


class Stages:
    """The stages of a model on a mesh with several ranks along "pp", one stage on each."""

    def __init__(self, mesh: Mesh, args: Any) -> None:
        self.axis, self.cp, self.decoder, self.count = mesh["pp"], mesh["cp"], args.decoder, args.microbatches
        self.schedule = SCHEDULES[args.schedule](self.axis.size, self.count)
        whole = staged(args.decoder, self.axis.size, args.recipe, args.policy)
        self.cfg = parallel(whole, roles(mesh, args.decoder), mesh, overlap=args.overlap)
        self.name = self.cfg.steps[self.axis.rank].name
        self.pipeline: Pipeline | None = None

    @property
    def last(self) -> bool:
        return self.axis.rank == self.axis.size - 1

    def own(self, params: Any) -> dict[str, Any]:
        """The params of this rank's stage, from the whole model's."""
        return {self.name: split(params, self.decoder, self.axis.size)[self.name]}

    @property
    def layers(self) -> range:
        """The layers of this rank's stage."""
        return layers_of(self.decoder, self.axis.size)[self.axis.rank]

    def named(self, own: dict[str, Any]) -> dict[str, Any]:
        """The params of this rank's stage at the paths that they have in the whole model, with None for other stages' layers."""
        stage, first = own[self.name], self.layers.start
        return {**stage, "blocks": (*[None] * first, *stage["blocks"], *[None] * (self.decoder.layers - self.layers.stop))}

    def unnamed(self, named: dict[str, Any]) -> dict[str, Any]:
        return {self.name: {**named, "blocks": tuple(named["blocks"][i] for i in self.layers)}}

    def path(self, path: str) -> str:
        """The path in the whole model of a leaf of this rank's stage."""
        path = path.removeprefix(f"{self.name}.")
        if not path.startswith("blocks."):
            return path
        _, layer, rest = path.split(".", 2)
        return f"blocks.{self.layers.start + int(layer)}.{rest}"

    def whole(self, own: dict[str, Any]) -> dict[str, Any]:
        """The params of the whole model on every rank, as a sum in which each leaf is zero on all ranks but one."""
        like = next(t for t in leaves(own) if t is not None)
        stages = split(chain.init(model(self.decoder), device="meta", dtype=like.dtype), self.decoder, self.axis.size)
        mine = {
            name: own.get(name, tree_map_tensors(lambda t: torch.zeros_like(t, device=like.device), stages[name]))
            for name in stages
        }
        return joined(tree_map_tensors(lambda t: dist.finish(dist.sum_over_start(t, self.axis)), mine))

    def work(self, params: Any, dtype: torch.dtype, key: Tensor | None) -> Any:
        """The working tree of this rank's stage, whose names of layers, and so keys, begin anew: they are the stage's own."""
        key = None if key is None else random.fold_in(key, self.axis.rank)
        return quantize_params(params[self.name], self.cfg.steps[self.axis.rank].cfg, dtype=dtype, key=key)

    def inputs(self, x: Tensor, labels: Tensor, dtype: torch.dtype) -> WithExtras:
        return model_x(self.decoder, x, labels, dtype, self.cp)

    def loss_and_grads(
        self,
        params: Any,
        x: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        key: Tensor | None,
        shares: int,
        done: Callable[[Any], Any],
    ) -> tuple[Tensor, Any]:
        """The mean loss of these rows on the last rank, 0 on the others, and what `done` returns for the gradients of this rank's
        params. The gradients are scaled for a mean over `shares` times as many rows. `done` is called once the last gradient is
        computed, while other stages go on."""
        parts = zip(x.chunk(self.count), labels.chunk(self.count), strict=True)
        xs = [self.inputs(*part, dtype) for part in parts]
        if self.pipeline is None:
            group = self.axis.process_group()
            self.pipeline = Pipeline(self.schedule, self.cfg, xs[0], dtype=dtype, device=x.device, group=group, needs=NEEDS)
        zero = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=x.device)
        dys = [zero + 1 / (self.count * shares)] * self.count
        found: list[Any] = []
        losses, _, _, _ = self.pipeline.step(
            {self.name: self.work(params, dtype, key)},
            xs,
            dys,
            done=lambda _, dparams: found.append(done({self.name: dparams})),
            check_finite=False,
        )
        return zero if losses is None else torch.stack(losses).mean(), found[0]

    def once(self, params: Any, x: Tensor, labels: Tensor, dtype: torch.dtype, key: Tensor | None) -> tuple[Tensor, Any]:
        """This rank's computation for one microbatch, with zeros for received values: for a handshake."""
        x, labels = (t[: len(t) // self.count] for t in (x, labels))
        given, cfg = self._given(x, labels, dtype, x.new_zeros(*x.shape, self.decoder.dim, dtype=dtype))
        y, residuals = chain.fwd(self.work(params, dtype, key), given, cfg, needs=NEEDS)
        grads, _ = chain.bwd(residuals, torch.ones_like(y), cfg)
        return y.sum().to(torch.promote_types(dtype, torch.float32)), {self.name: grads}

    def _given(self, x: Tensor, labels: Tensor, dtype: torch.dtype, between: Tensor) -> tuple[WithExtras, ChainConfig]:
        """The input of this rank's stage, and its config."""
        cfg, extras = self.cfg.steps[self.axis.rank].cfg, self.inputs(x, labels, dtype).extras
        return WithExtras(between if self.axis.rank else x, {name: extras[name] for name in cfg.extras}), cfg

    def loss(self, params: Any, x: Tensor, labels: Tensor, dtype: torch.dtype, key: Tensor | None) -> Tensor:
        """The mean loss of these rows on the last rank, 0 on the others; the stages run one after another."""
        compute = self.work(params, dtype, key)
        between = torch.zeros(*x.shape, self.decoder.dim, dtype=dtype, device=x.device)
        y = between.new_zeros(())
        for turn in range(self.axis.size):
            if turn == self.axis.rank:
                given, cfg = self._given(x, labels, dtype, between)
                y, _ = chain_fwd(compute, given, cfg, needs=Needs.NONE)
            sent = between if self.last or turn != self.axis.rank else y
            between, _ = dist.shift.fwd(None, sent, dist.ShiftConfig(self.axis, by=1))
        return y if self.last else y.new_zeros(())
