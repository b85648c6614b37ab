"""examples/train_lm.py against a loop of plain PyTorch that shares no code with it: losses, norms, weights,
validation and samples."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.plain import PlainLlama, plain_name
from funcops.engine import random
from funcops.engine.trees import paths, tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_lm  # noqa: E402
from lm.data import batch, load_corpus  # noqa: E402
from lm.flags import parse  # noqa: E402
from lm.kept import say_what_is_kept  # noqa: E402
from lm.results import RunError  # noqa: E402
from lm.step import NEEDS, inputs  # noqa: E402

CONTEXT, SIZE = 8, 2
TINY = f"--dim 16 --layers 2 --heads 2 --hidden 24 --context {CONTEXT} --batch {SIZE} --dtype float64 --lr 0.02 --clip 0.5".split()
TRAIN, HELD_OUT = b"abcdefghijklm", b"nopqrstuvwxyz"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Held-out text shares no letter with training text; its 7 windows, in batches of 4, leave 3."""
    generator = torch.Generator().manual_seed(0)

    def draw(letters, count):
        return bytes(letters[i] for i in torch.randint(len(letters), (count,), generator=generator))

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(draw(TRAIN, 9 * 60) + draw(HELD_OUT, 60))
    made = load_corpus(path, context=CONTEXT)
    assert not set(made.train.tolist()) & set(made.held_out.tolist()) and len(made.held_out) == 60
    return made


