"""Schedules on the processes of a group: two Gloo processes give the results of one chain, and none hangs if one fails."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from staged import DIM, decoder, gated, microbatches, reference, routed_stages
from torch.distributed.pipelining import PipelineStage, schedules

from funcops import (
    ChainConfig,
    EmbeddingConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    RopeConfig,
    ScaleConfig,
    Step,
    WithExtras,
    chain,
    embedding,
    linear,
    parallel,
    random,
    rms_norm,
    rope,
    scale,
)
from funcops.adapters.pipelining import BucketedMean, Pipeline
from funcops.engine.trees import cast, tree_map_tensors
from funcops.low_precision import NVFP4, Fp8Current, Fp8Delayed, begin_step, with_recipe
from funcops.schedule import Schedule, gpipe, run, zb_v
from funcops.schedule.stage import Stage
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = SCRIPT.parents[2]
SCHEDULES = 8
IN_TURN_OF_FOUR = Schedule.from_csv("0F0,1F0,2F0,3F0,0F1,1F1,3B0,2F1,2I0,3F1,1B0,3I1,3W1,0B0,2W0,2B1,1B1,0B1")
IN_TURN = Schedule.from_csv("0F0,0F1,1F0,1B0,1F1,1B1,0B0,0B1")


LINES = {
    "gradients": 2 * SCHEDULES,
    "curve": SCHEDULES - 2,
    "drawn": 18,
    "leveled": 3,
    "leaves": 18,
    "tied": 2,
    "frozen": 1,
    "logged": SCHEDULES,
    "recorded": SCHEDULES,
    "outputs": 2,
    "reduce": 3,
    "modules": 12,
}


PAIRS = {"whole": [*LINES, "nan", "refused"], "killed": ["frozen", "kill"], "raised": ["raise"]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The output of each rank of each pair, by mode. One process forks them, since importing torch takes longer than most
    modes."""
    folder, pairs = tmp_path_factory.mktemp("ranks"), {name: ",".join(modes) for name, modes in PAIRS.items()}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *pairs.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    codes, found = json.loads(done.stdout), {}
    for name, modes in pairs.items():
        texts = [(folder / f"{modes}-{rank}.out").read_text() for rank in range(2)]
        errors = [(folder / f"{modes}-{rank}.err").read_text()[-3000:] for rank in range(2)]
        assert [codes[f"{modes}-{rank}"] for rank in range(2)] == [0, 9 if name == "killed" else 0], [*texts, *errors]
        parts = [dict(zip(PAIRS[name], text.split("== ")[1:], strict=True)) for text in texts]
        found[name] = {mode: [part[mode].splitlines()[1:] for part in parts] for mode in PAIRS[name]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", LINES)
def test_two_ranks_are_one_process(mode, ranks):
    """GPipe, 1F1B, interleaved ones, ZB-V, DualPipe-V, a delayed one and a user's own text, four stages and eight microbatches:
    gradients within 1e-12, and 20 steps of AdamW on the same curve."""
    for lines in ranks["whole"][mode]:
        assert len(lines) == LINES[mode]
        for line in lines:
            assert float(line.split()[-1]) < 1e-12, line


@pytest.mark.slow
def test_a_nan_ends_all_ranks(ranks):
    for lines in ranks["whole"]["nan"]:
        assert lines[0].startswith("FloatingPointError Pipeline.step: ys and gradients must be finite, got")


@pytest.mark.slow
def test_a_first_step_refused_by_one_rank_ends_on_all(ranks):
    """The rank with the fault says what it is, the other whose it is; both can go on."""
    other, faulty = ranks["whole"]["refused"]
    said = "stage 1: into.mlp.down.weight must be torch.float64 or a wider float dtype, got torch.float32"
    assert faulty[0] == f"TypeError {said}"
    assert other[0] == "RuntimeError Pipeline.step: every rank must be able to begin, got an error on rank 1: see its message"
    assert all(float(lines[1].split()[-1]) < 1e-12 for lines in (other, faulty))


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(ranks):
    assert all(float(line.split()[-1]) < 1e-12 for (line,) in ranks["killed"]["frozen"])
    assert ranks["killed"]["kill"][0][0].startswith(("RuntimeError", "DistBackendError"))


@pytest.mark.slow
def test_an_exception_ends_the_others_by_their_timeout(ranks):
    """The rank that raised stays alive, and the other ends by itself. The error says where it was raised."""
    waiting, raised = ranks["raised"]["raise"]
    assert "rms_norm_fwd: params.weight must be [8], got [1]" in raised[0]
    if sys.version_info >= (3, 11):
        assert "in the forward of stage 1 (s1), microbatch 0" in raised[0]
    assert waiting[0].startswith(("RuntimeError", "DistBackendError"))
    assert all("RuntimeError Pipeline: must not be used after a step that failed" in lines[1] for lines in (waiting, raised))


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_alone(alone):
    cfg = decoder(2, keyed=True)
    params, xs = chain.init(cfg, key=random.key(0), dtype=torch.float64), microbatches(3, cfg)
    losses, want = reference(params, xs, cfg)
    pipeline = Pipeline(zb_v(1, 3), cfg, xs[0], dtype=torch.float64)
    assert pipeline.names == ("s0", "s1")
    ys, dparams, _, peak = pipeline.step(params, xs, check_finite=False)
    assert ys == losses and peak > 0
    assert_close(dparams, want, dtype=torch.float64)
    mean = BucketedMean()
    mean.start(dparams)
    mean.wait()
    assert_close(dparams, want, dtype=torch.float64)


def test_accumulators_are_checked_before_anything_is_sent(alone):
    cfg = decoder(2)
    params, xs = chain.init(cfg, key=random.key(0), dtype=torch.float64), microbatches(3, cfg)
    pipeline, into = Pipeline(zb_v(1, 3), cfg, xs[0], dtype=torch.float64), tree_map_tensors(torch.zeros_like, params)
    shared = {"s0": into["s0"], "s1": into["s1"] | {"mlp": into["s0"]["mlp"]}}
    with pytest.raises(ValueError, match=r"step: into\.s1\.mlp\.\S+ must be a tensor of its own, got memory of into\.s0"):
        pipeline.step(params, xs, into=shared)
    with pytest.raises(TypeError, match=r"stage 1: into\.\S+ must be torch\.float64 or a wider float dtype"):
        pipeline.step(params, xs, into={"s0": into["s0"], "s1": cast(into["s1"], torch.float32)})
    assert pipeline.step(params, xs, into=into).dparams["s1"]["head"].weight is into["s1"]["head"].weight


def test_outputs_of_stages(alone):
    cfg, params, xs = routed_stages()
    xs, losses = xs[:2], ("loss0", "logits3")
    pipeline = Pipeline(IN_TURN_OF_FOUR, cfg, xs[0], dtype=torch.float64)
    ran, stepped = run(IN_TURN_OF_FOUR, params, xs, cfg, losses=losses), pipeline.step(params, xs, losses=losses)
    same_bits((ran.ys, ran.dparams, ran.dxs), (stepped.ys, stepped.dparams, stepped.dxs), "of Pipeline and of run")
    dys = []
    for y in ran.ys:
        given = {name: torch.full_like(t, 0.5) if name in losses else None for name, t in y.extras.items()}
        dys.append(WithExtras(torch.full_like(y.main, 0.5), given))
    same_bits(pipeline.step(params, xs, dys).dparams, ran.dparams, "of dys")
    with pytest.raises(ValueError, match="Pipeline.step: losses must be names of float outputs, got 'load1'"):
        pipeline.step(params, xs, losses=("load1",))


def test_microbatches_in_any_order(alone):
    cfg = decoder(2)
    params, xs = chain.init(cfg, key=random.key(0), dtype=torch.float64), microbatches(2, cfg)
    losses, want = reference(params, xs, cfg)
    made = Schedule.from_csv("0F1,1F1,0F0,1F0,1I0,0B0,1B1,1W0,0B1", "backwards")
    ran, stepped = run(made, params, xs, cfg), Pipeline(made, cfg, xs[0], dtype=torch.float64).step(params, xs)
    for found in (ran, stepped):
        assert found.ys == losses
        assert_close(found.dparams, want, dtype=torch.float64)


def test_the_last_y_may_have_other_dtypes_than_the_example(alone):
    """Nobody receives it, and params of several dtypes are not compared with the example's."""
    tables = tuple(Step(name, embedding, EmbeddingConfig(5, DIM)) for name in ("narrow", "wide"))
    cfg = ChainConfig(steps=(Step("tables", parallel, ParallelConfig(branches=tables)),))
    params, ids = chain.init(cfg, key=random.key(0)), torch.arange(4)
    params["tables"]["wide"] = cast(params["tables"]["wide"], torch.float64)
    y, residuals = chain.fwd(params, ids, cfg)
    found = Pipeline(Schedule.from_csv("0F0,0B0"), cfg, ids).step(params, [ids], [y])
    assert [t.dtype for t in y] == [torch.float32, torch.float64]
    same_bits((found.ys[0], found.dparams), (y, chain.bwd(residuals, y, cfg)[0]), "of Pipeline and of chain")


def test_inputs_are_nobodys_residuals(alone):
    cfg, params, xs, dys = gated()
    made = IN_TURN
    pipeline = Pipeline(made, cfg, xs[0])
    stepped = pipeline.step(params, xs, dys)
    assert stepped.peak_bytes == max(run(made, params, xs, cfg, dys).peak_bytes) == 6 * DIM * 4
    frozen = Pipeline(made, cfg, xs[0], needs=Needs(params=False)).step(params, xs, dys)
    assert frozen.peak_bytes == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["y", "dy", "accumulator"])
