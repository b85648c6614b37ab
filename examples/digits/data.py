"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, the UCI test set of optical recognition. They come with the package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcops import random

SIDE, CLASSES, HELD_OUT = 8, 10, 360


class Digits(NamedTuple):
    """Images [N, 1, 8, 8], float32 from -1 to 1, and their digits, int64 [N]; held-out images are not among the others."""

    images: Tensor
    labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor


class MissingPackage(Exception):
    """scikit-learn is not installed."""


def load() -> Digits:
    """The digits in a fixed random order, the last 360 held out. Raises `MissingPackage` without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackage("expected scikit-learn, for its digits: pip install 'funcops[examples]'") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.argsort(random.uniform(random.key(0), (len(labels),)))
    x = (torch.from_numpy(images).float() / 8 - 1).reshape(-1, 1, SIDE, SIDE)[order]
    y = torch.from_numpy(labels).long()[order]
    return Digits(x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:])


def rows(digits: Digits, step: int, size: int) -> Tensor:
    """The indices of the images in a step's batch: a pure function of the step."""
    drawn = random.uniform(random.fold_in(random.key(1), step), (size,))
    return (drawn * len(digits.labels)).long()
