"""examples/train_lm.py on several ranks: the losses of one process on every mesh, and checkpoints that move between meshes."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import torch

from funcops import chain, dist, random
from funcops.engine.trees import nbytes, paths, tree_map_tensors
from funcops.optim import BlockTensor
from funcops.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--dim 16 --layers 2 --heads 4 --kv-heads 4 --hidden 24 --context 16 --batch 8 --dtype float64 --lr 0.02 --warmup 2".split()
MESHES = ("--dp 4", "--tp 4 --overlap ring", "--dp 2 --tp 2", "--pp 2 --tp 2", "--dp 2 --cp 2", "--dp 4 --zero 3")
MOVED = {  # one run from mesh to mesh, by how many processes
    "--dp 2 --tp 2 --zero 3": 4,
    "--tp 4": 4,
    "--pp 2 --dp 2 --schedule one_f_one_b --microbatches 2 --zero 1": 4,
    "--pp 2 --cp 2 --overlap none": 4,
    "--dp 1": 1,
}
STEPS = 20


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes()[:2100])  # what nobody edits
    return path


EXPERTS = "--experts 8 --top-k 2 --balance 0.05".split()
ONES = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1)
THREADS = {
    "dp-tp": (ONES | {"dp": 2, "tp": 2}, 0, []),
    "tp-zero3": (ONES | {"dp": 2, "tp": 2}, 3, []),
    "cp-zero1": (ONES | {"dp": 2, "cp": 2}, 1, []),
    "tp-zero2": (ONES | {"dp": 2, "tp": 2}, 2, ["--delay-wgrad"]),
    "ep-zero1": (ONES | {"dp": 2, "ep": 2}, 1, EXPERTS),
    "ep-zero3": (ONES | {"dp": 2, "ep": 2}, 3, [*EXPERTS, "--shared", "1"]),
    "ep-tp": (ONES | {"ep": 2, "tp": 2}, 0, [*EXPERTS, *"--shared 1 --overlap ring --delay-wgrad --policy minimal".split()]),
    "ep-cp": (ONES | {"ep": 2, "cp": 2}, 0, EXPERTS),
}
FIRST = ("tp-zero3",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one if one in FIRST else pytest.param(one, marks=pytest.mark.slow) for one in THREADS])
def test_losses_on_ranks_that_are_threads(name, text, tmp_path, monkeypatch):
    """Params are sharded, rows are split, and the ranks get unequal numbers of held-out windows."""
    sizes, zero, more = THREADS[name]
    programs.main_of("train_lm.py")
    import train_lm
    from lm.data import load_corpus
    from lm.flags import parse
    from lm.ranks import Ranks

    monkeypatch.setattr(train_lm, "trigram_loss", lambda train, held_out: 0.0)
    corpus = load_corpus(text, context=16)
    flags = [*SIZES, *more, "--zero", str(zero), "--text", str(text), "--steps", "3", "--eval-every", "3"]
    args = parse([*flags, "--out", str(tmp_path)])
    broken = "blocks.1.mlp.experts.up.weight" if "--experts" in more else "blocks.1.mlp.up.weight"
    broken = broken.replace("experts", "moe.routed.experts") if "--shared" in more else broken

    def run(mesh=None):
        made = train_lm.Run(args, corpus, mesh and Ranks.of(mesh, args))
        made.agree()
        rows = [made.advance() for _ in range(3)]
        state = made.state.optimiser
        means = made.ranks.whole(state.exp_avg, zero=made.ranks.zero > 0)
        whole = tree_map_tensors(torch.clone, (made.ranks.whole(made.params), means, state.step.unique()))
        if mesh is not None:  # what is not finite on one rank
            paths(made.params)[broken].fill_(float("nan") if mesh.rank == 1 else 1.0)
            made.advance()
        return [[row.loss, row.norm, row.val_loss or 0.0] for row in rows], [row.load for row in rows], whole, made

    rows, loads, params, one = run()
    assert len(one.val[0]) % 4 and all((load is None) == ("--experts" not in more) for load in loads)
    for found, load, whole, made in run_ranks(sizes, run):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(rows), rtol=0, atol=1e-12)
        assert load == loads, "where the choices of all rows went"
        for (path, t), want in zip(paths(whole).items(), paths(params).values(), strict=True):
            torch.testing.assert_close(t, want, rtol=0, atol=1e-9, msg=path)
        assert made.skipped == 1 and torch.equal(made.state.optimiser.step, one.state.optimiser.step), "all ranks skip the step"
        assert zero == 0 or nbytes(made.state.optimiser.exp_avg) < 0.6 * nbytes(one.state.optimiser.exp_avg)
        held = paths(made.params)[broken].numel() * sizes["ep"] * (sizes["dp"] if zero == 3 else 1)
        assert "--experts" not in more or held == paths(one.params)[broken].numel(), "each has its experts, and no other"
        assert zero < 3 or nbytes(made.params) < 0.6 * nbytes(one.params)


MESSAGES = {  # of a step of four layers, the mean loss's included: how many, and how many of them no product hides
    "": (15, 8),
    "--zero 1": (8, 3),
    "--zero 2 --compile": (8, 3),
    "--recipe fp8_current": (15, 8),
    "--recipe nvfp4 --zero 2": (8, 3),
    "--recipe fp8_delayed": (4, 4),  # whose gradients hold amaxes, of which ranks need the largest
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", MESSAGES)
def test_sums_start_within_the_backward(flags, text):
    """The second message of an ordered sum follows the wait for the first, if the result is whole; with --zero one is enough."""
    programs.main_of("train_lm.py")
    import train_lm
    from lm.flags import parse
    from lm.ranks import Ranks
    from lm.step import loss_and_grads

    args = parse([*SIZES, *"--layers 4 --hidden 32 --dtype bfloat16".split(), *flags.split(), "--text", str(text)])

    def step(mesh):
        ranks, ids = Ranks.of(mesh, args), torch.empty(2, 16, dtype=torch.int64, device="meta")
        params = chain.init(ranks.model, device="meta", dtype=torch.float32)
        s, key = train_lm.settings_of(args, params, ranks), random.key(0, device="cpu").to("meta")
        ranks.reduced(*loss_and_grads(params, ids, ids, s, {}, key if "nvfp4" in flags else None)[:2])

    program = dist.check_program(step, ONES | {"dp": 4}, ranks=(0,))[0]
    assert (len(program.sent), len(program.exposed)) == MESSAGES[flags]


@pytest.mark.slow
def test_a_recipe_on_ranks_that_are_threads(text, tmp_path):
    """Losses equal one process's up to the rounding of sums in another order; all ranks have the same state of scales."""
    programs.main_of("train_lm.py")
    import train_lm
    from lm.data import load_corpus
    from lm.flags import parse
    from lm.ranks import Ranks

    flags = [*SIZES, "--dtype", "bfloat16", "--text", str(text), "--recipe", "fp8_delayed", "--steps", "2", "--zero", "1"]
    corpus, args = load_corpus(text, context=16), parse([*flags, "--out", str(tmp_path)])

    def run(mesh=None):
        made = train_lm.Run(args, corpus, mesh and Ranks.of(mesh, args))
        made.agree()
        return [made.advance().loss for _ in range(2)], made.state.scales

    losses, scales = run()
    ranks = run_ranks(ONES | {"dp": 2, "tp": 2}, run)
    for found, own in ranks:
        assert found == ranks[0][0] and own.keys() == scales.keys() and len(own) == 12
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=0.01, atol=0)
        for path, state in own.items():
            assert torch.equal(state.history, ranks[0][1][path].history), path
            x_and_w, want = (one.history[1, :2] for one in (state, scales[path]))
            assert bool((want > 0).all())
            torch.testing.assert_close(x_and_w, want, rtol=0.1, atol=0, msg=path)  # ranks of dp measure their own x


