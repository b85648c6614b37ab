"""The promises of examples/train_lm.py, on a tiny model and a small text."""

import csv
import gzip
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import torch
from programs import check_picture
from train_runs import TINY, losses, run

from funcops.engine.backend import backend
from funcops.engine.trees import paths, tensors, tree_map_tensors
from funcops.optim import adamw_init, adamw_update, muon_init, muon_update, partition

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes() * 5)
    return path


def test_trains_and_leaves_its_results(text, tmp_path):
    said = run(*TINY, "--text", text, "--steps", 12, "--out", tmp_path)
    assert "mlp.act.x" in said and "baseline" in said and "sample:" in said
    rows = losses(tmp_path)
    assert len(rows) == 12 and float(rows[-1][1]) < float(rows[0][1])
    programs.check_picture(tmp_path / "loss.png")


WATCHED = ["", "--recipe fp8_block --hidden 64", "--recipe fp8_delayed --hidden 64 --graph"]
WATCHED += ["--experts 4", "--tied --policy minimal", "--compile", "--experts 4 --dim 64 --hidden 64 --recipe fp8_block"]


def seen_of(folder):
    with (folder / "watch.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_resumed_run_goes_on_with_its_picture(text, tmp_path):
    given = (*TINY, "--text", text, "--steps", 6, "--sample", 0, "--watch", 2, "--out", tmp_path)
    run(*given, "--stop-at", 4)
    first = seen_of(tmp_path)
    run(*given, "--resume")
    assert seen_of(tmp_path)[: len(first)] == first and {row["step"] for row in seen_of(tmp_path)} == {"2", "4", "6"}


@pytest.mark.turns("how", every=7)
@pytest.mark.parametrize("how", WATCHED)
def test_a_run_that_is_watched_prints_its_values_and_keeps_its_losses(text, tmp_path, how):
    given = (*TINY, "--text", text, "--steps", 4, "--sample", 0, *how.split())
    said = run(*given, "--out", tmp_path / "watched", "--watch", 2)
    lines = re.findall(r"step (\d): (\|y\| of each block \S+ \S+; \|dx\| \S+ \S+|largest update over weight|gradient noise)", said)
    names = ["|y|", "largest", *(["gradient"] * ("--tied" not in how))]
    assert [(step, line.split()[0]) for step, line in lines] == [(step, name) for step in "24" for name in names]
    assert len(re.findall(r"largest rounding error of (x|w|dy|rows), blocks\.", said)) == 6 * ("--recipe" in how)
    picture = (tmp_path / "watched" / "watch.svg").read_text()
    shown = {"noise scale", "update over weight", *(["error", "underflow", "saturated", "amax"] * ("--recipe" in how))}
    assert picture.startswith("<?xml") and all(f"<!-- {what} -->" in picture for what in shown)
    rows = seen_of(tmp_path / "watched")
    assert {row["step"] for row in rows} == {"2", "4"} and shown - {"noise scale"} <= {row["what"] for row in rows}
    operands = {row["where"].split()[0] for row in rows if row["what"] == "error"}
    assert operands == ({"x", "w", "dy", *(["rows"] if "--experts" in how else [])} if "--recipe" in how else set())
    run(*given, "--out", tmp_path / "plain")
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")


@pytest.fixture(scope="module")
def fifty(text, tmp_path_factory):
    """The losses of 50 steps."""
    folder = tmp_path_factory.mktemp("fifty")
    run(*TINY, "--text", text, "--steps", 50, "--out", folder)
    assert len(losses(folder)) == 50
    return losses(folder)


@pytest.mark.slow
def test_delayed_wgrad_gives_the_same_bits(text, fifty, tmp_path):
    run(*TINY, "--text", text, "--steps", 50, "--out", tmp_path, "--delay-wgrad")
    assert losses(tmp_path) == fifty


@pytest.mark.slow
def test_resume_gives_the_same_bits(text, fifty, tmp_path):
    said = run(*TINY, "--text", text, "--steps", 50, "--out", tmp_path, "--stop-at", 25)
    assert "stopped after step 25" in said
    run(*TINY, "--text", text, "--steps", 50, "--out", tmp_path, "--resume")
    assert losses(tmp_path) == fifty


@pytest.mark.slow
def test_a_run_with_muon_goes_on_and_is_delayed_captured_and_compiled(text, tmp_path):
    """With the same bits, or to the rounding of a compiler. A run of one optimiser does not go on with the other. One layer has
    matrices of every shape; a second takes a compiler half a minute."""
    plain = *TINY, "--layers", 1, "--text", text, "--steps", 8
    muon = *plain, "--optimizer", "muon"
    run(*muon, "--out", tmp_path / "a")
    run(*muon, "--out", tmp_path / "b", "--stop-at", 3)
    said = run(*plain, "--out", tmp_path / "b", "--resume", code=2)
    assert "--resume: expected --optimizer as in the checkpoint, 'muon', got 'adamw'" in said
    run(*muon, "--out", tmp_path / "b", "--resume")
    run(*muon, "--out", tmp_path / "c", "--delay-wgrad", "--policy", "minimal")
    exact = losses(tmp_path / "a")
    assert losses(tmp_path / "b") == exact == losses(tmp_path / "c")
    for how in ("--graph", "--compile"):
        run(*muon, "--out", tmp_path / how, how)
        for row, want in zip(losses(tmp_path / how), exact, strict=True):
            assert float(row[1]) == pytest.approx(float(want[1]), rel=2e-3)
    run(*plain, "--out", tmp_path / "adamw")
    assert losses(tmp_path / "adamw")[0] == exact[0] and losses(tmp_path / "adamw")[2] != exact[2]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_with_its_state_in_8_bits_goes_on_and_is_captured(text, tmp_path, optimizer):
    """With the same bits; its losses are near the losses of 32 bits, and a run of one kind does not go on with the other."""
    given = *TINY, "--optimizer", optimizer, "--text", text, "--steps", 8, "--dim", 64, "--hidden", 96
    run(*given, "--out", tmp_path / "wide")
    coded = *given, "--eight-bit-state"
    run(*coded, "--out", tmp_path / "a")
    run(*coded, "--out", tmp_path / "b", "--stop-at", 3)
    said = run(*given, "--out", tmp_path / "b", "--resume", code=2)
    assert "--resume: expected --eight-bit-state as in the checkpoint, 'True', got 'False'" in said
    run(*coded, "--out", tmp_path / "b", "--resume")
    run(*coded, "--out", tmp_path / "g", "--graph")
    exact, wide = losses(tmp_path / "a"), losses(tmp_path / "wide")
    assert losses(tmp_path / "b") == exact and exact[0] == wide[0] and exact[-1] != wide[-1]
    for row, want in zip(losses(tmp_path / "g"), exact, strict=True):
        assert float(row[1]) == pytest.approx(float(want[1]), rel=2e-3)
    for row, want in zip(exact, wide, strict=True):
        assert float(row[1]) == pytest.approx(float(want[1]), rel=2e-2)


def test_each_param_is_updated_by_its_own_optimiser(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from lm.flags import parse
    from lm.model import init
    from lm.optimiser import first_state, optimiser_of, update

    args = parse([*TINY, "--optimizer", "muon", "--check"])
    params = init(args.decoder, seed=0, dtype=torch.float64)
    grads = tree_map_tensors(torch.ones_like, params)
    o = optimiser_of(args, params)
    new, state = update(params, grads, first_state(params, o), o, lr=args.lr / 2, in_place=False)
    matrices, momentum = muon_update(
        *(partition(t, o.matrices)[0] for t in (params, grads)),
        state_of(params, o),
        o.muon,
        lr=args.lr / 2,
        decay=partition(o.decay, o.matrices)[0],
    )
    whole, _ = adamw_update(params, grads, adamw_init(params, o.adamw), o.adamw, lr=args.lr / 2, decay=o.decay)
    of_muon = {path for path, flag in paths(o.matrices).items() if flag}
    assert of_muon == {path for path in paths(params) if re.search(r"^blocks.*(qkv|out|up|down).*weight$", path)}
    for path, t in paths(new).items():
        assert t is None or torch.equal(t, paths(matrices if path in of_muon else whole)[path]), path
    assert all(map(torch.equal, tensors(momentum), tensors(state["muon"])))


def state_of(params, o):
    return muon_init(partition(params, o.matrices)[0], o.muon)


@pytest.mark.slow
def test_policies_change_bytes_and_not_losses(text, tmp_path):
    run(*TINY, "--text", text, "--steps", 4, "--out", tmp_path / "a")
    said = run(*TINY, "--text", text, "--steps", 4, "--out", tmp_path / "b", "--policy", "minimal", "--delay-wgrad")
    assert re.search(r"kept for the backward: \d+\.\d\d KiB by default; policy minimal: \d+\.\d\d KiB", said)
    said = run(*TINY, "--text", text, "--steps", 4, "--out", tmp_path / "c", "--budget", "0.1")
    assert "policy recompute blocks.*." in said
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "c")


@pytest.mark.parametrize("tied", [(), ("--tied",)])
def test_check_against_plain_pytorch(text, tied):
    said = run(*TINY, "--text", text, "--check", "--kv-heads", 1, *tied)
    assert float(said.split("float64: ")[1].split()[0]) < 1e-9


@pytest.mark.parametrize("how", ["", pytest.param("--graph", marks=pytest.mark.slow)])
def test_a_profile_is_printed_and_written(text, tmp_path, how):
    said = run(*TINY, "--text", text, "--out", tmp_path, "--profile", *how.split())
    for name in ("embed", "blocks.*.mlp.up", "head", "clip", "optimizer", *["inputs of the graph"] * bool(how)):
        assert re.search(rf"^{re.escape(name)} ", said, re.M), name
    assert "held-out" not in said and not (tmp_path / "metrics.csv").exists()
    check_picture(tmp_path / "profile.png")
    assert b"blocks.0.mlp.up: fwd" in gzip.decompress((tmp_path / "trace.json.gz").read_bytes())


@pytest.mark.slow
def test_the_check_runs_as_a_user_calls_it(text, tmp_path):
    """Without the paths that the tests add."""
    script = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, script, *TINY, "--text", text, "--check"]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0 and "float64: " in said.stdout, said.stderr


