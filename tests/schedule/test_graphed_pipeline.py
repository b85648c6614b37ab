"""`Pipeline(graphed=True)`: graphs between messages, on threads over a strict network and on four Gloo processes."""

import json
import random as rng_of
import re
import subprocess
import sys
from pathlib import Path

import drawn
import pytest
import torch
import torch.distributed as dist
from rendezvous import on_threads
from staged import decoder, linears, microbatches, routed_stages

from funcops import CaptureError, chain, random
from funcops.adapters.pipelining import Pipeline, captured, segments
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.graphs import graphed
from funcops.schedule import Action, Schedule, one_f_one_b, run, zb_v
from funcops.schedule.exchange import Exchange
from funcops.testing.checks import same_bits

SCRIPT = Path(__file__).with_name("two_ranks.py")


def pipelined(made, steps=3):
    """Each rank has the bits of `run`, in steps with other values."""
    cfg, params, xs, dys = linears(made)
    given = [[x * (1 + step) for x in xs] for step in range(steps)]
    want = [run(made, params, own, cfg, dys) for own in given]

    def work(rank):
        pipeline = Pipeline(made, cfg, xs[0], graphed=True)
        own = {name: params[name] for name in pipeline.names}
        for values, wanted in zip(given, want, strict=True):
            ys, dparams, dxs, _ = pipeline.step(own, values, dys)
            same_bits(dparams, {name: wanted.dparams[name] for name in pipeline.names}, f"of {made}")
            for here, found, expected in ((0 in pipeline.runtime.stages, dxs, wanted.dxs), (ys is not None, ys, wanted.ys)):
                if here:
                    same_bits(found, expected, f"of {made}")
        return pipeline._graphs

    return on_threads(len(made.ranks), work)[0]


