"""Ranks as threads, and a network stricter than any: the messages of a rank go one batch at a time, in the order in which it starts
them, and each batch waits until its peer has started the very same; what is on its way is NaN for its reader, and must not be
written to by its sender. Ranks that wait for each other raise at once."""

import threading
import types
import weakref
from collections import deque

import pytest
import torch

from funcops.adapters.pipelining import messages, pipeline


class Stuck(RuntimeError):
    """All ranks that still run wait."""


class _Stopped(BaseException):
    """Ends the other ranks once one has raised."""


class _Batch:
    def __init__(self, rank, ops):
        self.rank, self.peer = rank, ops[0].peer
        assert {op.peer for op in ops} == {self.peer}, "a batch has one peer"
        self.sends = [(op.tensor, op.tensor.clone()) for op in ops if op.op == "isend"]
        self.receives = [op.tensor for op in ops if op.op == "irecv"]
        for t in self.receives:
            t.fill_(float("nan") if t.is_floating_point() else 1)
        self.done = False


class Network:
    """Stands for torch.distributed in the package. `whole`: whether a batch has one work, as with NCCL, or each of its messages."""

    def __init__(self, size, whole):
        self.size, self.whole, self.rank = size, whole, threading.local()
        self.changed = threading.Condition()
        self.queues = [deque() for _ in range(size)]
        self.sums = [deque() for _ in range(size)]
        self.waiting, self.running, self.error = {}, size, None
        self.alive, self.most = [[] for _ in range(size)], [0] * size

    def module(self):
        return types.SimpleNamespace(
            isend="isend",
            irecv="irecv",
            P2POp=self._op,
            batch_isend_irecv=self._start,
            all_reduce=self._all_reduce,
            get_rank=lambda group=None: self.rank.value,
            get_world_size=lambda group=None: self.size,
        )

    def _op(self, op, tensor, group=None, group_peer=None):
        assert tensor.is_contiguous() and tensor.numel(), "memory that any backend takes"
        return types.SimpleNamespace(op=op, tensor=tensor, peer=group_peer)

    def _start(self, ops):
        rank, batch = self.rank.value, _Batch(self.rank.value, ops)
        with self.changed:
            self.alive[rank] = [one for one in self.alive[rank] if one() is not None]
            self.alive[rank] += [weakref.ref(t) for t, _ in batch.sends]
            self.most[rank] = max(self.most[rank], len(self.alive[rank]))
            self.queues[rank].append(batch)
            self._go_on()
        works = [types.SimpleNamespace(wait=lambda: self._wait(lambda: batch.done)) for _ in ops]
        return works[:1] if self.whole else works

    def _go_on(self):
        """Do the exchanges at the heads of two queues that name each other, until none is left."""
        again = True
        while again:
            again = False
            for queue in self.queues:
                if not queue or not self.queues[queue[0].peer] or self.queues[queue[0].peer][0].peer != queue[0].rank:
                    continue
                mine = queue.popleft()
                theirs = self.queues[mine.peer].popleft()
                again = True
                for a, b in ((mine, theirs), (theirs, mine)):
                    assert [(t.shape, t.dtype) for t, _ in a.sends] == [(t.shape, t.dtype) for t in b.receives], "the same batch"
                    for (t, before), into in zip(a.sends, b.receives, strict=True):
                        assert torch.equal(t, before), "what is on its way is left alone"
                        into.copy_(before)
                mine.done = theirs.done = True
        self.changed.notify_all()

    def _wait(self, ready):
        with self.changed:
            self.waiting[self.rank.value] = ready
            while not ready():
                self._check()
                if self.error is not None:
                    raise _Stopped
                self.changed.wait()
            del self.waiting[self.rank.value]

    def _check(self):
        if self.error is None and len(self.waiting) == self.running and not any(ready() for ready in self.waiting.values()):
            self.error = Stuck("all ranks that still run wait")
            self.changed.notify_all()

    def _all_reduce(self, tensor, group=None):
        slot = {}
        with self.changed:
            self.sums[self.rank.value].append((tensor, slot))
            if all(self.sums):
                every = [queue.popleft() for queue in self.sums]
                total = sum(t.clone() for t, _ in every)
                for t, one in every:
                    t.copy_(total)
                    one["done"] = True
                self.changed.notify_all()
        self._wait(lambda: "done" in slot)

    def leave(self, error):
        with self.changed:
            self.running -= 1
            self.waiting.pop(self.rank.value, None)
            if error is not None and self.error is None and not isinstance(error, _Stopped):
                self.error = error
            if self.running:
                self._check()
            self.changed.notify_all()


def on_threads(size, work, whole=False):
    """`work(rank)` on as many threads as ranks: what each gives, and the network. Raises what the first that fails raises."""
    network, found = Network(size, whole), [None] * size

    def run(rank):
        network.rank.value, error = rank, None
        try:
            found[rank] = work(rank)
        except BaseException as caught:
            error = caught
        network.leave(error)

    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, pipeline):
            patch.setattr(module, "dist", network.module())
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if network.error is not None:
        raise network.error
    return found, network
