"""train_lm.py with experts: a run equals plain PyTorch's, with the bias moved by hand; it prints and saves the experts' load."""

import csv
import math
import sys
from pathlib import Path

import pytest
import torch
from programs import check_picture

from benchmarks.plain import PlainLlama, plain_name
from benchmarks.plain_moe import Mixture, Router
from funcops.engine.contract.walk import steps
from funcops.engine.trees import paths
from funcops.testing.checks import same_bits

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import train_lm  # noqa: E402
from lm import flags, results  # noqa: E402
from lm.data import batch, load_corpus  # noqa: E402
from lm.model import model as model_of  # noqa: E402

TINY = """--dim 16 --layers 2 --heads 2 --hidden 6 --context 8 --batch 2 --lr 0.02 --clip 0.5 --steps 6 --warmup 2 --eval-every 3
 --experts 4 --top-k 2 --balance 0.05 --dtype float64""".split()


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(ROOT / "LICENSE", context=8)


@pytest.fixture(autouse=True)
def without_its_baseline(monkeypatch):
    monkeypatch.setattr(train_lm, "trigram_loss", lambda train, held_out: 0.0)


def started(corpus, *given, out="nowhere"):
    args = flags.parse([*TINY, "--out", str(out), *map(str, given)])
    return args, train_lm.Run(args, corpus)


def plain_model(args, params):
    model = PlainLlama(dim=16, n_layers=2, n_heads=2, n_kv_heads=args.kv_heads, hidden=6, context=8)
    for block in model.blocks:
        block.mlp = Mixture(block.mlp.norm, 16, 6, 6 * args.shared, Router(4, args.top_k, score="sigmoid"))
    model.double().load_state_dict({plain_name(path): t.clone() for path, t in paths(params).items() if t is not None})
    return model


@pytest.mark.turns("given")
@pytest.mark.parametrize("given", [(), ("--shared", 1, "--top-k", 1, "--delay-wgrad", "--policy", "minimal")], ids=str)
def test_a_run_equals_plain_pytorch_with_biases_moved_by_hand(given, corpus):
    args, run = started(corpus, *given)
    model = plain_model(args, run.params)
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("norm.weight")]
    groups = [{"params": others, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        for group in optimiser.param_groups:
            group["lr"] = args.lr * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4)))
        optimiser.zero_grad()
        loss = model(*batch(corpus.train, step=step, seed=0, size=2, context=8))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimiser.step()
        row = run.advance()
        assert row.loss == pytest.approx(float(loss.detach()), rel=1e-9) and row.norm == pytest.approx(float(norm), rel=1e-8)
        assert row.load == [block.mlp.load.tolist() for block in model.blocks]
        for block in model.blocks:
            n = block.mlp.load
            block.mlp.route.bias += args.balance * torch.sign(n.mean() - n)
    ours = {plain_name(path): t for path, t in paths(run.params).items() if t is not None}
    assert any(bool(t.any()) for path, t in ours.items() if path.endswith("route.bias"))
    for name, t in model.state_dict().items():
        assert torch.allclose(ours[name], t, rtol=1e-6, atol=1e-9), name


def test_a_run_goes_on_with_its_biases_and_load(corpus, tmp_path):
    _, whole = started(corpus)
    for _ in range(4):
        whole.advance()
    _, first = started(corpus, out=tmp_path)
    first.advance()
    first.advance()
    first.save()
    _, second = started(corpus, "--resume", out=tmp_path)
    second.advance()
    second.advance()
    same_bits(second.params, whole.params, "resumed")
    assert [row.load for row in second.rows] == [row.load for row in whole.rows]
    for given in (("--top-k", 1), ("--shared", 1), ("--balance", 0.1), ("--experts", 3)):
        with pytest.raises(results.RunError, match=f"--resume: expected {given[0]} as in the checkpoint"):
            started(corpus, "--resume", *given, out=tmp_path)


@pytest.mark.slow
def test_load_is_printed_saved_and_plotted(corpus, tmp_path, capsys):
    _, run = started(corpus, "--sample", 0, out=tmp_path)
    assert train_lm.loop(run)
    said = capsys.readouterr().out
    assert said.count("load of the experts of block 1, 1 is even: ") == 2
    with (tmp_path / "load.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 2 and rows[3]["step"] == "2" and rows[3]["layer"] == "1"
    assert all(sum(int(row[f"expert{e}"]) for e in range(4)) == 2 * 8 * 2 for row in rows)
    check_picture(tmp_path / "load.png")
    assert "load" not in (tmp_path / "metrics.csv").read_text()
    share = results.shares([results.Row(i, 0.0, None, 0.0, 0.0, 0.0, [[3, 1], [0, 4]]) for i in range(3)])
    assert share.tolist() == [[1.5, 0.5], [0.0, 2.0]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--top-k", "5"], "--top-k: expected at most --experts 4, got 5"),
        (["--balance", "inf"], "--balance: expected a finite number of at least 0, got inf"),
    ],
)
def test_flags_that_exclude_experts_are_named(given, said, capsys):
    with pytest.raises(SystemExit):
        flags.parse([*TINY, *given])
    assert said in capsys.readouterr().err


def test_flags_of_experts_without_them_are_named(capsys):
    for flag in ("--top-k", "--shared", "--balance"):
        with pytest.raises(SystemExit):
            flags.parse([flag, "1"])
        assert f"{flag}: expected with --experts, got 1" in capsys.readouterr().err


def test_a_recipe_takes_the_experts_and_leaves_their_router(corpus):
    args, run = started(corpus, "--recipe", "fp8_block", "--dtype", "bfloat16")
    low = {part.path for part in steps(model_of(args.decoder, args.recipe)) if part.cfg.low_recipe is not None}
    assert {"blocks.*.mlp.experts.up", "blocks.*.mlp.experts.down"} < low and not any("gate" in path for path in low)
    assert math.isfinite(run.advance().loss)