@pytest.mark.parametrize("made", [zb_v(2, 4)], ids=lambda made: made.name)
def test_graphs_between_messages_have_the_bits_of_run(made):
    """A graph is cut only where the schedule waits or sends, and buffers of messages are used again."""
    for rank, graphs in enumerate(pipelined(made)):
        assert 1 < len(graphs.graphs) < len(made.ranks[rank])
        assert len({id(values) for values in graphs.buffers.values()}) < len(graphs.buffers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_drawn_schedules_as_graphs_have_the_bits_of_run(seed):
    for made in drawn.every(seed, 9):
        pipelined(made, steps=2)


class Planted:
    """Faults in the buffers of a rank's messages."""

    @staticmethod
    def reused_early(turns, buffers, rng):
        """Two messages of one kind have one buffer; None if no two are under way at once."""
        alive, pairs, flying = {}, [], set()
        for turn in turns:
            if isinstance(turn, Exchange):
                flying |= set(turn.receives)
            else:
                flying = (flying - set(turn.arrived)) | set(turn.sends)
                pairs += [(a, b) for a in flying for b in flying if a < b and (a.kind, a.stage) == (b.kind, b.stage)]
                flying -= {turn.takes}
        assert not alive
        if not pairs:
            return None
        first, second = rng.choice(pairs)
        return turns, buffers | {second: buffers[first]}

    @staticmethod
    def missing_wait(turns, buffers, rng):
        """A graph does not wait for the message that it takes."""
        places = [i for i, turn in enumerate(turns) if not isinstance(turn, Exchange) and turn.takes is not None]
        if not places:
            return None
        i = rng.choice(places)
        return [*turns[:i], turns[i]._replace(takes=None), *turns[i + 1 :]], buffers

    @staticmethod
    def wrong_order(turns, buffers, rng):
        """Messages are sent before the graph that makes them."""
        sending = [i for i, turn in enumerate(turns) if isinstance(turn, Exchange) and turn.sends]
        places = [i for i in sending if i and set(turns[i].sends) & set(getattr(turns[i - 1], "sends", ()))]
        if not places:
            return None
        i = rng.choice(places)
        return [*turns[: i - 1], turns[i], turns[i - 1], *turns[i + 1 :]], buffers


def planted(fault, count, seed):
    """How many of so many faults the check finds, and how often it reports one where none was planted."""
    rng, found, false, left = rng_of.Random(seed), 0, 0, count
    while left:
        made = drawn.generated(rng.choice(drawn.GENERATORS), rng, rng.randint(2, 4))
        if made.microbatches < 3 or made.stages > 8:
            continue
        for graphs in pipelined(made, steps=1):
            touched = [captured._touched(graph) for graph in graphs.graphs]
            try:
                segments.check_buffers(graphs.turns, graphs.buffers, touched)
            except CaptureError:
                false += 1
            wrong = getattr(Planted, fault)(graphs.turns, graphs.buffers, rng)
            if wrong is None or not left:
                continue
            left -= 1
            try:
                segments.check_buffers(*wrong, touched)
            except CaptureError as error:
                assert "the buffer of message" in str(error)
                found += 1
    return found, false


FAULTS = ("reused_early", "missing_wait", "wrong_order")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_messages_is_found(fault):
    assert planted(fault, 2, 3) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_messages_are_found(fault):
    assert planted(fault, 34, 4) == (34, 0)


def test_buffers_that_a_graph_touches_while_they_are_on_their_way():
    """The check knows what each graph reads and writes, not only what the plan says."""
    made = one_f_one_b(2, 3)
    graphs = pipelined(made, steps=1)[0]
    touched = [captured._touched(graph) for graph in graphs.graphs]
    key = tensors(graphs.buffers[graphs.turns[0].sends[0]])[0].untyped_storage()._cdata
    later = next(i for i, one in enumerate(touched) if i and key not in one.reads | one.writes)
    touched[later] = touched[later]._replace(writes=touched[later].writes | {key})
    with pytest.raises(CaptureError, match=r"the buffer of message 0F0, (going|here), must be left alone, got a use of it"):
        segments.check_buffers(graphs.turns, graphs.buffers, touched)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


IN_TURN = Schedule.from_csv("0F0,0F1,1F0,1B0,1F1,1B1,0B0,0B1")


def test_accumulators_done_and_what_a_step_must_not_change(alone):
    cfg = decoder(2)
    params, xs = chain.init(cfg, key=random.key(0)), microbatches(2, cfg)
    pipeline, eager = (Pipeline(IN_TURN, cfg, xs[0], graphed=one) for one in (True, False))
    sums, want = (tree_map_tensors(torch.zeros_like, params) for _ in range(2))
    for step in range(2):
        told, version = [], sums["s0"]["embed"].weight._version
        found = pipeline.step(params, xs, into=sums, done=lambda stage, own, told=told: told.append((stage, own)))
        expected = eager.step(params, xs, into=want)
        same_bits(found[:3], expected[:3], f"of step {step}")
        assert found.dparams["s0"]["embed"].weight is sums["s0"]["embed"].weight
        assert [stage for stage, _ in told] == [1, 0]
        assert sums["s0"]["embed"].weight._version > version, "torch does not see what a replay writes"
    with pytest.raises(ValueError, match="Pipeline.step: into must be given where done is, .* got None: a reduction"):
        pipeline.step(params, xs, done=lambda stage, own: None)
    with pytest.raises(ValueError, match="Pipeline.step: losses must be"):
        pipeline.step(params, xs, into=sums, losses=("lost",))
    with pytest.raises(ValueError, match=r"input 0.params.s0.embed.weight must be at its captured address \(pinned\)"):
        pipeline.step(tree_map_tensors(torch.clone, params), xs, into=sums)
    with pytest.raises(ValueError, match="inputs must be as captured"):
        pipeline.step(params, xs)
    with pytest.raises(TypeError, match="Pipeline: graphed must be"):
        Pipeline(IN_TURN, cfg, xs[0], graphed="yes")
    got, expected = pipeline.step(params, xs, into=sums), eager.step(params, xs, into=want)
    same_bits(got[:3], expected[:3], "after what was refused")


def test_a_gradient_that_is_none_is_sent_as_zeros():
    """Over what the buffer held before."""
    message = Action(1, "I", 0)
    static = captured.StaticMessages({message: (torch.ones(2), None)})
    static.put(message, (None, None))
    assert static.take(message)[0][0].tolist() == [0.0, 0.0] and static.take(message)[0][1] is None
    static.put(message, (torch.full((2,), 3.0), None))
    assert static.take(message)[0][0].tolist() == [3.0, 3.0]


def test_outputs_of_stages_and_losses(alone):
    cfg, params, xs = routed_stages(2)
    pipeline, eager = (Pipeline(IN_TURN, cfg, xs[0], dtype=torch.float64, graphed=one) for one in (True, False))
    for values in (xs[:2], xs[2:4]):
        got, want = (one.step(params, values, losses=("loss0",)) for one in (pipeline, eager))
        same_bits(got[:3], want[:3], "with a loss of a stage")


@pytest.mark.slow
def test_the_examples_of_the_page_run_as_graphs(monkeypatch):
    """Every `Pipeline` of the page, and its backward written by hand."""
    text = (SCRIPT.parents[2] / "docs" / "schedules-in-depth.md").read_text()
    made, init = [], Pipeline.__init__

    def graphed_too(self, *args, graphed=True, **options):
        init(self, *args, graphed=graphed, **options)
        made.append(self)

    monkeypatch.setattr(Pipeline, "__init__", graphed_too)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M):
        if "ScheduleZBVZeroBubble" not in block:  # torch's own schedules, of modules
            exec(compile(block, "schedules-in-depth.md", "exec"), names)
    dist.destroy_process_group()
    assert made and all(pipeline._graphs is not None for pipeline in made)
    for budget in (float("inf"), 130_000):
        step = graphed(lambda budget=budget: names["backward_within"](budget)[0], state=(names["params"], names["x"]), warmup=1)
        same_bits(step(), names["backward_within"](budget)[0], f"within {budget}")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The lines of each of four processes, by mode."""
    folder, modes = tmp_path_factory.mktemp("four"), ("graphed", "raises", "stops")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *(f"4:{mode}" for mode in modes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    errors = {path.name: path.read_text()[-2000:] for path in folder.glob("*.err")}
    assert set(json.loads(done.stdout).values()) == {0}, errors
    return {mode: [(folder / f"{mode}-{rank}.out").read_text().splitlines()[1:] for rank in range(4)] for mode in modes}


@pytest.mark.slow
def test_four_processes_have_the_bits_of_the_eager_pipeline(four):
    """Three steps of training each of ZB-V, 1F1B and interleaved zero bubble."""
    assert [[float(line.split()[-1]) for line in lines] for lines in four["graphed"]] == [[0.0] * 3] * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raises", "stops"])
def test_the_others_say_who_failed(mode, four):
    said = {"raises": "rank 2 raised ZeroDivisionError", "stops": "no word of rank 2, which stopped"}[mode]
    for rank in (0, 1, 3):
        (line,) = four[mode][rank]
        assert line.startswith("RuntimeError Pipeline.step: rank ") and f"must send and take its messages, got {said}" in line, line
    assert mode == "stops" or four[mode][2][0].startswith("ZeroDivisionError")