@pytest.mark.slow
def test_a_recipe_with_keys_on_ranks_that_are_threads(text, tmp_path):
    """Losses near one process's; no two ranks, and no two steps, round alike."""
    programs.main_of("train_lm.py")
    import train_lm
    from lm.data import load_corpus
    from lm.flags import parse
    from lm.ranks import Ranks

    flags = [*SIZES, "--dtype", "bfloat16", "--text", str(text), "--recipe", "nvfp4", "--steps", "2"]
    corpus, args = load_corpus(text, context=16), parse([*flags, "--out", str(tmp_path)])

    def run(mesh=None):
        made, keys = train_lm.Run(args, corpus, mesh and Ranks.of(mesh, args)), []
        made.agree()
        for _ in range(2):
            keys.append(tuple(made.key().tolist()))
            loss = made.advance().loss
        return loss, keys

    loss, _ = run()
    found = run_ranks(ONES | {"dp": 2, "cp": 2}, run)
    assert len({key for _, keys in found for key in keys}) == 2 * 4
    assert all(one == pytest.approx(loss, rel=0.02) for one, _ in found)


def test_no_two_weights_of_a_pipeline_round_alike(text):
    """Stages name their layers from 0 on, and keys follow names."""
    programs.main_of("train_lm.py")
    from lm.flags import parse
    from lm.ranks import Ranks

    args = parse([*SIZES, *"--layers 4 --hidden 32 --dtype bfloat16 --recipe nvfp4".split(), "--text", str(text)])
    args.microbatches = 2

    def keys(rank):
        ranks = Ranks.of(dist.Mesh.abstract(ONES | {"pp": 2}, rank), args)
        work = ranks.stages.work(ranks.init(args, torch.bfloat16), torch.bfloat16, random.key(0))
        return [tuple(t.tolist()) for path, t in paths(work).items() if path.endswith("weight.key")]

    found = [key for rank in range(2) for key in keys(rank)]
    assert len(set(found)) == len(found) == 4, "an MLP's first product of each layer"


