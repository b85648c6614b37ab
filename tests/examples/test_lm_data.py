"""examples/lm/data.py: the held-out text, batches that depend only on the step's number, and errors."""

import importlib.util
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "lm" / "data.py"
SPEC = importlib.util.spec_from_file_location("lm_data", PATH)
data = importlib.util.module_from_spec(SPEC)
sys.modules["lm_data"] = data
SPEC.loader.exec_module(data)


def text(corpus_part):
    return bytes(corpus_part.tolist())


def folder(root, count=25, size=300):
    """`count` files, each of its own letter, some in a sub-folder."""
    for i in range(count):
        path = root / ("sub" if i % 3 else ".") / f"{i:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([ord("A") + i]) * size)
    return root


def unigram_loss(train, held_out):
    p = (torch.bincount(train, minlength=256).double() + 1) / (len(train) + 256)
    return -p[held_out.long()].log().mean().item()


@pytest.fixture(scope="module")
def library():
    return data.load_corpus(context=256)


def test_folder_is_split_by_file(tmp_path):
    corpus = data.load_corpus(folder(tmp_path), context=16)
    assert len(corpus.held_out_files) == 2 and len(corpus.train_files) == 23
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    letters = [set(text(part)) - {0} for part in (corpus.train, corpus.held_out)]
    assert not letters[0] & letters[1] and len(letters[0] | letters[1]) == 25
    assert len(corpus.train) == 23 * 300 + 22 and len(corpus.held_out) == 2 * 300 + 1  # a separator between files


def test_split_depends_on_names_not_on_place_or_content(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first, second = data.load_corpus(folder(one), context=16), data.load_corpus(folder(two, size=500), context=16)
    assert first.held_out_files == second.held_out_files
    again = data.load_corpus(one, context=16)
    assert torch.equal(first.train, again.train) and torch.equal(first.held_out, again.held_out)


def test_two_files_leave_one_each(tmp_path):
    corpus = data.load_corpus(folder(tmp_path, count=2), context=16)
    assert len(corpus.train_files) == len(corpus.held_out_files) == 1


def test_binary_empty_and_hidden_files_are_left_out(tmp_path):
    folder(tmp_path, count=3)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "config").write_bytes(b"text")
    corpus = data.load_corpus(tmp_path, context=16)
    assert {*corpus.train_files, *corpus.held_out_files} == {"00.txt", "sub/01.txt", "sub/02.txt"}


@pytest.mark.parametrize("in_folder", [False, True])
def test_one_file_holds_out_its_last_tenth(tmp_path, in_folder):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(32, 127)) * 10 + b"\n")
    corpus = data.load_corpus(tmp_path if in_folder else str(file), context=16)
    assert text(corpus.train) + text(corpus.held_out) == file.read_bytes()
    assert len(corpus.held_out) == 95
    assert corpus.train_files == corpus.held_out_files == ()


def test_batch_is_a_function_of_its_step():
    train = torch.arange(5000).remainder(251).to(torch.uint8)
    one = [data.batch(train, step=k, seed=3, size=4, context=32) for k in range(6)]
    torch.manual_seed(99)  # the global generator plays no part
    for k in (5, 2, 0):
        x, y = data.batch(train, step=k, seed=3, size=4, context=32)
        assert torch.equal(x, one[k][0]) and torch.equal(y, one[k][1])
    x, y = one[0]
    assert x.shape == y.shape == (4, 32) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, (x + 1) % 251)
    assert not torch.equal(one[0][0], one[1][0])
    assert not torch.equal(one[0][0], data.batch(train, step=0, seed=4, size=4, context=32)[0])


def test_batch_reaches_both_ends():
    train = torch.arange(10, dtype=torch.uint8)
    x, y = data.batch(train, step=0, seed=0, size=200, context=8)
    assert set(x[:, 0].tolist()) == {0, 1} and set(y[:, -1].tolist()) == {8, 9}


@pytest.mark.parametrize(("length", "rows"), [(9, 1), (16, 1), (17, 2), (18, 2), (1000, 5)])
def test_windows_are_fixed_and_do_not_overlap(length, rows):
    held_out = torch.arange(length).remainder(251).to(torch.uint8)
    x, y = data.windows(held_out, count=5, context=8)
    assert x.shape == y.shape == (rows, 8)
    assert torch.equal(x, data.windows(held_out, count=5, context=8)[0])
    assert x[0, 0] == 0
    if rows > 1:
        assert y[-1, -1] == held_out[-1]  # spread over all of it
    if length < 251:
        assert len(set(y.flatten().tolist())) == y.numel()


def test_trigram_knows_a_cycle():
    cycle = torch.arange(6000).remainder(60).to(torch.uint8)
    assert data.trigram_loss(cycle, cycle[:600]) < 0.2 < math.log(60)


@pytest.mark.parametrize("held_out", [b"abr", b"abz", b"zzz", b"acadab"])
def test_trigram_is_its_formula(held_out):
    text = b"abracadabra, abracadabra"

    def p(history, c):
        seen = [text[i + len(history)] for i in range(len(text) - len(history)) if text[i:].startswith(history)]
        below = p(history[1:], c) if history else 1 / 256
        return (seen.count(c) + 4 * below) / (len(seen) + 4)

    expected = [-math.log(p(held_out[i - 2 : i], held_out[i])) for i in range(2, len(held_out))]
    loss = data.trigram_loss(*(torch.tensor(list(t), dtype=torch.uint8) for t in (text, held_out)))
    assert loss == pytest.approx(sum(expected) / len(expected))


@pytest.mark.slow
def test_library_and_its_baseline(library):
    assert len(library.train) > 3_000_000 and len(library.held_out) > 300_000
    assert not set(library.train_files) & set(library.held_out_files)
    assert not any("site-packages" in name or "test" in Path(name).parts for name in library.train_files)
    trigram = data.trigram_loss(library.train, library.held_out)
    assert 1.5 < trigram < 2.0 and trigram < unigram_loss(library.train, library.held_out) - 1


def refused(text_argument, message, context=16):
    with pytest.raises(data.TextError, match=f"^{re.escape(message)}"):
        data.load_corpus(text_argument, context=context)


def test_missing(tmp_path):
    path = str(tmp_path / "nothing")
    refused(path, f"--text: expected a file or a folder, got {path!r}, which does not exist")


def test_empty_file(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    refused(path, f"--text: expected text, got {str(path)!r}, which is empty")


def test_folder_without_text(tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    message = f"--text: expected a folder with at least one text file, got {str(tmp_path)!r}, which has none"
    refused(tmp_path, message)


def test_too_short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"0123456789" * 10)
    ending = f" from {path}: give a longer text or a shorter --context"
    ask = "--text: expected at least {} bytes of {} text (a context of {} and the byte after it), got {}"
    refused(path, ask.format(17, "held-out", 16, 10) + ending)
    refused(path, ask.format(257, "training", 256, 90) + ending, context=256)
    assert len(data.load_corpus(path, context=9).held_out) == 10


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users to keep apart")
def test_unreadable():
    """The superuser may read everything, so the test runs as another user."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret.txt"
        path.write_bytes(b"text")
        path.chmod(0)
        Path(folder).chmod(0o755)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            refused(path, f"--text: expected a readable file, got {str(path)!r}: Permission denied")
        finally:
            os.seteuid(user)


def test_unreadable_told_by_the_system(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_bytes(b"text")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    refused(path, f"--text: expected a readable file, got {str(path)!r}: Permission denied")


def test_no_library_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    where = f"--text: not given, and expected the standard library's *.py files in {str(tmp_path)!r}, got 0 "
    refused(None, where)
