"""Recordings and their comparison across everything in which runs may differ."""

import math
import re
import weakref

import pytest
import torch

from funcops import (
    ChainConfig,
    LinearConfig,
    NonFiniteError,
    RopeConfig,
    ScaleConfig,
    SoftcapConfig,
    Step,
    TorchConfig,
    batch_wgrads,
    chain,
    compare,
    donate,
    linear,
    named_scope,
    named_steps,
    note,
    op_from_module,
    random,
    recording,
    scale,
    softcap,
    trees,
    value_and_grad,
    with_policy,
)
from funcops.adapters.recording import Comparison, Recorded, Recording
from funcops.engine.backend import notes, scopes
from funcops.engine.program import rules
from funcops.graphs import graphed
from funcops.models import DecoderConfig, decoder, decoder_x
from funcops.optim import AdamWConfig, MuonConfig, SGDConfig, adamw_init, adamw_update, muon_init, muon_update, sgd_init, sgd_update
from funcops.schedule import one_f_one_b, run

SIZES = DecoderConfig(vocab=32, dim=32, layers=2, heads=2, kv_heads=1, head_size=16, hidden=48, context=16, rope=RopeConfig(16))
MODEL = decoder(SIZES, loss=True)
PARAMS = chain.init(MODEL, key=random.key(0))
IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def x_of(ids=IDS, dtype=torch.float32):
    return decoder_x(SIZES, ids, dtype, labels=ids.roll(-1, 1))


def step(params, x, op=chain, model=MODEL):
    loss, grads, *_ = value_and_grad(op)(params, x, model)
    return loss, grads


def of(fn, *args, **kwargs):
    with recording() as found:
        fn(*args, **kwargs)
    return found


def faulty(path, factor=1 + 1e-3):
    return trees.put(PARAMS, path, trees.at(PARAMS, path) * factor)


BASE = of(step, PARAMS, x_of())


def test_rows_name_every_step_and_half():
    places = {row.place for row in BASE.rows}
    for name in ("attn.qkv.q.proj", "attn.out", "mlp.up", "mlp.down"):
        for i in range(2):
            path = f"blocks.{i}.{name}"
            assert {f"{path}: fwd, y", f"{path}: dgrad, dy", f"{path}: wgrad, dparams.weight"} <= places
    assert "blocks.1.mlp.norm: recompute, y" in places and "head: wgrad, dparams.weight" in places
    halves = [row.half for row in BASE.rows]
    assert halves.index("dgrad") > max(i for i, half in enumerate(halves) if half == "fwd")


def test_plain_programs_are_as_before():
    """Outside of a recording nothing is told, and programs are the ones without a line of it."""
    before = dict(MODEL.programs)
    step(PARAMS, x_of())
    with recording():
        step(PARAMS, x_of())
    with named_steps():
        step(PARAMS, x_of())
    step(PARAMS, x_of())
    assert all(MODEL.programs[key] is program for key, program in before.items()) and not scopes.on and not notes.takers
    levels = {key[5] for key in MODEL.programs}
    assert levels == {0, scopes.NAMED, scopes.NOTED}
    for key, program in MODEL.programs.items():
        assert ("notes" in program.__globals__) == (key[5] == scopes.NOTED) and ("scopes" in program.__globals__) == bool(key[5])