@pytest.mark.slow
def test_an_8_bit_state_on_ranks_that_are_threads(text, tmp_path):
    """Losses near one process's; a checkpoint of one process goes on on four, and theirs on one."""
    programs.main_of("train_lm.py")
    import train_lm
    from lm.data import load_corpus
    from lm.flags import parse
    from lm.ranks import Ranks

    sizes = "--dim 64 --layers 1 --heads 4 --kv-heads 2 --hidden 128 --context 16 --batch 4 --eval-every 4".split()
    flags = [*sizes, *"--zero 1 --lr 0.01 --steps 4 --eight-bit-state".split(), "--text", str(text), "--dtype", "float32"]
    corpus = load_corpus(text, context=16)

    def run(folder, mesh=None, resume=False):
        args = parse([*flags, "--out", str(tmp_path / folder), *["--resume"] * resume])
        made = train_lm.Run(args, corpus, mesh and Ranks.of(mesh, args))
        found = [made.advance().loss for _ in range(2)]
        means = made.state.optimiser.exp_avg["blocks"][0]["mlp"]
        assert type(means["up"].weight) is BlockTensor and made.save()
        return torch.tensor(found)

    first, last = run("one"), run("one", resume=True)
    many = lambda folder, resume: run_ranks(ONES | {"dp": 2, "tp": 2}, lambda mesh: run(folder, mesh, resume))  # noqa: E731
    run("moved")
    pairs = [(many("four", False), first), (many("moved", True), last)]
    pairs += [([run("four", resume=True)], last)]
    for found, want in pairs:
        for own in found:
            torch.testing.assert_close(own, want, rtol=2e-3, atol=0)