@pytest.fixture(autouse=True, scope="module")
def without_its_baseline():
    """Replace the trigram baseline, a table of 2^24 counts that each run would make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "trigram_loss", lambda train, held_out: 0.0)
        yield


def started(corpus, *flags, out="nowhere"):
    args = parse([*TINY, "--steps", "6", "--warmup", "2", "--out", str(out), *map(str, flags)])
    return args, train_lm.Run(args, corpus)


def plain_model(args, params):
    """The weights are the example's; the matrix of a tied head is the embedding's."""
    model = PlainLlama(dim=16, n_layers=2, n_heads=2, n_kv_heads=args.kv_heads, hidden=24, context=64, tied=args.tied).double()
    model.load_state_dict({plain_name(path): t.clone() for path, t in paths(params).items() if t is not None})
    return model


def held_out_loss(model, corpus):
    """The mean loss over every byte but each window's first; windows do not overlap."""
    starts = [round((59 - CONTEXT) * i // 6) for i in range(7)]
    rows = torch.stack([corpus.held_out[i : i + CONTEXT + 1] for i in starts]).long()
    with torch.no_grad():
        return float(model(rows[:, :-1], rows[:, 1:]))


def plain_rows(model, args, corpus, steps=6):
    """Loss, validation loss and norm of each step, written with autograd."""
    norms = [p for name, p in model.named_parameters() if name.endswith("norm.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("norm.weight")]
    groups = [{"params": others, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        rate = args.lr * (step + 1) / 2 if step < 2 else args.lr * 0.5 * (1 + math.cos(math.pi * (step - 2) / 4))
        for group in optimiser.param_groups:
            group["lr"] = rate
        x, labels = batch(corpus.train, step=step, seed=args.seed, size=SIZE, context=CONTEXT)
        optimiser.zero_grad()
        loss = model(x, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimiser.step()
        validated = (step + 1) % args.eval_every == 0 or step + 1 == steps
        yield float(loss.detach()), held_out_loss(model, corpus) if validated else None, float(norm), rate


FLAGS = [
    (),
    ("--tied",),
    ("--kv-heads", 2, "--delay-wgrad"),
    ("--policy", "minimal", "--seed", 3),
    ("--weight-decay", 0.7, "--clip", 100, "--eval-every", 1),
]


@pytest.mark.turns("flags", every=2)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(map(str, flags)) or "as it is")
def test_a_run_equals_plain_pytorch(flags, corpus):
    args, run = started(corpus, "--eval-every", 4, *flags)
    model = plain_model(args, run.params)
    for i, (loss, val_loss, norm, rate) in enumerate(plain_rows(model, args, corpus)):
        row = run.advance()
        assert row.step == i + 1 and row.lr == pytest.approx(rate, rel=1e-12)
        assert row.loss == pytest.approx(loss, rel=1e-9) and row.norm == pytest.approx(norm, rel=1e-8), row
        assert row.val_loss == (None if val_loss is None else pytest.approx(val_loss, rel=1e-9)), row
    ours = {plain_name(path): t for path, t in paths(run.params).items() if t is not None}
    for name, p in model.named_parameters():
        assert torch.allclose(ours[name], p.detach(), rtol=1e-6, atol=1e-9), name


def test_validation_weighs_every_window_the_same(corpus):
    """Batches of 4 and 3 windows."""
    args, run = started(corpus)
    assert len(run.val[0]) == 7
    model = plain_model(args, run.params)
    for size in (1, 2, 3, 4, 7, 9):
        assert train_lm.evaluate(run.params, *run.val, run.s, size) == pytest.approx(held_out_loss(model, corpus), rel=1e-10)


def test_every_step_has_a_batch_of_its_own(corpus):
    _, run = started(corpus)
    seen = []
    for _ in range(3):
        seen.append(run.batch()[0])
        run.advance()
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_a_sample_is_drawn_byte_by_byte_from_the_last_context(corpus, monkeypatch):
    """The reference runs whole forwards with banded attention, and takes the byte whose interval of probability holds the draw."""
    args, run = started(corpus, "--sample", 12, "--seed", 5)
    model, attention = plain_model(args, run.params), F.scaled_dot_product_attention

    def banded(q, k, v, is_causal, enable_gqa):
        away = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return attention(q, k, v, attn_mask=(away >= 0) & (away < CONTEXT), enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", banded)
    prompt = corpus.held_out[:20].long()
    ids = prompt.tolist()
    for i in range(12):
        with torch.no_grad():
            p = (model(torch.tensor(ids)[None])[0, -1] / 0.8).softmax(-1)
        u = random.uniform(random.fold_in(random.key(5), i), (1,), dtype=torch.float64)
        ids.append(int((p.cumsum(0) <= u).sum()))
    assert torch.cat(list(train_lm.sample(run.params, prompt, args))).tolist() == ids[20:]


OTHER = {
    "dim": 32,
    "layers": 1,
    "heads": 1,
    "kv-heads": 2,
    "hidden": 8,
    "context": 4,
    "batch": 3,
    "steps": 7,
    "warmup": 1,
    "eval-every": 2,
    "lr": 0.01,
    "weight-decay": 0.2,
    "optimizer": "muon",
    "clip": 1,
    "seed": 1,
    "dtype": "float32",
    "text": "other.txt",
    "recipe": "fp8_block",
    "experts": 2,
}
FREE = {"sample": 7, "delay-wgrad": None, "policy": "minimal", "stop-at": 4, "graph": None, "watch": 1}
FREE |= {
    "zero": 3,
    "cp": 1,
    "dp": 1,
    "ep": 1,
    "tp": 1,
    "pp": 1,
    "overlap": "ring",
    "microbatches": 2,
    "schedule": "gpipe",
}  # of several processes


@pytest.fixture(scope="module")
def begun(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    _, run = started(corpus, out=out)
    run.advance()
    run.save()
    return out


@pytest.mark.turns("flag", every=2)
@pytest.mark.parametrize("flag", [*OTHER, "tied", "compile"])
def test_a_run_goes_on_with_the_flags_that_it_began_with(flag, begun, corpus):
    """Every flag that changes its numbers is compared, and named."""
    given = [f"--{flag}"] if flag in ("tied", "compile") else [f"--{flag}", OTHER[flag]]
    with pytest.raises(RunError, match=f"--resume: expected --{flag} as in the checkpoint"):
        started(corpus, "--resume", *given, out=begun)


@pytest.mark.turns("flag", every=3)
@pytest.mark.parametrize("flag", [None, *FREE])
def test_flags_that_change_no_number_may_change(flag, begun, corpus):
    given = [] if flag is None else [f"--{flag}"] if FREE[flag] is None else [f"--{flag}", FREE[flag]]
    _, resumed = started(corpus, "--resume", *given, out=begun)
    _, whole = started(corpus)
    whole.advance()
    assert resumed.done == 1 and resumed.rows == [whole.rows[0]._replace(seconds=resumed.rows[0].seconds)]
    a, b = resumed.advance(), whole.advance()
    assert (a.step, a.lr) == (b.step, b.lr) == (2, 0.02)
    assert (a.loss, a.norm) == pytest.approx((b.loss, b.norm), rel=1e-9)


def test_every_flag_is_compared_or_known_to_change_no_number():
    named = {
        name
        for name in vars(parse([*TINY, "--out", "nowhere"]))
        if name not in ("device", "check", "profile", "decoder", "out", "resume", "force", "mesh")
    }
    assert named == {
        name.replace("-", "_")
        for name in (*OTHER, *FREE, "tied", "compile", "budget", "eight-bit-state", "top-k", "shared", "balance")
    }


def kept_bytes(run):
    """The bytes of residuals whose storages the caller does not hold anyway."""
    x, labels = run.batch()
    given = inputs(run.params, x, labels, run.s)
    _, residuals = run.s.op.fwd(run.params, given, run.s.model, needs=NEEDS)
    sizes, held = (
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(tree)}
        for tree in (residuals, (run.params, given))
    )
    return sum(size for key, size in sizes.items() if key not in held)


@pytest.mark.parametrize("policy", ["save_all", "recompute_elementwise", "minimal"])
def test_printed_bytes_of_a_policy_are_kept_bytes(policy, corpus, capsys):
    """The printed figures equal a step's bytes."""
    default = kept_bytes(started(corpus)[1])
    _, run = started(corpus, "--policy", policy)
    say_what_is_kept(run.params, *run.batch(), run.s, run.policy)
    before, after = map(float, re.findall(r"([\d.]+) KiB", capsys.readouterr().out.partition("kept for the backward")[2]))
    assert before == pytest.approx(default / 2**10, abs=0.006) and after == pytest.approx(kept_bytes(run) / 2**10, abs=0.006)
    assert (kept_bytes(run) > default) == (policy == "save_all") and (kept_bytes(run) < default) == (policy == "minimal")


def test_a_budget_is_kept(corpus):
    budget = kept_bytes(started(corpus)[1]) / 2**20 * 0.9
    assert 0 < kept_bytes(started(corpus, "--budget", budget)[1]) / 2**20 <= budget


def test_weights_start_as_the_docstring_says(corpus):
    """Variance 1 / fan_in; weights that write into the stream are scaled down by the number of writers; a tied matrix serves both
    ends."""
    _, run = started(corpus, "--dim", 64, "--hidden", 128)
    for path, t in paths(run.params).items():
        if t is not None and t.dim() == 2:
            writers = 2 * 2 if path.endswith(("out.weight", "down.weight")) else 1
            want = 0.5 if path == "embed.weight" else (t.shape[1] * writers) ** -0.5
            assert float(t.std()) == pytest.approx(want, rel=0.1) and abs(float(t.mean())) < 0.1 * want, path
    _, tied = started(corpus, "--tied")
    assert float(tied.params["embed"].weight.std()) == pytest.approx(16**-0.5, rel=0.1)


def test_losses_are_means_over_bytes(corpus):
    """In nats, whatever the sizes."""
    _, run = started(corpus)
    run.params["head"].weight.zero_()
    assert run.advance().loss == pytest.approx(math.log(256))
