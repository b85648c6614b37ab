"""Runs of examples/train_lm.py on a tiny model."""

import csv
import functools

import programs

TINY = "--dim 32 --layers 2 --heads 2 --hidden 48 --context 32 --batch 2 --warmup 2 --eval-every 4 --sample 5".split()


run = functools.partial(programs.run, "train_lm.py")


def losses(folder):
    with (folder / "metrics.csv").open() as file:
        return [(row["step"], row["loss"], row["val_loss"], row["norm"]) for row in csv.DictReader(file)]
