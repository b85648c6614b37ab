"""Runs of examples/train_lm.py on several processes: `python four_ranks.py FOLDER < runs.json`. Each run is its name, its number
of processes, and its flags; runs go one after another. All exit codes are printed last."""

import functools
import json
import os
import socket
import sys
from pathlib import Path

from forked import codes
from programs import main_of


def rank(number, count, port, flags):
    """Run one rank with the variables that torchrun sets."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if ended := main_of("train_lm.py")(flags):
        sys.exit(ended)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main_of("train_lm.py")  # imported once, before the forks
    train_lm = sys.modules["train_lm"]
    train_lm.plot = train_lm.trigram_loss = lambda *_: 0.0  # what takes longer than the steps
    found = {}
    for name, count, flags in json.load(sys.stdin):
        port = free_port()
        calls = {f"{name}-{i}": functools.partial(rank, i, count, port, flags) for i in range(count)}
        found |= codes(calls, Path(sys.argv[1]))
    print(json.dumps(found))