@pytest.mark.slow
def test_bfloat16_trains(text, tmp_path):
    run(*TINY, "--text", text, "--steps", 12, "--out", tmp_path, "--dtype", "bfloat16")
    rows = losses(tmp_path)
    assert float(rows[-1][1]) < float(rows[0][1])


def rounding_errors(said):
    """The largest of the errors of y, dx and dw by layer, from a run's table."""
    lines = said.partition("relative errors of rounding")[2].splitlines()
    return {line.split()[0]: max(map(float, re.findall(r"(\S+)%", line)[-3:])) for line in lines if line.startswith("blocks.")}


RECIPES = ("fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4", "nvfp4_nearest")


@pytest.mark.slow
def test_recipes_train_resume_and_print_what_they_round(text, tmp_path):
    """Losses near those without, with other bits; where a run goes on, the state of delayed scaling goes on."""
    sizes = *TINY, "--heads", 1, "--hidden", 64, "--text", text, "--steps", 6, "--sample", 2
    run(*sizes, "--out", tmp_path / "none")
    exact = losses(tmp_path / "none")
    for recipe in RECIPES:
        said = run(*sizes, "--out", tmp_path / recipe, "--recipe", recipe)
        assert said.count("blocks.1.mlp.up ") == 1 and "mlp.up.x " in said and "sample:" in said
        errors = rounding_errors(said)
        layers, least, most = (1, 5, 25) if "nvfp4" in recipe else (6, 1, 8)
        assert len(errors) == 2 * layers and all(least < e < most for e in errors.values()), said
        for row, want in zip(losses(tmp_path / recipe), exact, strict=True):
            assert row[1] != want[1] and float(row[1]) == pytest.approx(float(want[1]), rel=0.02)
    assert losses(tmp_path / "nvfp4") != losses(tmp_path / "nvfp4_nearest")
    for recipe in ("fp8_delayed", "nvfp4"):  # the state of scales, and the keys of steps, go on
        folder, later = tmp_path / f"{recipe}, resumed", tmp_path / f"{recipe}, later"
        run(*sizes, "--out", folder, "--recipe", recipe, "--stop-at", 3)
        run(*sizes, "--out", folder, "--recipe", recipe, "--resume")
        assert losses(folder) == losses(tmp_path / recipe)
        run(*sizes, "--out", later, "--recipe", recipe, "--delay-wgrad", "--policy", "minimal")
        assert losses(later) == losses(tmp_path / recipe)


