"""Stages of torch.distributed.pipelining: the only file that imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from funcops.adapters.autograd.delayed import WgradStore, delayed_wgrad


class StageOfRank(PipelineStage):
    """A stage whose neighbours may be on its own rank, also with Gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """In torch 2.11, each stage first sends a tensor to its neighbours, even on its own rank, which Gloo refuses. Versions
        without this method do not call it."""
        rank = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != rank]


class SplitStage(StageOfRank):
    """The stage that `split_stage` makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.store = delayed_wgrad()
        super().__init__(*args, **kwargs | {"dw_builder": self.take})

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.store:
            return super().backward_one_chunk(*args, **kwargs)

    def take(self) -> Callable[[], None]:
        """Take the weight gradients that the last backward left; returns a function that runs them, once."""
        own = WgradStore()
        own.waiting, self.store.waiting = self.store.waiting, []
        return own.run
