"""A fault in one output of one call, of any op, rule and half, from one unit in the last place to 10 %, is found at its call and
half; and equal runs have no difference.

The models come from the table of meetings, in all the ways in which it calls a step.
"""

import functools
import random
import sys
from pathlib import Path

import pytest
import torch
from planted_faults import Plan, Site, planted

sys.path.insert(0, str(Path(__file__).parents[1] / "meetings"))
from meeting_features import Meeting
from meeting_steps import of_rank

from funcops import (
    AddConfig,
    ChainConfig,
    LinearConfig,
    ParallelConfig,
    RopeConfig,
    Step,
    add,
    chain,
    compare,
    linear,
    named_scope,
    parallel,
    recording,
    value_and_grad,
)
from funcops import random as keys
from funcops.engine.program import rules
from funcops.models import DecoderConfig, decoder, decoder_x
from funcops.testing import run_ranks

MODELS = [
    (), ("moe",), ("lora",), ("packed",), ("window",), ("fp8_current",), ("fp8_delayed",), ("fp8_block",), ("mxfp8",), ("nvfp4",),
    ("tp",), ("sp",), ("cp",), ("ep",), ("zero3",), ("pipeline",), ("save_all",), ("recompute_norms",), ("minimal",), ("compress",),
    ("recompute",), ("delayed",), ("donate",), ("differentiable",), ("moe", "lora"), ("fp8_current", "lora", "tp"),
    ("packed", "minimal", "moe"), ("delayed", "donate", "mxfp8"), ("batch",), ("zero3", "moe"), ("tied",),
]  # fmt: skip
SIZES = (None, 1e-6, 1e-3, 0.1)  # None: one unit in the last place
EACH, FIRST = 18, ((), ("moe", "lora"), ("fp8_current", "lora", "tp"))
CASES = [pytest.param(model, EACH, id="-".join(model) or "decoder", marks=pytest.mark.slow) for model in MODELS]


class Tied:
    """A decoder whose head is its embedding, and an input with several readers: gradients that are summed."""

    mesh = {}

    def __init__(self):
        kinds = dict(layers=2, heads=2, kv_heads=1, head_size=16, hidden=48, context=8, rope=RopeConfig(16), tied=True)
        sizes = DecoderConfig(vocab=32, dim=32, **kinds)
        ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
        self.x = decoder_x(sizes, ids, torch.float32, labels=ids.roll(-1, 1))
        self.model = decoder(sizes, loss=True)
        self.params = chain.init(self.model, key=keys.key(0))
        branches = tuple(Step(name, linear, LinearConfig(8, 8)) for name in "ab")
        steps = (Step("fan", parallel, ParallelConfig(branches=branches)), Step("sum", add, AddConfig()))
        self.fan = ChainConfig(steps=(Step("first", linear, LinearConfig(8, 8)), *steps))
        self.weights = chain.init(self.fan, key=keys.key(1))

    def step(self):
        value_and_grad(chain)(self.params, self.x, self.model)
        with named_scope("fan"):
            y, residuals = chain.fwd(self.weights, torch.linspace(-1, 1, 16).view(2, 8), self.fan)
            chain.bwd(residuals, y, self.fan)


def step_of(meeting, mesh):
    return meeting.step() if isinstance(meeting, Tied) else of_rank(meeting, mesh)


def ran(meeting, plan, rank):
    """The recordings of all ranks of a step, with the plan's fault on one of them."""
    found = {}

    def one(mesh):
        number = 0 if mesh is None else mesh.rank
        plan.follow(number == rank)
        with recording() as found[number]:
            step_of(meeting, mesh)

    with planted(plan):
        run_ranks({"tp": 1, **meeting.mesh}, one) if meeting.mesh else one(None)
    return [found[number] for number in sorted(found)]


@functools.cache
def reference(model):
    """A run without a fault, for each rank the sites of faults, and whether a second run equals it."""
    meeting = Tied() if model == ("tied",) else Meeting(*model)
    ran(meeting, Plan(), 0)  # what is made once for all runs, such as first amaxes
    ranks = max(1, functools.reduce(lambda a, b: a * b, meeting.mesh.values(), 1))
    plans = [Plan() for _ in range(ranks)]
    runs = [ran(meeting, plan, rank) for rank, plan in enumerate(plans)]
    for other in runs[1:] or [ran(meeting, Plan(), 0)]:
        assert compare(runs[0], other).first is None
    return meeting, runs[0], [plan.sites for plan in plans]


def missed(model, count, seed=0):
    """The faults, of so many drawn ones, that were not found at their call and half."""
    return of_reference(*reference(model), model, count, seed)


def of_reference(meeting, want, sites, model, count, seed):
    draw, wrong = random.Random(f"{model} {seed}"), []
    for _ in range(count):
        rank = draw.randrange(len(want))
        chosen, size = draw.randrange(len(sites[rank])), draw.choice(SIZES)
        plan = Plan(chosen, size, draw.randrange(1000))
        got = ran(meeting, plan, rank)
        first = compare(want, got).first
        right = first is not None and first.a.half == plan.changed.half and first.rank in (None, rank)
        if not right or plan.changed.path not in (first.a.path, first.b.ran):
            wrong.append(f"{'-'.join(model)}: {plan.changed} by {size} on rank {rank}: {first}")
    return wrong


@pytest.mark.parametrize(("model", "count"), [*[(model, 2) for model in FIRST[:1]], *CASES])
def test_a_fault_is_found_at_its_call_and_half(model, count):
    wrong = missed(model, count)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ("moe",), ("lora", "delayed"), ("minimal",), ("tp",)], ids=str)
def test_a_fault_of_a_fused_call_is_found_at_that_call(model, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 1)  # elements, from which on rules run on the CPU
    found = reference.__wrapped__(model)
    assert any("+" in site.path for site in found[2][0])
    wrong = of_reference(*found, model, EACH, 1)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", ["embed: wgrad, tied.weight", "blocks.1.attn.qkv.v.proj: dgrad, sum", "fan.fan.b: dgrad, sum"])
def test_sums_of_gradients_are_values_of_their_own(place):
    """A tied param has one, and a value with several readers: the last output at that path and half is changed."""
    meeting, want, (sites,) = reference(("tied",))
    path, half = place.split(", ")[0].split(": ")
    got = ran(meeting, Plan(max(i for i, site in enumerate(sites) if site == Site(path, half)), 1e-3), 0)
    assert compare(want, got).first.place == place


def test_there_are_enough_faults():
    assert len(MODELS) * EACH >= 500


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=["-".join(model) or "decoder" for model in MODELS])
def test_equal_runs_have_no_difference(model):
    meeting, want, _ = reference(model)
    for _ in range(EACH):
        assert compare(want, ran(meeting, Plan(), 0)).first is None


def test_a_run_without_its_last_line_would_miss_faults(monkeypatch):
    """These tests can fail: if the weight gradients are not told, their faults are not found."""
    from funcops.engine.program import noted

    monkeypatch.setattr(noted, "_of_weights", lambda *given: "")
    meeting = Meeting()
    want = ran(meeting, plan := Plan(), 0)
    chosen = next(i for i, site in enumerate(plan.sites) if site.half == "wgrad" and site.path.endswith("up"))
    assert compare(want, ran(meeting, Plan(chosen), 0)).first is None