@pytest.mark.slow
def test_trains_on_triton_as_on_torch(text, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.interpreter import GridExecutor

    launched, plain = [], GridExecutor.__call__
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **kw: launched.append(self.fn) or plain(self, *args, **kw))
    smaller = "--dim 16 --layers 1 --hidden 32 --context 16 --batch 1 --eval-every 10".split()
    until = "--steps", 10, "--stop-at", 3  # the interpreter takes a minute to evaluate and to sample
    run(*TINY, *smaller, *until, "--text", text, "--out", tmp_path / "a")
    assert not launched
    with backend("triton"):
        run(*TINY, *smaller, *until, "--text", text, "--out", tmp_path / "b")
    on_torch, on_triton = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert len(on_triton) == 3 and len(launched) > 3 * 10
    for a, b in zip(on_torch, on_triton, strict=True):
        assert float(b[1]) == pytest.approx(float(a[1]), rel=1e-5) and float(b[3]) == pytest.approx(float(a[3]), rel=1e-4)


@pytest.mark.slow
def test_graphed_step_gives_the_same_losses(text, tmp_path):
    run(*TINY, "--text", text, "--steps", 6, "--out", tmp_path / "a")
    said = run(*TINY, "--text", text, "--steps", 6, "--out", tmp_path / "b", "--graph")
    assert "captured: recorder: inputs" in said
    for eager, captured in zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True):
        assert float(captured[1]) == pytest.approx(float(eager[1]), rel=1e-5)
    assert "--graph: expected without --compile" in run("--graph", "--compile", code=2)