def test_values_that_are_not_finite_are_named(place, bad, alone):
    """A finite y with a gradient that is not finite, and the reverse."""
    cfg, params, xs, dys = gated()
    into, needs = {"gate": None, "out": tree_map_tensors(torch.zeros_like, params["out"])}, Needs.ALL
    if place == "y":
        into, needs = None, Needs(params=False)
        xs[1].main[0, 0] = bad
    elif place == "dy":
        dys[1][0, 0] = bad
    else:
        into["out"].weight[0, 0] = bad
    pipeline = Pipeline(IN_TURN, cfg, xs[0], needs=needs)
    where = r"ys\.1" if place == "y" else r"dparams\.out\.weight"
    with pytest.raises(FloatingPointError, match=f"Pipeline.step: ys and gradients must be finite, got {where} on this rank, 0"):
        pipeline.step(params, xs, dys, into=into)
    assert len(pipeline.step(params, xs, dys, check_finite=False).ys) == 2, "it was a whole step"


@pytest.mark.parametrize(("rows", "dtype"), [(5, torch.float32), (7, torch.float32), (6, torch.float64)])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_microbatch_unlike_the_example_is_named(odd, rows, dtype, alone):
    """Another size or dtype than the example's raises before anything runs, and the pipeline can be used afterwards."""
    cfg, params, xs, dys = gated()
    pipeline, good = Pipeline(IN_TURN, cfg, xs[0]), list(xs)
    x, by = torch.randn(2, rows, DIM, dtype=dtype)
    xs[odd] = WithExtras(x, {"by": by})
    name = str(dtype).removeprefix("torch.")
    said = rf"step: microbatch {odd} of xs, main must be float32\[6, 8\], as in the example x, got {name}\[{rows}, 8\]"
    with pytest.raises(ValueError, match=said):
        pipeline.step(params, xs, dys)
    xs[odd] = WithExtras(good[odd].main, {"by": by})
    with pytest.raises(ValueError, match=rf"microbatch {odd} of xs, extras.by must be float32\[6, 8\]"):
        pipeline.step(params, xs, dys)
    assert len(pipeline.step(params, good, dys).ys) == 2