BAD = {
    "--dp 2 --tp 4": "--pp 1 --dp 2 --ep 1 --cp 1 --tp 4: expected a product of 4, the number of processes that torchrun started",
    "--tp 3": "--pp 1 --dp 1 --ep 1 --cp 1 --tp 3: expected a product of 4, the number of processes that torchrun started, got 3",
    "--dp 0": "--dp: expected at least 1, got 0",
    "--batch 6": "--batch: expected a multiple of 4 (--pp 1 --dp 4 --ep 1 --cp 1 --tp 1), got 6",
    "--pp 2 --batch 4": "--batch: expected a multiple of 8 (--pp 2 --dp 2 --ep 1 --cp 1 --tp 1 --microbatches 4), got 4",
    "--tp 4 --kv-heads 2": "--kv-heads: expected a multiple of --tp 4, got 2",
    "--cp 4 --context 12": "--context: expected a multiple of 8, twice --cp, got 12",
    "--pp 2 --zero 3": "--zero: expected 0 to 2 with --pp 2, got 3",
    "--pp 4": "--pp: expected 1 to 2, as there are --layers 2, got 4",
    "--pp 2 --tied": "--tied: expected without --pp 2 --dp 2 --ep 1 --cp 1 --tp 1, as the embedding and the head are on two stages",
    "--check": "--check: expected without --pp 1 --dp 4 --ep 1 --cp 1 --tp 1, as whole params are compared, got True",
    "--optimizer muon": "--optimizer: expected adamw with --pp 1 --dp 4 --ep 1 --cp 1 --tp 1, as Muon's state is saved by one",
    "--graph": "--graph: expected without --pp 1 --dp 4 --ep 1 --cp 1 --tp 1, as communication is not captured, got True",
    "--pp 2 --compile": "--compile: expected without --pp 2 --dp 2 --ep 1 --cp 1 --tp 1, as the schedule is run action by action",
    "--ep 2": "--experts: expected a multiple of --ep 2, got none",
    "--ep 4 --experts 6": "--experts: expected a multiple of --ep 4, got 6",
    "--ep 2 --experts 4 --batch 6": "--batch: expected a multiple of 4 (--pp 1 --dp 2 --ep 2 --cp 1 --tp 1), got 6",
    "--tp 4 --experts 8 --shared 1 --hidden 6": "--hidden: expected a multiple of --tp 4, got 6",
    "--pp 2 --experts 4": "--experts: expected without --pp 2 --dp 2 --ep 1 --cp 1 --tp 1, as no stage sends their load, got 4",
    "--ep 2 --experts 4 --recipe fp8_delayed": "--recipe: expected one without state with --ep 2, which has no slots",
    "--zero 3 --compile": "--compile: expected without --zero 3, whose layers take minutes to trace, got True",
    "--zero 3 --recipe fp8_delayed": "--recipe: expected one without state with --zero 3, which has no slots for its scales",
    "--zero 3 --recipe nvfp4": "--recipe: expected nvfp4_nearest with --zero 3, whose gathered weights have no random keys",
    "--tp 4 --overlap ring --recipe fp8_block": "ColumnQLinearConfig: overlap must be 'none' or 'bulk' with a recipe",
    "--dim 32 --hidden 32 --tp 4 --recipe mxfp8": "proj: ColumnQLinearConfig: out_features must be a multiple of 128 (MXFP8",
}


