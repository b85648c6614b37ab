"""Text for a byte-level language model: reading it, holding a part out, and the bytes of batch number n.

    corpus = load_corpus(None, context=256)             # the standard library's sources, or a file or folder
    x, y = batch(corpus.train, step=7, seed=0, size=16, context=256)
    x, y = windows(corpus.held_out, count=64, context=256)
    trigram_loss(corpus.train, corpus.held_out)         # nats per byte of a table of counts

A vocabulary of 256 needs no tokenizer: text is a uint8 tensor [N]. B rows, T bytes of context; x, y: int64 [B, T],
and y is x one byte later.

Held out is decided by file, never by a position within one, so that no held-out byte has its neighbours in training:
the files are ordered by a hash of their path relative to the folder, and the first tenth (at least one) is held out.
A single file has no such split: its last tenth is held out.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # one in ten files, or bytes
SEPARATOR = b"\0"  # between files; text has none, so it says "a file ends here"
OTHERS_CODE = {"site-packages", "dist-packages"}
TEST_CODE = {"test", "tests", "idle_test"}  # more than half of the bytes, and much of it literal test data


class TextError(ValueError):
    """The given text cannot be trained on."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out text."""

    source: str  # where it came from, for the log
    train: Tensor  # uint8 [N]
    held_out: Tensor  # uint8 [M]
    train_files: tuple[str, ...]  # relative to the folder; empty if a single file was split
    held_out_files: tuple[str, ...]


def load_corpus(text: str | Path | None = None, *, context: int) -> Corpus:
    """Text from a file, a folder, or, by default, from the running interpreter's standard library.

    Both parts hold at least one window of `context` + 1 bytes, or a TextError says which does not.
    """
    if text is None:
        corpus = _standard_library()
    else:
        path = Path(text).expanduser()
        if not path.exists():
            raise TextError(f"--text: expected a file or a folder, got {str(text)!r}, which does not exist")
        corpus = _folder(path) if path.is_dir() else _one_file(path)
    for part, data in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(data) <= context:
            raise TextError(
                f"--text: expected at least {context + 1} bytes of {part} text (a context of {context} and the byte "
                f"after it), got {len(data)} from {corpus.source}: give a longer text or a shorter --context"
            )
    return corpus


def batch(data: Tensor, *, step: int, seed: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Batch number `step`: `size` windows at random positions in data [N]; x, y: int64 [B, T].

    A pure function of its arguments. A run resumed at step k draws what an uninterrupted one would have drawn, and a
    checkpoint needs no generator state.
    """
    number = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(number[:7], "big"))
    return _cut(data, torch.randint(len(data) - context, (size,), generator=generator), context)


def windows(data: Tensor, *, count: int, context: int) -> tuple[Tensor, Tensor]:
    """`count` windows evenly spread over data [N], the same ones at every call; x, y: int64 [B, T].

    Fewer if the text is short: windows never overlap.
    """
    room = len(data) - 1  # x and y are one byte apart
    count = max(1, min(count, room // context))
    return _cut(data, torch.arange(count) * (room - context) // max(1, count - 1), context)


def trigram_loss(train: Tensor, held_out: Tensor, *, strength: float = 4.0) -> float:
    """Nats per held-out byte, predicted from the two bytes before it by a table of counts of the training text.

    Each order is mixed with the next lower order, as if that one had been seen `strength` times more:

        p_0 = 1/256        p_n(c | h) = (count(h c) + strength * p_{n-1}(c | h without its first byte))
                                        / (count(h) + strength)
    """
    p = torch.full((max(0, len(held_out) - 2),), 1 / 256, dtype=torch.float64)
    for order in (1, 2, 3):
        counts = torch.bincount(_grams(train, order), minlength=256**order)
        seen = counts.view(-1, 256).sum(1)  # how often each history occurs
        gram = _grams(held_out, order)[3 - order :]  # every order predicts the same bytes: the third and on
        p = (counts[gram] + strength * p) / (seen[gram // 256] + strength)
    return -p.log().mean().item()


def _cut(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = data[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _grams(data: Tensor, order: int) -> Tensor:
    """Every run of `order` bytes as one number: int64 [N - order + 1]."""
    number = torch.zeros(max(0, len(data) - order + 1), dtype=torch.int64)
    for i in range(order):
        number = number * 256 + data[i : i + len(number)]
    return number


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in _walk(root, "*.py") if not (OTHERS_CODE | TEST_CODE) & set(f.relative_to(root).parts)]
    if len(files) < 2:
        raise TextError(
            f"--text: not given, and expected the standard library's *.py files in {str(root)!r}, got {len(files)} "
            "(is it installed as a zip, or as byte code only?): give --text PATH"
        )
    return _by_file(root, {f: _read(f) for f in files})


def _folder(root: Path) -> Corpus:
    texts = {f: data for f in _walk(root, "*") if _is_text(data := _read(f))}
    if not texts:
        raise TextError(f"--text: expected a folder with at least one text file, got {str(root)!r}, which has none")
    if len(texts) == 1:
        return _one_file(*texts)
    return _by_file(root, texts)


def _one_file(path: Path) -> Corpus:
    data = _read(path)
    if not data:
        raise TextError(f"--text: expected text, got {str(path)!r}, which is empty")
    end = len(data) - len(data) // HELD_OUT
    return Corpus(source=str(path), train=_bytes(data[:end]), held_out=_bytes(data[end:]), train_files=(), held_out_files=())


def _by_file(root: Path, texts: dict[Path, bytes]) -> Corpus:
    names = {f.relative_to(root).as_posix(): data for f, data in texts.items()}
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    held = max(1, len(order) // HELD_OUT)
    held_out, train = sorted(order[:held]), sorted(order[held:])
    return Corpus(
        source=str(root),
        train=_bytes(SEPARATOR.join(names[name] for name in train)),
        held_out=_bytes(SEPARATOR.join(names[name] for name in held_out)),
        train_files=tuple(train),
        held_out_files=tuple(held_out),
    )


def _walk(root: Path, pattern: str) -> Iterator[Path]:
    """Files below root, in the same order on every machine, without hidden files and files in hidden folders."""
    for path in sorted(root.rglob(pattern)):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def _is_text(data: bytes) -> bool:
    return bool(data) and b"\0" not in data[:8192]  # git's test for a binary file


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"--text: expected a readable file, got {str(path)!r}: {error.strerror}") from error


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