def test_a_microbatch_may_differ_in_leaves_that_are_not_sent(alone):
    """Positions for all rows at once or for each row: the stages do the same with both. Another number of positions raises."""
    turned = Step("turned", rope, RopeConfig(DIM), takes=("at",))
    cfg = ChainConfig(steps=(turned, Step("out", scale, ScaleConfig(2.0))), extras=("at",))
    xs = [WithExtras(x, {"at": torch.arange(5)}) for x in torch.randn(2, 3, 5, 1, DIM)]
    dys, each = [torch.ones(3, 5, 1, DIM)] * 2, WithExtras(xs[1].main, {"at": torch.arange(5).expand(3, 5)})
    params = chain.init(cfg)
    pipeline = Pipeline(IN_TURN, cfg, xs[0])
    same_bits(pipeline.step(params, [xs[0], each], dys).ys, run(IN_TURN, params, xs, cfg, dys).ys, "of positions of each row")
    with pytest.raises(ValueError, match=r"microbatch 1 of xs, extras.at must be int64\[5\], as .* got int64\[4\]"):
        pipeline.step(params, [xs[0], WithExtras(xs[1].main, {"at": torch.arange(4)})], dys)


@pytest.mark.parametrize("recipe", [Fp8Current(), Fp8Delayed(), NVFP4(), NVFP4(stochastic=False)], ids=repr)
def test_recipes_with_scales_and_keys_beside_weights(recipe, alone):
    stages = [Step(name, chain, ChainConfig(steps=(Step("up", linear, LinearConfig(16, 16)),))) for name in ("first", "last")]
    cfg = with_recipe(ChainConfig(steps=tuple(stages)), recipe)
    params, xs, dys = chain.init(cfg, key=random.key(0)), list(torch.randn(2, 16, 16)), list(torch.randn(2, 16, 16))
    work, _ = begin_step(params, cfg, {}, dtype=torch.float32, key=random.key(1))
    got, want = Pipeline(IN_TURN, cfg, xs[0]).step(work, xs, dys), run(IN_TURN, work, xs, cfg, dys)
    same_bits((got.ys, got.dparams), (want.ys, want.dparams), "of one process")


