"""`graph_memory`: the memory that a captured function will hold, from a run without a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.errors import require_callable, size_of
from funcops.engine.trees import tensors

BLOCK = 512  # bytes: torch's allocator rounds each tensor's memory up to a multiple


class GraphMemory(NamedTuple):
    """Bytes of the buffers for copied inputs; of the outputs; and of the workspace, which is the most that a call holds besides."""

    inputs: int
    outputs: int
    workspace: int

    @property
    def pool(self) -> int:
        """The most that the graph's pool holds at once: outputs and workspace."""
        return self.outputs + self.workspace

    def __str__(self) -> str:
        return f"inputs {size_of(self.inputs)}, outputs {size_of(self.outputs)}, workspace {size_of(self.workspace)}"


def graph_memory(fn: Callable[..., Any], *examples: Any) -> GraphMemory:
    """Run `fn(*examples)` once and return the memory that `graphed(fn, *examples)` will hold for a slot: on a device, its pool will
    hold as much, rounded up to the allocator's segments. Raises `TypeError` if `fn` is not callable.

    >>> import torch
    >>> from funcops.graphs import graph_memory
    >>> graph_memory(lambda x: (x.double() + 1).float(), torch.ones(1024))
    GraphMemory(inputs=4096, outputs=4096, workspace=12288)
    """
    require_callable("graph_memory", fn=fn)
    inputs = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(examples)}
    with torch.no_grad(), _Peak() as peak:
        result = fn(*examples)
    outputs = {t.untyped_storage()._cdata: _rounded(t) for t in tensors(result) if t.untyped_storage()._cdata in peak.alive}
    held = sum(outputs.values())
    return GraphMemory(sum(inputs.values()), held, max(peak.most, held) - held)


def _rounded(t: torch.Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // BLOCK) * BLOCK


class _Peak(TorchDispatchMode):
    """The most memory of tensors made under it that are alive at once."""

    runs = True  # it runs every operator unchanged, so kernels need not be opaque

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for t in tensors(out):
            key = t.untyped_storage()._cdata
            if key not in given and key not in self.alive:
                self.alive[key] = StorageWeakRef(t.untyped_storage()), _rounded(t)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out
