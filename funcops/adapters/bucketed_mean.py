"""`BucketedMean`: gradients averaged over data-parallel processes, in buckets, during the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import require
from funcops.engine.trees import tensors


class BucketedMean:
    """Averages tensors over the processes of `group`, in place.

        mean = BucketedMean()
        run(schedule, params, xs, cfg, done=lambda stage, dparams: mean.start(dparams))
        mean.wait()

    `start` sends each bucket of `bucket_bytes` as soon as it is full and does not wait; `wait` sends the rest, and returns when
    every tensor holds its mean. All processes must start the same tensors in the same order.
    """

    def __init__(self, group: Any = None, *, bucket_bytes: int = 25 * 2**20) -> None:
        require(bucket_bytes > 0, "BucketedMean", "bucket_bytes", "above 0", bucket_bytes)
        self.group, self.bucket_bytes = group, bucket_bytes
        self._filling: dict[torch.dtype, list[Tensor]] = {}
        self._sent: list[tuple[list[Tensor], Tensor, Any]] = []

    def start(self, tree: Any) -> None:
        """Add every tensor of the tree. Do not write to these tensors until `wait` returns."""
        for t in tensors(tree):
            bucket = self._filling.setdefault(t.dtype, [])
            bucket.append(t)
            if sum(one.nbytes for one in bucket) >= self.bucket_bytes:
                self._send(t.dtype)

    def wait(self) -> None:
        """Wait until all tensors that were started hold their means. Raises the errors of torch.distributed, such as a timeout."""
        import torch.distributed as dist

        for dtype in list(self._filling):
            self._send(dtype)
        size = dist.get_world_size(self.group)
        while self._sent:
            bucket, flat, work = self._sent.pop(0)
            work.wait()
            flat.div_(size)
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view_as(t))

    def _send(self, dtype: torch.dtype) -> None:
        import torch.distributed as dist

        bucket = self._filling.pop(dtype)
        flat = torch.cat([t.reshape(-1) for t in bucket])
        self._sent.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