def test_params_of_another_dtype_than_was_told(alone):
    """Whether the dtype comes from the example or not; before any action."""
    cfg = decoder(2)
    xs, wide = microbatches(2, cfg), chain.init(cfg, key=random.key(0), dtype=torch.float64)
    with pytest.raises(ValueError, match="params must be float32, Pipeline's dtype, got float64: make it with dtype=torch.float64"):
        Pipeline(IN_TURN, cfg, xs[0]).step(wide, xs)
    assert len(Pipeline(IN_TURN, cfg, xs[0], dtype=torch.float64).step(wide, xs).ys) == 2
    cfg, params, xs, dys = gated()
    with pytest.raises(ValueError, match=r"Pipeline: dtype must be .*\(try dtype=torch.float64\), got float32: .*linear"):
        Pipeline(IN_TURN, cfg, tree_map_tensors(torch.Tensor.double, xs[0]))
    norms = ChainConfig(steps=tuple(Step(name, rms_norm, rms_norm.config(DIM)) for name in ("s0", "s1")))
    xs, dys = torch.randn(2, 2, 3, DIM).bfloat16()
    stepped = Pipeline(IN_TURN, norms, xs[0], dtype=torch.bfloat16).step(chain.init(norms), list(xs), list(dys))
    assert stepped.ys[0].dtype == torch.bfloat16, "of what float32 weights make as well"


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_gradient_unlike_the_example_is_named(what, alone, monkeypatch):
    cfg, params, xs, dys = gated()
    pipeline = Pipeline(IN_TURN, cfg, xs[0])
    given = Stage.backward

    def backward(self, m, dy, sums):
        dx = given(self, m, dy, sums)
        return dx if self.index != 1 else dx.double() if what == "dtype" else dx[:5]

    monkeypatch.setattr(Stage, "backward", backward)
    got = r"float64\[6, 8\]" if what == "dtype" else r"float32\[5, 8\]"
    with pytest.raises(ValueError, match=rf"dx of stage 1 must be float32\[6, 8\], as with the example x, got {got}"):
        pipeline.step(params, xs, dys)