@pytest.mark.parametrize("flags", BAD)
def test_a_mesh_that_does_not_fit_is_named_before_a_group_is_made(flags, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert BAD[flags] in programs.run("train_lm.py", *SIZES, *flags.split(), code=2)
    monkeypatch.setenv("RANK", "1")
    assert programs.run("train_lm.py", *SIZES, *flags.split(), code=2) == "" and not torch.distributed.is_initialized()


class Left(BaseException):
    """Raised in place of the process's end."""


def interrupted():
    raise KeyboardInterrupt  # not by a signal, which a process that a shell starts in the background ignores


ENDS = {
    "returns": (lambda: 3, 3, False),
    "a wrong flag": (lambda: sys.exit(2), 2, False),
    "help": (lambda: sys.exit(), 0, False),
    "a sentence": (lambda: sys.exit("no"), 1, False),
    "an error": (lambda: [][1], 1, True),
    "an interrupt": (interrupted, 1, True),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_ends_without_pythons_own_exit_however_it_ends(end, monkeypatch, capsys):
    """Which aborts the process, and loses the error, if a thread of Gloo still holds a tensor."""
    programs.main_of("train_lm.py")
    from lm import ranks

    def left(code):
        raise Left(code)

    main, code, traced = ENDS[end]
    monkeypatch.setattr(ranks.os, "_exit", left)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(Left) as found:
        ranks.leave(main)
    assert found.value.args == (code,) and ("Traceback" in capsys.readouterr().err) == traced


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """Folders and outputs of runs on one process and on four, and of one run that moves from mesh to mesh."""
    folder = tmp_path_factory.mktemp("runs")
    shared = *SIZES, "--text", str(text), "--steps", str(STEPS), "--eval-every", "10", "--sample", "5"
    listed = [("one", 1, [*shared, "--out", str(folder / "one")])]
    listed += [(mesh, 4, [*shared, *mesh.split(), "--out", str(folder / mesh)]) for mesh in MESHES]
    listed += [("experts", 1, [*shared, *EXPERTS, "--out", str(folder / "experts")])]
    half = [*shared, *EXPERTS, "--out", str(folder / "moved experts")]
    listed += [("experts 0", 4, [*half, *"--dp 2 --ep 2 --zero 2 --stop-at 10".split()]), ("experts 1", 1, [*half, "--resume"])]
    for i, (flags, count) in enumerate(MOVED.items()):
        until = ["--stop-at", str(STEPS // len(MOVED) * (i + 1)), "--out", str(folder / "moved"), *["--resume"] * (i > 0)]
        listed.append((f"moved {i}", count, [*shared, *flags.split(), *until]))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("four_ranks.py")), str(folder)]
    done = subprocess.run(command, input=json.dumps(listed), capture_output=True, text=True, timeout=600)
    said = {path.stem: path.read_text() for path in folder.glob("*.out")}
    failed = {name: (folder / f"{name}.err").read_text() for name, code in json.loads(done.stdout or "{}").items() if code}
    assert done.returncode == 0 and not failed, (done.stderr, failed)
    return folder, said


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        found = [(row["loss"], row["norm"], row["val_loss"] or "0") for row in csv.DictReader(file)]
    return torch.tensor([[float(one) for one in row] for row in found], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MESHES, "moved"])
def test_losses_equal_one_process(name, runs):
    folder, said = runs
    want = rows(folder / "one")
    assert want.shape == (STEPS, 3) and want[-1, 0] < want[0, 0] - 0.5
    torch.testing.assert_close(rows(folder / name), want, rtol=0, atol=1e-9)
    if name != "moved":
        sample = said["one-0"].partition("sample:")[2]
        assert said[f"{name}-0"].endswith(f"sample:{sample}") and not any(said[f"{name}-{rank}"] for rank in (1, 2, 3))


@pytest.mark.slow
def test_experts_go_from_four_processes_to_one(runs):
    """The first half on a mesh, the second from its checkpoint: losses, load and weights equal one process's."""
    folder, said = runs
    torch.testing.assert_close(rows(folder / "moved experts"), rows(folder / "experts"), rtol=0, atol=1e-9)
    whole, moved = ((folder / name / "load.csv").read_text() for name in ("experts", "moved experts"))
    assert moved == whole and len(whole.splitlines()) == 1 + 2 * STEPS
    assert said["experts 1-0"].rpartition("sample:")[2] == said["experts-0"].rpartition("sample:")[2] != ""


@pytest.mark.slow
def test_torchrun_starts_it(text, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_lm.py"]
    flags = *SIZES, "--text", text, "--steps", 2, "--tp", 2, "--out", tmp_path, "--sample", 0
    done = subprocess.run([*command, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes: pp 1 x dp 1 x ep 1 x cp 1 x tp 2") == 1 and len(rows(tmp_path)) == 2
