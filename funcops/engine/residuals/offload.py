"""Offloading of tensors to the host's memory, overlapped with compute.

Each device has one stream for copies in both directions: an offload waits for the compute stream, and the compute stream waits for
a tensor to return. The memory that a copy reads is not reused before the copy is done (`record_stream`); host memory is pinned, and
torch's allocator caches it. `prefetch` prefetches a tree that a later backward will read.

Under capture, the copies are nodes in the order of the computation: a stream that does not join again would invalidate the capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import tracing
from funcops.engine.trees import tensors

__all__ = ["copies"]


class Copies:
    """The offloaded tensors and the prefetches in progress. A test replaces `copies` by an instance that records the order."""

    def __init__(self) -> None:
        self.home: dict[int, torch.device] = {}  # by the address of the host's copy: the device that it came from
        self.coming: dict[int, tuple[Tensor, Any]] = {}  # by the same address: the prefetched tensor, and the event of its copy
        self.elsewhere: dict[int, Callable[[], None]] = {}  # by the storage of a stand-in: what starts to read it from its place
        self._streams: dict[torch.device, Any] = {}

    def on_host(self, t: Tensor) -> Tensor:
        """Offload: a copy in pinned host memory, or the tensor itself on the CPU."""
        if not self.leaves(t):
            return t
        if t.is_meta:  # shapes alone, of which a report says the place
            return self.room(t)
        if not self.own_stream(t):
            return self.room(t).copy_(t, non_blocking=True)
        device = t.device
        side = self.side(device)
        side.wait_stream(self.current(device))
        with self.on(side):
            host = self.room(t).copy_(t, non_blocking=True)
        self.held_by(side, t)
        self.home[host.data_ptr()] = device
        # a later tensor may get this address, and must not be taken for the offloaded one
        for known in (self.home, self.coming):
            weakref.finalize(host.untyped_storage(), known.pop, host.data_ptr(), None)
        return host

    def begin(self, host: Tensor) -> None:
        """Start to copy an offloaded tensor back, unless that has started."""
        at = host.data_ptr()
        device = self.home.get(at)
        if device is None or at in self.coming:
            return
        side = self.side(device)
        with self.on(side):
            self.coming[at] = self.back(host, device), side.record_event()

    def on_device(self, host: Tensor, device: torch.device) -> Tensor:
        """The offloaded tensor back on its device, for the compute stream."""
        # without a stream of ours nothing was copied beside the computation, so there is nothing to wait for
        if not self._streams or not self.own_stream(host):
            return host.to(device, non_blocking=True)
        current = self.current(device)
        if self.home.get(host.data_ptr()) != device:  # such as a part or a copy of an offloaded tensor
            current.wait_stream(self.side(device))
            return self.back(host, device)
        self.begin(host)
        t, event = self.coming.pop(host.data_ptr())
        current.wait_event(event)
        self.held_by(current, t)
        return t

    def prefetch(self, tree: Any) -> None:
        """Prefetch all offloaded tensors of a tree."""
        for t in tensors(tree) if self.home or self.elsewhere else ():
            if t.is_cpu and self.own_stream(t):
                self.begin(t)
            elif t.is_meta and (start := self.elsewhere.get(t.untyped_storage()._cdata)):
                start()

    def leaves(self, t: Tensor) -> bool:
        return not t.is_cpu

    def own_stream(self, t: Tensor) -> bool:
        """Whether to copy `t` on the stream for copies."""
        # a tensor without elements has the address 0, which cannot be a key
        return t.numel() > 0 and not tracing() and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()

    def room(self, t: Tensor) -> Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        return host.to(device, non_blocking=True)

    def held_by(self, stream: Any, t: Tensor) -> None:
        t.record_stream(stream)

    def side(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)


copies = Copies()