def test_torch_loads_and_dumps_the_text(alone, tmp_path):
    """The compute-only form, both ways: torch's runtime reads our text, and we read its text."""
    made = Schedule.from_csv("0F0,1F0,1I0,0F1,(1F1;0B0)OVERLAP_F_B,1W0,1B1,0I1,0W1", "mine")
    stages = [PipelineStage(torch.nn.Identity(), i, 2, torch.device("cpu")) for i in range(2)]
    torchs = schedules._PipelineScheduleRuntime(stages, made.microbatches, loss_fn=torch.nn.functional.mse_loss)
    (tmp_path / "mine.csv").write_text(made.to_csv())
    torchs.pipeline_order = {}
    torchs._load_csv(str(tmp_path / "mine.csv"))
    assert [str(action) for action in torchs.pipeline_order[0]] == made.to_csv().strip().split(",")
    torchs._dump_csv(str(tmp_path / "dumped.csv"), format="compute_only")
    assert Schedule.from_csv((tmp_path / "dumped.csv").read_text(), "mine") == made


def test_arguments_that_do_not_fit_are_named(alone):
    cfg = decoder(2)
    params, xs = chain.init(cfg, key=random.key(0)), microbatches(3, cfg)
    with pytest.raises(TypeError, match="Pipeline: schedule must be Schedule, got 'zb_v'"):
        Pipeline("zb_v", cfg, xs[0])
    with pytest.raises(TypeError, match="Pipeline: y of stage 0 must be tensors, to be sent, got 3"):
        pair = scale._replace(fwd=lambda params, x, cfg, *, needs=Needs.ALL: ((x, 3), None))
        first = scale._replace(fwd=lambda params, x, cfg, *, needs=Needs.ALL: (x[0], None))
        steps = Step("pair", pair, ScaleConfig(2.0)), Step("first", first, ScaleConfig(2.0))
        Pipeline(zb_v(1, 3), ChainConfig(steps=steps), torch.ones(2))
    with pytest.raises(ValueError, match="Pipeline: group must be of 2 processes, one a rank of gpipe, got 1"):
        Pipeline(gpipe(2, 3), cfg, xs[0])
    with pytest.raises(ValueError, match="Pipeline: cfg must be a chain of 4 steps, one a stage of the schedule, got 2 steps"):
        Pipeline(Schedule.from_csv("0F0,1F0,2F0,3F0,3B0,2B0,1B0,0B0"), cfg, xs[0])
    pipeline = Pipeline(zb_v(1, 3), cfg, xs[0])
    with pytest.raises(ValueError, match="Pipeline.step: params must be a dict with the stages s0, s1, got one without s1"):
        pipeline.step({"s0": params["s0"]}, xs)
    with pytest.raises(ValueError, match="Pipeline.step: xs must be a list of 3"):
        pipeline.step(params, xs[:1])
    with pytest.raises(ValueError, match="Pipeline.step: dys must be a list of 3, one a microbatch, got 1"):
        pipeline.step(params, xs, [None])
    assert math.isfinite(float(pipeline.step(params, xs).ys[0])), "what is refused before it begins leaves the pipeline whole"
    with pytest.raises(ValueError, match="Pipeline.step: params must be float32, Pipeline's dtype, got float64"):
        pipeline.step(cast(params, torch.float64), xs)
    fails = tree_map_tensors(lambda t: t[:1], params["s1"])
    with pytest.raises(ValueError):
        pipeline.step({"s0": params["s0"], "s1": fails}, xs)
    with pytest.raises(RuntimeError, match="must not be used after a step that failed"):
        pipeline.step(params, xs)
    with pytest.raises(ValueError, match="BucketedMean: bucket_bytes must be above 0, got 0"):
        BucketedMean(bucket_bytes=0)
