"""Tensors that wait in the host's memory, and come and go while the device computes.

Copies run on a stream of their own, one a device, in both directions: what goes out waits for the stream that computes, and that
waits for what comes back. The memory that is copied from is not used again before its copy is done (`record_stream`); the host's is
pinned, and torch's allocator of it keeps it for the next one. `prefetch` begins to bring a tree back that a later backward will
read.

Under capture the copies are nodes in the order of the computation: a stream that is not waited for again would end the capture.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.trees import tensors


class Copies:
    """What has gone out and what is on its way back. A test puts one in place of `copies` that notes the order."""

    def __init__(self) -> None:
        self.home: dict[int, torch.device] = {}  # by the address of the host's copy: the device that it came from
        self.coming: dict[int, tuple[Tensor, Any]] = {}  # what has been asked for: the tensor, and the event of its copy
        self._streams: dict[torch.device, Any] = {}

    def on_host(self, t: Tensor) -> Tensor:
        """A copy in the host's memory, pinned; on the CPU the tensor itself."""
        if not self.leaves(t):
            return t
        if not self.own_stream(t):
            return self.room(t).copy_(t, non_blocking=True)
        device = t.device
        side = self.side(device)
        side.wait_stream(self.current(device))
        with self.on(side):
            host = self.room(t).copy_(t, non_blocking=True)
        self.held_by(side, t)
        self.home[host.data_ptr()] = device
        weakref.finalize(host.untyped_storage(), self._forget, host.data_ptr())
        return host

    def begin(self, host: Tensor) -> None:
        """Start to bring it back, where that has not begun."""
        at = host.data_ptr()
        device = self.home.get(at)
        if device is None or at in self.coming:
            return
        side = self.side(device)
        with self.on(side):
            self.coming[at] = self.back(host, device), side.record_event()

    def on_device(self, host: Tensor, device: torch.device) -> Tensor:
        """What went out, for the stream that computes."""
        if not self._streams or not self.own_stream(host):
            return host.to(device, non_blocking=True)
        current = self.current(device)
        if self.home.get(host.data_ptr()) != device:  # a part or a copy of what went out, perhaps
            current.wait_stream(self.side(device))
            return self.back(host, device)
        self.begin(host)
        t, event = self.coming.pop(host.data_ptr())
        current.wait_event(event)
        self.held_by(current, t)
        return t

    def prefetch(self, tree: Any) -> None:
        """Start to bring back all of a tree that went out."""
        for t in tensors(tree) if self.home else ():
            if t.is_cpu and self.own_stream(t):
                self.begin(t)

    def _forget(self, at: int) -> None:
        self.home.pop(at, None)
        self.coming.pop(at, None)

    def leaves(self, t: Tensor) -> bool:
        return not t.is_cpu

    def own_stream(self, t: Tensor) -> bool:
        """Whether a stream of its own serves."""
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