def test_results_have_the_same_bits():
    want = trees.tensors(step(PARAMS, x_of()))
    with recording():
        got = trees.tensors(step(PARAMS, x_of()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_no_value_is_held():
    with recording():
        y, residuals = chain.fwd(PARAMS, x_of(), MODEL)
        held = [weakref.ref(t) for t in trees.tensors(residuals) if t.untyped_storage().data_ptr() not in _given()]
        chain.bwd(donate(residuals), y, MODEL)
        del residuals
        assert len(held) > 20 and not [t for t in held if t() is not None]


def _given():
    return {t.untyped_storage().data_ptr() for t in trees.tensors((PARAMS, IDS))}


def test_saved_and_loaded(tmp_path):
    BASE.save(tmp_path / "a.jsonl")
    found = Recording.load(tmp_path / "a.jsonl")
    assert found.rows == BASE.rows and compare(BASE, found).first is None
    odd = of(lambda: note(x=torch.tensor([math.nan, math.inf, 0.0])))
    odd.save(tmp_path / "b.jsonl")
    again = Recording.load(tmp_path / "b.jsonl").rows[0]
    assert again.digest.hash == odd.rows[0].digest.hash and math.isnan(again.digest.largest)
    (tmp_path / "c.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"Recording.load: path must be a file of Recording.save"):
        Recording.load(tmp_path / "c.jsonl")


def test_printed():
    assert re.search(r"^blocks.0.mlp.up: fwd, y +float32\[2, 8, 96\] +[0-9a-f]{16} ", str(BASE), re.M)
    assert "blocks.0.attn.norm: fwd, y" in repr(BASE) and "<pre" in BASE._repr_html_()
    found = compare(BASE, of(step, faulty("blocks.1.mlp.down.weight"), x_of()))
    assert str(found).startswith("first: blocks.1.mlp.down: fwd, y: a relative error of about")
    assert isinstance(found, Comparison) and "values differ" in repr(found) and "<pre" in found._repr_html_()


@pytest.mark.parametrize("path", ["embed.weight", "blocks.0.attn.qkv.k.proj.weight", "blocks.1.mlp.norm.weight", "head.weight"])
def test_a_wrong_weight_is_found_at_its_step(path):
    found = compare(BASE, of(step, faulty(path), x_of()))
    assert found.first.place == f"{path.removesuffix('.weight')}: fwd, y" and not found.only_a and not found.only_b
    assert 1e-4 < found.first.error < 1e-2


def test_by_a_tolerance():
    found = of(step, faulty("blocks.1.mlp.down.weight", 1 + 1e-6), x_of())
    assert compare(BASE, found).first is not None
    assert compare(BASE, found, tolerance="rounding").first is None and compare(BASE, found, tolerance=1e-3).first is None
    assert compare(BASE, found, tolerance=1e-9).first.a.path == "blocks.1.mlp.down"
    with pytest.raises(ValueError, match="compare: tolerance must be None, 'rounding' or a number, got 'near'"):
        compare(BASE, found, tolerance="near")


def test_other_dtypes_are_compared_within_their_rounding():
    low = of(step, trees.cast(PARAMS, torch.bfloat16), x_of(dtype=torch.bfloat16))
    found = compare(BASE, low)
    assert len(found.matched) == len(BASE) and found.first is None
    assert {(one.a.dtype, one.b.dtype) for one in found.matched} >= {("float32", "bfloat16")}
    wrong = trees.cast(faulty("blocks.1.mlp.up.weight", 2.0), torch.bfloat16)
    assert compare(BASE, of(step, wrong, x_of(dtype=torch.bfloat16))).first.place == "blocks.1.mlp.up: fwd, y"


@pytest.mark.parametrize("policy", ["save_all", "recompute_norms", "minimal", "offload_block_inputs"])
def test_policies_have_the_same_bits(policy):
    op = with_policy(chain, policy)
    found = compare(BASE, of(step, PARAMS, x_of(), op))
    assert found.first is None and {row.half for row in [*found.only_a, *found.only_b]} <= {"recompute"}
    assert compare(BASE, of(step, faulty("blocks.1.mlp.up.weight"), x_of(), op)).first.place == "blocks.1.mlp.up: fwd, y"


def test_a_fused_call_is_compared_at_the_values_of_both(monkeypatch):
    monkeypatch.setattr(rules, "FEW", 1)
    model = decoder(SIZES, loss=True)
    fused = of(step, PARAMS, x_of(), chain, model)
    assert any("+" in row.ran for row in fused.rows)
    found = compare(BASE, fused, tolerance="rounding")
    assert found.first is None and len(found.matched) > 0.9 * len(BASE)
    wrong = of(step, faulty("blocks.1.attn.qkv.k.proj.weight"), x_of(), chain, model)
    assert compare(BASE, wrong, tolerance=1e-5).first.place == "blocks.1.attn.qkv.k.proj: fwd, y"


def test_halves_and_microbatches():
    def in_halves():
        y, residuals = chain.fwd(PARAMS, x_of(), MODEL)
        _, pending = chain.dgrad(residuals, torch.ones(()), MODEL)
        chain.wgrad(pending, MODEL)

    assert compare(BASE, of(in_halves)).first is None

    def joined():
        y, residuals = chain.fwd(PARAMS, x_of(), MODEL)
        batch_wgrads(chain, [chain.dgrad(residuals, torch.ones(()), MODEL)[1]], MODEL)

    sums = {row.path for row in of(joined).rows if row.half == "wgrad" and row.name == "sums.weight"}
    assert sums == {row.path for row in BASE.rows if row.half == "wgrad"}
    xs = [x_of(IDS.roll(m, 1)) for m in range(3)]
    ones = [torch.ones(())] * 3
    ran = of(run, one_f_one_b(len(MODEL.steps), 3), PARAMS, xs, MODEL, ones)
    found = compare(of(lambda: [step(PARAMS, x) for x in xs]), ran)
    assert found.first is None and {one.a.turn for one in found.matched} == {0, 1, 2}
    assert {row.half for row in found.only_a} <= {"wgrad", "recompute"}, "in a pipeline weight gradients are summed"


def test_graphs():
    with recording():
        graph = graphed(step, PARAMS, x_of())
    assert compare(BASE, of(graph, PARAMS, x_of())).first is None
    found = compare(BASE, of(graph, faulty("blocks.0.mlp.up.weight"), x_of()))
    assert found.first.place == "blocks.0.mlp.up: fwd, y" and len(found.matched) == len(BASE)


def test_what_is_recomputed_again_to_other_bits():
    def rows(*values):
        def told():
            for value in values:
                with named_scope("a", "recompute"):
                    note(y=torch.tensor(value))

        return of(told)

    assert [row.name for row in rows(1.0, 1.0, 2.0, 3.0).rows] == ["y", "y again", "y again 2"]
    found = compare(rows(1.0), rows(1.0, 2.0))
    assert found.first.b.name == "y again" and not found.only_b
    assert compare(rows(1.0, 2.0), rows(1.0)).first.a.name == "y again" and compare(rows(1.0), rows(1.0, 1.0)).first is None


@pytest.mark.slow
def test_compiled():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compare(BASE, of(compiled, PARAMS, x_of()), tolerance="rounding")
    assert found.first is None and len(found.matched) > 0.9 * len(BASE)
    wrong = compare(BASE, of(compiled, faulty("blocks.1.mlp.up.weight"), x_of()), tolerance=1e-5)
    assert wrong.first.place == "blocks.1.mlp.up: fwd, y"


OPTIMIZERS = {
    "adamw": (adamw_init, adamw_update, AdamWConfig()),
    "sgd": (sgd_init, sgd_update, SGDConfig(momentum=0.9)),
    "muon": (muon_init, muon_update, MuonConfig()),
}


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("in_place", [False, True])
def test_updates(made, in_place):
    init, update, cfg = made

    def train(scale=1.0):
        params = {"w": torch.ones(4, 4)}
        state = init(params, cfg)
        for _ in range(2):
            with named_scope("optimizer"):
                params, state = update(params, {"w": scale * torch.arange(16.0).view(4, 4)}, state, cfg, in_place=in_place)

    found = of(train)
    assert [row.place for row in found.rows] == ["optimizer: update, params.w", "optimizer: update, params.w, turn 1"]
    assert found.rows[0].digest.hash != found.rows[1].digest.hash and compare(found, of(train)).first is None


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.GELU()

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def test_modules_by_hooks_and_as_traced():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 6)

    def hooked():
        with recording(module=net) as found:
            net(x).sum().backward()
        net.zero_grad()
        return found

    a, b = hooked(), hooked()
    assert compare(a, b).first is None and not net._forward_hooks and not net.up._backward_hooks
    assert {"up: fwd, y", "down: dgrad, dx", "up: wgrad, dparams.weight"} <= {row.place for row in a.rows}
    (made, params), cfg = op_from_module(net, x), TorchConfig()

    def traced():
        y, residuals = made.fwd(params, x, cfg)
        made.bwd(residuals, torch.ones_like(y), cfg)

    found = compare(a, of(traced), tolerance="rounding")
    assert found.first is None and {"up: fwd, y", "down: fwd, y"} <= {one.place for one in found.matched}
    with torch.no_grad():
        net.down.weight[1, 2] += 0.1
    assert compare(a, hooked()).first.place == "down: fwd, y" and compare(of(traced), b).first is not None


def test_names_of_another_library():
    a = of(lambda: [_noted(f"blocks.{i}.mlp", i) for i in range(3)])
    b = of(lambda: [_noted(f"model.layers.{i}.ffn.w2", i) for i in range(3)])
    with pytest.raises(ValueError, match=r"compare: b must be a run with values of a, such as blocks.0.mlp: fwd, y, got one with"):
        compare(a, b)
    assert len(compare(a, b, names={"model.layers.*.ffn.w2": "blocks.*.mlp"}).matched) == 3


def _noted(path, i):
    with named_scope(path, "fwd"):
        note(y=torch.full((2,), float(i)))


def test_the_first_that_is_not_finite():
    huge = faulty("blocks.1.mlp.up.weight", math.inf)
    found = of(step, huge, x_of())
    assert BASE.first_nonfinite() is None and found.first_nonfinite().place == "blocks.1.mlp.up: fwd, y"
    with (
        pytest.raises(NonFiniteError, match=r"blocks.1.mlp.up: fwd, y must be finite") as raised,
        recording(stop_at_nonfinite=True) as run,
    ):
        step(huge, x_of())
    assert raised.value.place == "blocks.1.mlp.up: fwd, y" and not raised.value.values["y"].isfinite().all()
    assert torch.equal(trees.tensors(raised.value.residuals)[0], trees.at(huge, "blocks.1.mlp.up.weight")) or trees.tensors(
        raised.value.residuals
    )
    assert run.rows[-1].place == raised.value.place and not scopes.on and not notes.takers


def test_a_backward_that_is_not_finite():
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("cap", softcap, SoftcapConfig(30.0))))
    params = chain.init(cfg, key=random.key(0))

    def backward():
        y, residuals = chain.fwd(params, torch.ones(2, 4), cfg)
        chain.bwd(residuals, torch.full_like(y, math.nan), cfg)

    assert of(backward).first_nonfinite().place == "cap: dgrad, dy"


