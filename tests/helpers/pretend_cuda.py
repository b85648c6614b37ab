"""A pretended device: "cuda" means the CPU, and a stand-in for torch.cuda answers. It shows that code for a device runs to its end,
not that it is right there."""

import contextlib
import itertools

import torch
from torch.overrides import TorchFunctionMode

from funcops.engine.backend import backend


class _Here(TorchFunctionMode):
    """Tensors that would be made on the device are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*[_here(a) for a in args], **{name: _here(value) for name, value in (kwargs or {}).items()})


def _here(value):
    named = isinstance(value, str) and value.startswith("cuda")
    return "cpu" if named or (isinstance(value, torch.device) and value.type == "cuda") else value


class _Stream:
    device_type = "cuda"

    def wait_stream(self, other):
        pass

    wait_event = record_event = synchronize = wait_stream

    def is_capturing(self):
        return False


class _Event:
    """Each event is a second after the one before, so that a timer soon has enough calls."""

    ticks = itertools.count()

    def __init__(self, enable_timing=False):
        self.at = 0

    def record(self, stream=None):
        self.at = next(self.ticks)

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, _here(device))


class _Graph:
    def replay(self):
        pass

    reset = replay


@contextlib.contextmanager
def _block(*_, **__):
    yield


ANSWERS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "pretended",
    "synchronize": lambda *_: None,
    "Stream": _Stream,
    "current_stream": lambda *_: _Stream(),
    "set_stream": lambda _: None,
    "stream": _block,
    "device": _block,
    "Event": _Event,
    "CUDAGraph": lambda keep_graph=False: _Graph(),
    "graph": _block,
    "graph_pool_handle": lambda: (0, 1),
    "set_sync_debug_mode": lambda _: None,
    "_sleep": lambda _: None,
    "is_current_stream_capturing": lambda: False,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "reset_peak_memory_stats": lambda *_: None,
}


@contextlib.contextmanager
def pretended(monkeypatch, implementation):
    """Pretend a device in the block, which runs the kernels of this implementation."""
    with monkeypatch.context() as patch, backend(implementation), _Here():
        for name, answer in ANSWERS.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: _Stream())  # which torch 2.15's optimisers ask
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch, "compile", lambda model, **_: model)
        yield
