"""One rank of a run of train_lm.py that torchrun starts: `killed_run.py FOLDER RANK STEP FLAG...`. On its first start, rank RANK
kills itself after STEP steps; each rank writes the peak of its tensors' bytes to FOLDER."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from programs import main_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at one time."""

    runs = True  # see funcops.engine.backend.declare.tracing

    def __init__(self):
        super().__init__()
        self.alive, self.total, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor:
                storage = t.untyped_storage()
                if storage._cdata not in self.alive or self.alive[storage._cdata][0].expired():
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.total += storage.nbytes()
        if self.total > self.peak:
            self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.total)
        return made


def measured(rank, step, flags, folder=None):
    """Run the program; return its exit code, and the peaks of the bytes until the first step and of the whole run."""
    main_of("train_lm.py")
    import train_lm

    train_lm.plot = train_lm.trigram_loss = lambda *_: 0.0  # what takes longer than the steps
    mode, until_first, advance = Bytes(), [], train_lm.Run.advance
    killed = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and os.environ.get("RANK") == str(rank)

    def counted(run):
        if not until_first:
            until_first.append(mode.peak)
        if killed and run.done == step:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(run)

    train_lm.Run.advance = counted
    with mode:
        code = train_lm.main(flags)
    return code, until_first[0], mode.peak


if __name__ == "__main__":
    folder, rank, step, *flags = sys.argv[1:]

    def main():
        code, *peaks = measured(int(rank), int(step), flags, Path(folder))
        (Path(folder) / f"peak.{os.environ['RANK']}").write_text(json.dumps(peaks))
        return code

    main_of("train_lm.py")  # which makes `lm` importable
    from lm.ranks import leave

    leave(main)
