"""Processes that share one import of torch, which takes longer than most of them run: forks of a process that has run nothing
yet."""

import faulthandler
import importlib
import os
import sys
import traceback

# what torch imports where it is first asked for, two seconds in every process
LATE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)


def codes(calls, folder):
    """The exit code of each call, by its name: all run at once, each in a fork of this process, and print to `NAME.out` and
    `NAME.err` in the folder."""
    for name in LATE:
        importlib.import_module(name)
    running = {name: os.fork() or _child(call, folder / name) for name, call in calls.items()}
    return {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in running.items()}


def _child(call, path):
    code = 1
    try:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(path.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
        faulthandler.enable()  # where a process was that torch or Gloo aborts
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of Gloo may still hold a tensor: Python's own end would not wait for it