def test_nested_recordings_and_threads():
    with recording() as outer:
        step(PARAMS, x_of())
        with recording() as inner:
            step(PARAMS, x_of())
    assert compare(BASE, outer).first is None and compare(BASE, inner).first is None and len(inner) == len(outer) == len(BASE)


def test_ranks_in_order():
    """The first difference is the first in the order of execution, whichever rank has it."""

    def on(rank, wrong):
        return of(lambda: [_noted(f"step{i}", i + 0.5 * (wrong == (rank, i))) for i in range(4)])

    a = [on(rank, None) for rank in range(2)]
    found = compare(a, [on(rank, (1, 2)) for rank in range(2)])
    assert (found.first.rank, found.first.place) == (1, "step2: fwd, y") and "on rank 1" in str(found.first)
    with pytest.raises(ValueError, match="recordings of 2 ranks, as a is, got 3"):
        compare(a, [*a, a[0]])


def test_grows():
    a = of(lambda: [_noted(f"step{i}", 1) for i in range(6)])
    b = of(lambda: [_noted(f"step{i}", 1 + e) for i, e in enumerate((0, 1e-5, 2e-5, 1e-2, 1e-2, 0.5))])
    found = compare(a, b)
    assert [one.a.path for one in found.grows] == ["step1", "step3", "step5"] and len(found.differing) == 5


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    found = compare(BASE, of(step, faulty("blocks.1.mlp.down.weight"), x_of()))
    figure = found.plot(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml") and figure.axes[0].get_xscale() == "log"
    assert {line.get_label() for line in figure.axes[0].lines} >= {"fwd", "dgrad", "wgrad", "recompute"}


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"recording: like\[0\] must be Recording"):
        recording(like=[3])
    with pytest.raises(TypeError, match="recording: module must be Module"):
        recording(module=3)
    with pytest.raises(TypeError, match="compare: b must be Recording"):
        compare(BASE, [3])
    assert isinstance(BASE.rows[0], Recorded)


def test_a_scale_without_a_program_is_told_by_its_chain():
    cfg = ChainConfig(steps=(Step("a", scale, ScaleConfig(2.0)),))
    assert [row.place for row in of(lambda: chain.fwd({"a": None}, torch.ones(2), cfg)).rows] == ["a: fwd, y"]