@pytest.mark.slow
def test_compiled_step_gives_the_same_losses(text, tmp_path):
    one_layer = *TINY, "--layers", 1, "--text", text, "--steps", 4  # a compiler is slow
    run(*one_layer, "--out", tmp_path / "a")
    run(*one_layer, "--out", tmp_path / "b", "--compile")
    for eager, compiled in zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True):
        assert float(compiled[1]) == pytest.approx(float(eager[1]), rel=1e-4)


def test_steps_that_are_not_finite_are_skipped_and_then_end_the_run(text, tmp_path):
    said = run(*TINY, "--text", text, "--steps", 40, "--warmup", 0, "--lr", 1e30, "--out", tmp_path / "out", code=1)
    assert "skipped: loss" in said and "not finite at blocks.0." in said
    assert "10 steps in a row were not finite" in said.splitlines()[-1]


BAD_FLAGS = [
    (("--budget", "0"), "--budget: expected a number above 0, got 0.0"),
    (("--recipe", "fp8"), "--recipe: invalid choice: 'fp8'"),
    (
        ("--recipe", "mxfp8", "--hidden", "48"),
        "--recipe: blocks.*.mlp.down: QLinearConfig: in_features must be a multiple of 32 (MXFP8), got 48",
    ),
    (("--recipe", "fp8_block", "--check"), "--check: expected without --recipe"),
    (("--budget", "1", "--policy", "minimal"), "--budget: expected without --policy"),
    (("--policy", "minimum"), "--policy: invalid choice: 'minimum'"),
    (("--dim", "0"), "--dim"),
    (("--dim", "30", "--heads", "4"), "--dim: expected an even multiple of --heads 4, got 30"),
    (("--heads", "4", "--dim", "32", "--kv-heads", "3"), "--kv-heads: expected a divisor of --heads 4, got 3"),
    (("--steps", "0"), "--steps: expected at least 1, got 0"),
    (("--batch", "-1"), "--batch: expected at least 1, got -1"),
    (("--context", "0"), "--context: expected at least 1, got 0"),
    (("--warmup", "-2"), "--warmup: expected at least 0, got -2"),
    (("--lr", "0"), "--lr: expected a number above 0, got 0.0"),
    (("--optimizer", "sgd"), "--optimizer: invalid choice: 'sgd'"),
    (("--lr", "nan"), "--lr: expected a number above 0, got nan"),
    (("--clip", "-1"), "--clip: expected a number above 0, got -1.0"),
    (("--dtype", "int8"), "--dtype"),
    (("--device", "nowhere"), "--device: expected a device of this machine, got 'nowhere'"),
    (("--resume",), "--resume: expected a checkpoint in --out"),
    (("--text", "missing.txt"), "--text: expected a file or a folder, got 'missing.txt'"),
    (("--typo",), "--typo"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_bad_flags_end_with_one_line_and_write_nothing(flags, message, tmp_path):
    out = tmp_path / "out"
    said = run("--out", out, *flags, code=2)
    assert message in said.splitlines()[-1]
    assert not out.exists()


def test_empty_text_ends_with_one_line(tmp_path):
    (tmp_path / "empty.txt").touch()
    said = run("--out", tmp_path / "out", "--text", tmp_path / "empty.txt", code=2)
    assert "which is empty" in said and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_ends_well(text, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *TINY, "--text", str(text), "--steps", "100000"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as running:
        said = []
        for line in running.stdout:
            said.append(line)
            if line.startswith("step 8:"):
                running.send_signal(signal.SIGINT)
        assert running.wait(timeout=600) == 0
    assert "--resume goes on from" in said[-1]
    done = len(losses(tmp_path))
    assert done >= 8 and f"stopped after step {done};" in said[-1]
    run(*TINY, "--text", text, "--steps", 100000, "--out", tmp_path, "--resume", "--stop-at", done + 1)
    assert len(losses(tmp_path)) == done + 1
