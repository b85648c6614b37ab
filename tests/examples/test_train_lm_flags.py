"""The command line of train_lm: every flag is documented, and every mistake ends in one line without losing anything."""

import errno
import functools
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import check_picture

from funcops import CheckpointError, checkpoint, dist
from funcops.models.blocks import Sizes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_lm  # noqa: E402
from lm import flags, results  # noqa: E402
from lm.data import load_corpus, trigram_loss  # noqa: E402

TINY = "--dim 16 --layers 1 --heads 1 --hidden 16 --context 16 --batch 2 --warmup 1 --eval-every 2 --sample 5".split()
TEXT = ["--text", str(ROOT / "LICENSE")]
ONE_RANK = dist.Mesh.abstract({"dp": 1}, 0)
ACTIONS = [action for action in flags._parser()._actions if action.dest != "help"]


@functools.cache
def baseline_of(*lengths):
    text = load_corpus(TEXT[1], context=16)
    assert lengths == (len(text.train), len(text.held_out))
    return trigram_loss(text.train, text.held_out)


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """`train(*flags)` in an empty folder: the exit status and the output. The text is always the same, and pictures are tested
    elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_lm, "trigram_loss", lambda train, held_out: baseline_of(len(train), len(held_out)))
    monkeypatch.setattr(train_lm, "plot", lambda *_: None)

    def run(*given):
        try:
            code = train_lm.main([*TINY, *TEXT, *map(str, given)])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.option_strings[0])
def test_every_flag_has_a_text_a_default_and_a_group(action):
    assert action.help
    switch = action.nargs == 0
    assert switch or action.default is None or "%(default)s" in action.help
    assert switch or "(default: " in action.help or action.dest in ("text",)
    shown = flags._parser().format_help()
    assert action.option_strings[0] in shown and shown.count("\n\n") >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ("--tied",),
        ("--kv-heads", 1),
        ("--weight-decay", 0),
        ("--clip", 0.5),
        ("--seed", 3),
        ("--lr", 1e-4),
        ("--sample", 0),
        ("--device", "cpu"),
        ("--dtype", "bfloat16"),
        ("--recipe", "fp8_delayed"),
        ("--delay-wgrad",),
        ("--policy", "minimal"),
        ("--policy", "compress_fp8"),
        ("--policy", "offload_block_inputs"),
        ("--budget", 1),
        ("--stop-at", 1),
        ("--out", "here"),
        ("--optimizer", "muon"),
        ("--optimizer", "muon", "--tied"),
        ("--optimizer", "muon", "--experts", 3),
        ("--optimizer", "muon", "--recipe", "fp8_delayed"),
        ("--experts", 3, "--top-k", 1, "--shared", 2, "--balance", 0),
    ],
    ids=str,
)
def test_every_flag_trains(train, given):
    code, said = train("--steps", 2, *given)
    assert code == 0, said
    assert "kept for the backward: " in said and ("sample:" in said) == (given[0] not in ("--sample", "--stop-at"))
    if given[0] == "--policy":
        kept = re.search(rf"kept for the backward: ([\d.]+) KiB by default; policy {given[1]}: ([\d.]+) KiB$", said, re.M)
        assert 0 < float(kept[2]) < float(kept[1]), "bytes before and after"


def test_every_flag_is_tried():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_train_lm*.py"))
    assert not [action.dest for action in ACTIONS if not re.search(rf"{action.option_strings[0]}(?![\w-])", tests)]


# what else a flag takes, and what it does not take, than a number of at least 1
ZERO = ("--warmup", "--sample", "--weight-decay", "--seed", "--zero", "--balance")
NUMBERS = [action for action in ACTIONS if action.type in (int, float)]


@pytest.mark.parametrize("action", NUMBERS, ids=lambda a: a.option_strings[0])
def test_a_wrong_number_is_one_line_before_anything_starts(action, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (name,) = action.option_strings
    wrong = ["x", "", "nan", *(["inf", "1e400"] if name != "--budget" else ["1e-400"]), *(["1.5"] if action.type is int else [])]
    wrong += [str(2**63), str(-(2**64))] if name == "--seed" else ["-1"] + ["0"] * (name not in ZERO)
    for value in wrong:
        with pytest.raises(SystemExit) as end:
            flags.parse([f"{name}={value}"])
        said = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and name in said[-1] and said[-1].startswith("train_lm.py: error: "), (value, said)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_where_no_step_runs_is_one_line(train, monkeypatch):
    interrupt = train_lm.Interrupt()
    interrupt.asked = False
    interrupt.ask()
    with pytest.raises(KeyboardInterrupt):
        interrupt.ask()

    def asked(*_, **__):
        raise KeyboardInterrupt

    for place in ("load_corpus", "say_what_is_kept", "sample"):
        with monkeypatch.context() as patch:
            patch.setattr(train_lm, place, asked)
            code, said = train("--steps", 1, "--out", place)
        assert code == 130 and said.splitlines()[-1] == "train_lm.py: interrupted; earlier saves are unchanged"


def test_a_run_is_never_written_over_in_silence(train, tmp_path):
    assert train("--steps", 2)[0] == 0
    kept = (tmp_path / "runs/lm" / results.ONE).read_bytes()
    code, said = train("--steps", 2, "--out", "runs/lm")
    assert code == 2 and "--resume goes on with it, --force writes over it" in said.splitlines()[-1]
    assert train("--steps", 2, "--seed", 1)[0] == 0  # without --out: a folder of its own
    assert (tmp_path / "runs/lm" / results.ONE).read_bytes() == kept
    assert (tmp_path / "runs/lm-2" / results.ONE).exists()
    assert train("--steps", 4, "--stop-at", 3, "--out", "runs/lm", "--force")[0] == 0
    assert (tmp_path / "runs/lm" / results.ONE).read_bytes() != kept
    assert train("--steps", 4, "--resume", "--out", "runs/lm")[0] == 0
    code, said = train("--steps", 2, "--seed", 1, "--resume")  # the latest
    assert code == 0 and "runs/lm-2" in said
    assert train("--resume", "--force")[0] == 2


def test_resume_names_the_flag_that_differs(train):
    assert train("--steps", 4, "--stop-at", 2)[0] == 0
    code, said = train("--steps", 9, "--resume")
    assert code == 2 and said.splitlines()[-1].startswith(
        "train_lm.py: --resume: expected --steps as in the checkpoint, '4', got '9'"
    )
    assert "--stop-at" in said.splitlines()[-1]
    code, said = train("--steps", 4, "--resume", "--seed", 1)
    assert code == 2 and "expected --seed as in the checkpoint, '0', got '1'" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"not a checkpoint" * 9, lambda b: b[:8] + b"x" + b[9:]]
)
def test_a_corrupt_checkpoint_is_one_line(train, tmp_path, damage):
    assert train("--steps", 4, "--stop-at", 2)[0] == 0
    path = tmp_path / "runs/lm" / results.ONE
    path.write_bytes(damage(path.read_bytes()))
    code, said = train("--steps", 4, "--resume")
    assert code == 2 and "--resume: expected a checkpoint of this program, got 'runs/lm/" in said.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_named_before_training(train, tmp_path):
    (tmp_path / "file").touch()
    code, said = train("--out", "file/run")
    assert code == 2 and "--out: expected a folder that can be written to, got 'file/run'" in said.splitlines()[-1]
    assert "parameters" not in said


@pytest.mark.slow
def test_a_full_disk_loses_nothing(train, tmp_path, monkeypatch):
    assert train("--steps", 6, "--stop-at", 2)[0] == 0
    path = tmp_path / "runs/lm" / results.ONE
    kept = path.read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "save", full)
    code, said = train("--steps", 6, "--resume")
    assert code == 1 and path.read_bytes() == kept
    assert "step 4 is not saved: [Errno 28] No space left on device" in said and "held-out loss" in said
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert train("--steps", 6, "--resume")[0] == 0


def test_a_picture_that_cannot_be_written_is_one_line(train, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(train_lm, "plot", refuse)
    code, said = train("--steps", 2)
    assert code == 0 and "loss.png is not written: [Errno 13] Permission denied" in said
    assert (tmp_path / "runs/lm" / results.ONE).exists()


def test_the_picture_shows_finite_losses(tmp_path):
    from matplotlib import pyplot

    row = results.Row(1, 5.5, None, 0.0, 1.0, 0.1)
    results.plot(tmp_path, [row._replace(loss=float("nan"))], 2.0)
    assert not (tmp_path / "loss.png").exists()
    before = pyplot.get_fignums()
    results.plot(tmp_path, [row, row._replace(step=2, loss=9.0, val_loss=8.5)], 2.0)
    check_picture(tmp_path / "loss.png")
    assert pyplot.get_fignums() == before
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_a_sample_can_be_printed():
    assert results.text_of(torch.tensor(list(b"a\n\x00\x1b[31m\xff\xc3\xa9"))) == "a\n\\x00\\x1b[31m\\xffé"


def test_a_sample_is_printed_as_it_is_drawn():
    taken = []
    pieces = results.texts(taken.append(byte) or torch.tensor([byte]) for byte in "aé".encode())
    assert (next(pieces), len(taken)) == ("a", 1) and (next(pieces), len(taken)) == ("", 2)
    assert list(pieces) == ["é", ""]


def test_compiling_comes_before_the_clock_and_leaves_no_trace(train, monkeypatch, tmp_path):
    assert train("--steps", 2)[0] == 0
    waited = []

    def compiler(step, **_):
        def compiled(*given):
            waited.append(len(waited))
            return step(*given)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    code, said = train("--steps", 2, "--compile")
    assert code == 0 and said.index("compiling the step") < said.index("compiled in") < said.index("step 2:")
    assert len(waited) == 3, "once before the clock, then once a step"
    rows = [(tmp_path / run / "metrics.csv").read_text().splitlines()[1:] for run in ("runs/lm", "runs/lm-2")]
    for eager, compiled in zip(*rows, strict=True):
        assert float(compiled.split(",")[1]) == pytest.approx(float(eager.split(",")[1]), rel=1e-6)


@pytest.mark.parametrize(
    ("found", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_dtype_auto_is_bfloat16_where_the_cpu_has_instructions_for_it(found, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert flags.parse(["--dtype", "auto"]).dtype is dtype
    assert flags.parse(["--dtype", "auto", "--dtype", "float64"]).dtype is torch.float64
    assert flags._quick_dtype(torch.device("meta")) is torch.float32


def many_of(folder, step):
    dist.save({"x": torch.ones(1), "run": {"step": str(step), "settings": "{}", "rows": "[]"}}, folder, {}, ONE_RANK)


LEFT = {  # what a kill can leave of the folder of several processes, when one process goes on: its step, and how
    "nothing": lambda folder: shutil.rmtree(folder),
    "the folder": lambda folder: None,
    "a part, not yet renamed": lambda folder: folder.rename(folder.with_name(f".{folder.name}.{'a' * 16}.part")),
    "the folder, of which a shard is deleted": lambda folder: (folder / "__0_0.distcp").unlink(),
    "the folder, of which the index is deleted": lambda folder: (folder / ".metadata").unlink(),
}


@pytest.mark.parametrize("later", ["one", "many"])
@pytest.mark.parametrize("left", LEFT)
def test_the_later_of_two_checkpoints_goes_on(tmp_path, left, later):
    """One process's file and what a kill has left of several processes' folder, in both orders."""
    one, many, now = tmp_path / results.ONE, tmp_path / results.MANY, time.time_ns()
    one.touch()
    many_of(many, 1)
    for path, at in ((one, now + 10**9 * (later == "one")), (many / ".metadata", now + 10**9 * (later == "many"))):
        os.utime(path, ns=(at, at))
    LEFT[left](many)
    os.utime(many if many.exists() else tmp_path, ns=(now + 10**10,) * 2)  # a deletion is later than both
    there = dist.is_saved(many)
    assert there == (left != "nothing" and "index" not in left)
    assert (there and results._newer(many, one)) == (later == "many" and there)


BROKEN = [{"rows": text} for text in ("[" * 100_000, "3", "[3]", "[[1]]", "{}x", "null")]
BROKEN += [{"settings": text} for text in ("[]", "null", "3")] + [{"step": text} for text in ("", "x", "1.5")]


@pytest.mark.parametrize("change", BROKEN, ids=lambda one: f"{one!r:.30}")
def test_broken_metadata_is_one_line(train, tmp_path, change):
    folder = tmp_path / "runs" / "lm"
    folder.mkdir(parents=True)
    metadata = {"step": "1", "settings": "{}", "rows": "[]"} | change
    checkpoint.save({"w": torch.ones(1)}, folder / results.ONE, metadata=metadata)
    code, said = train("--steps", 4, "--resume")
    assert code == 2 and "--resume: expected " in said.splitlines()[-1], said


def test_a_folder_that_may_not_be_replaced_does_not_end_the_run(train, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise CheckpointError("save: path must be new, an empty folder, or the folder of a checkpoint, got notes.txt")

    monkeypatch.setattr(results, "save", refused)
    code, said = train("--steps", 2)
    assert code == 1 and "step 2 is not saved: save: path must be new" in said and "held-out loss" in said


def test_the_decoder_of_benchmarks_has_its_defaults():
    said = {action.dest: action.default for action in ACTIONS}
    assert {name: said[name] for name in Sizes._fields if name in said} == {n: v for n, v in Sizes()._asdict().items() if n in said}
    assert set(Sizes._fields) - said.keys() == {"vocab"}  # bytes
