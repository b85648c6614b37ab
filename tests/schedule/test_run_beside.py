"""Schedules captured as one graph, a branch for each rank: the bits of `run` in any order that the graph allows, planted hazards,
bytes, and what a replay costs in Python."""

import itertools
import random as rng_of
import re
import sys

import drawn
import pytest
import torch
from staged import USER, decoder, linears, microbatches, routed_stages, stages_of_modules

from funcops import CaptureError, Needs, WithExtras, chain, named_steps, random, stages_from_module
from funcops.adapters.graphs import beside, branches
from funcops.adapters.graphs.without_gpu.recorder import Recording, numbers_in
from funcops.engine.trees import cast, tensors, tree_map_tensors
from funcops.graphs import graph_data, graphed, run_beside, schedule_memory, when
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_factor, global_norm
from funcops.precision import all_finite
from funcops.schedule import Costs, Schedule, dualpipe_v, gpipe, measure_stages, one_f_one_b, run, simulate, zb_h1, zb_v
from funcops.schedule.actions import needs
from funcops.schedule.run import Pass

SIZES = {"stages": range(2, 9), "microbatches": range(2, 17)}


def permuted(recording, rng):
    """Another order in which the graph allows its operators to run."""
    calls = recording.calls
    makers = {number: i for i, call in enumerate(calls) for number in call.results}
    after = [{makers[n] for n in numbers_in([call.args, call.kwargs])}.union(call.before) for call in calls]
    left, readers = list(map(len, after)), [[] for _ in calls]
    for i, before in enumerate(after):
        for n in before:
            readers[n].append(i)
    ready, order = [i for i, n in enumerate(left) if not n], []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for reader in readers[order[-1]]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    assert len(order) == len(calls)
    return order


def same(got, want):
    pairs = list(zip(tensors(got), tensors(want), strict=True))
    return pairs and all(torch.equal(a, b) for a, b in pairs)


def model(kind, made):
    """A chain of as many stages as the schedule has, params, microbatches, and the other arguments of `run`."""
    stages, count = made.stages, made.microbatches
    if kind == "linears":
        cfg, params, xs, dys = linears(made)
        return cfg, params, xs, {"dys": dys}
    if kind == "outputs":
        cfg, params, xs = routed_stages(stages)
        return cfg, params, [xs[m % len(xs)] for m in range(count)], {"losses": ("loss0", f"logits{stages - 1}")}
    if kind == "modules":
        xs = list(torch.randn(count, 3, 8, dtype=torch.float64))
        cfg, params = stages_from_module(stages_of_modules(stages), xs[0], [str(i) for i in range(1, stages)])
        return cfg, params, xs, {"dys": xs}
    cfg = decoder(stages, keyed=kind == "keyed")
    params, given = chain.init(cfg, key=random.key(1)), {}
    if kind == "narrow":
        params = tree_map_tensors(lambda t: t.bfloat16(), params)
        given = {"into": tree_map_tensors(lambda t: torch.zeros_like(t, dtype=torch.float32), params)}
    if kind == "frozen":
        given = {"needs": Needs(x=False, params=("s1",))}
    return cfg, params, microbatches(count, cfg), given


KINDS = ("decoder", "linears", "keyed", "narrow", "frozen", "outputs", "modules")


def fits(made):
    return made.stages in SIZES["stages"] and made.microbatches in SIZES["microbatches"]


def schedules(seed, count):
    """So many schedules of 2 to 8 stages and 2 to 16 microbatches: of all generators in turn, and free ones."""
    rng, turns, found = rng_of.Random(seed), itertools.cycle((*drawn.GENERATORS, None)), []
    for generator in turns:
        while True:
            made = drawn.free(rng) if generator is None else drawn.generated(generator, rng)
            if fits(made):
                break
        found.append(made)
        if len(found) == count:
            return found


def captured(made, cfg, params, xs, given, warmup=0):
    """The step as one graph, and its recording."""
    into = given.get("into")
    step = graphed(lambda params, xs: run_beside(made, params, xs, cfg, **given)[:3], params, xs, state=into, warmup=warmup)
    return step, step._slots[0].graphs["call"].recording


def check(made, kind, seed):
    cfg, params, xs, given = model(kind, made)
    ran = run(made, params, xs, cfg, **given)
    want = tree_map_tensors(torch.clone, ran[:3])
    step, recording = captured(made, cfg, params, xs, given)
    rng = rng_of.Random(seed)
    for order in (recording.order, permuted(recording, rng), permuted(recording, rng)):
        recording.order = order
        for t in tensors(given.get("into")):
            t.zero_()
        assert same(step(params, xs), want), (made.name, kind)
    wide = graph_data(step).width
    assert wide > 1 or len(made.ranks) == 1 or made.microbatches == 1
    return wide


@pytest.mark.turns("kind", every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_schedule_has_the_bits_of_run(kind):
    check({"outputs": zb_v, "modules": zb_v}.get(kind, dualpipe_v)(2, 4), kind, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_every_generator_has_the_bits_of_run_in_permuted_orders(seed):
    for i, made in enumerate(schedules(seed, 9)):
        check(made, KINDS[(i + seed) % len(KINDS)], seed)


def test_csv_plans_and_ties_within_a_rank():
    check(Schedule.from_csv(USER), "decoder", 0)
    made, cfg = zb_v(2, 3), decoder(4, ties={"s3.head.weight": "s0.embed.weight"})
    params, xs = chain.init(cfg, key=random.key(0)), microbatches(3, cfg)
    assert same(captured(made, cfg, params, xs, {})[0](params, xs), run(made, params, xs, cfg)[:3])
    said = "run_beside: cfg.ties must be between stages of one rank (as the first and the last of zb_v and dualpipe_v are), got "
    with pytest.raises(ValueError, match="^" + re.escape(f"{said}s3.head.weight on rank 3")):
        run_beside(zb_h1(4, 3), params, xs, cfg)
    with pytest.raises(ValueError, match="run_beside: xs must be a list of 3, one a microbatch of the schedule, got 1"):
        run_beside(made, params, xs[:1], cfg)


def test_a_stage_runs_beside_another_as_the_schedule_says():
    """Some wgrad may run at the same time as a dgrad of another stage, and every forward after what it needs."""
    made = zb_v(2, 4)
    cfg, params, xs, given = model("decoder", made)
    with named_steps():
        _, recording = captured(made, cfg, params, xs, given)
    masks = branches.reached([call.before for call in recording.calls])
    halves = {(half, i): call.branch for i, call in enumerate(recording.calls) if (half := call.label.half) in ("dgrad", "wgrad")}
    apart = [
        (i, j)
        for (a, i), one in halves.items()
        for (b, j), other in halves.items()
        if a == "wgrad" and b == "dgrad" and one != other and not (masks[i] >> j & 1 or masks[j] >> i & 1)
    ]
    assert apart


def before_each(made, alone=None, astray=None):
    """The actions that must run before each one, worked out on sets; and each branch's actions. `alone`: one that does not wait
    for other branches; `astray`: one in a branch of its own, for which its rank does not wait."""
    found, lanes, tails, earlier = {}, {}, [[] for _ in made.ranks], [[] for _ in made.ranks]
    done = {}  # the action that gives a message
    for rank, action in made.order():
        paired = action in made.together
        follows = earlier[rank] if paired else tails[rank]
        lane = lanes.setdefault((rank, paired, action == astray), [])
        asked = [*follows, *(done[need] for need in needs(action, made.stages - 1))] if action != alone else []
        found[action] = set()
        for one in (*asked, *lane[-1:]):
            found[action] |= {one, *found[one]}
        lane.append(action)
        if action.kind != "W":
            done[action._replace(kind="I") if action.kind == "B" else action] = action
        if action != astray:
            earlier[rank], tails[rank] = follows, [*tails[rank], action] if paired else [action]
    return found, list(lanes.values())


def sender_of(made, action):
    """The action of another rank that sends what this one reads, if there is one."""
    stage = action.stage + {"F": -1, "W": 0}.get(action.kind, 1)
    if not 0 <= stage < made.stages or made.rank_of[stage] == made.rank_of[action.stage]:
        return None
    kinds = "F" if action.kind == "F" else "IB"
    return next(a for a in made.ranks[made.rank_of[stage]] if a[0] == stage and a[2] == action[2] and a.kind in kinds)


class MissingJoin:
    """An action does not wait for the rank that sends it its input."""

    def of(self, made):
        return [a for _, a in made.order() if (s := sender_of(made, a)) and s not in before_each(made, alone=a)[0][a]]

    def plant(self, patch, chosen):
        act = beside._Ranks.act

        def without(ranks, rank, action):
            with pytest.MonkeyPatch.context() as inner:
                if action == chosen:
                    inner.setattr(branches.branch, "wait", lambda block: None)
                act(ranks, rank, action)

        patch.setattr(beside._Ranks, "act", without)


class ReusedEarly:
    """A message is not kept until its sender knows that it was read, and the sender's branch gets memory before."""

    def of(self, made):
        before, lanes = before_each(made)
        host = {a: i for i, (_, a) in enumerate(made.order())}
        found = []
        for reader in host:
            sender = sender_of(made, reader)
            if sender is not None:
                lane = next(lane for lane in lanes if sender in lane)
                after = [a for a in lane if host[a] > host[reader] and a.kind == "F"]
                found += [reader] if after and reader not in before[after[0]] else []
        return found

    def plant(self, patch, chosen):
        act, keep = beside._Ranks.act, branches._Held.keep

        def careless(ranks, rank, action):
            with pytest.MonkeyPatch.context() as inner:
                if action == chosen:
                    inner.setattr(branches._Held, "keep", lambda held, given: None)
                act(ranks, rank, action)

        assert keep is branches._Held.keep
        patch.setattr(beside._Ranks, "act", careless)


class WrongOrder:
    """A weight gradient runs in a branch of its own, and the rank goes on at once, to the next gradient of the same weights."""

    def of(self, made):
        found = []
        for chosen in [a for _, a in made.order() if a.kind in "WB"]:
            before, _ = before_each(made, astray=chosen)
            later = [a for a in made.ranks[made.rank_of[chosen.stage]] if a.stage == chosen.stage and a.kind in "WB"]
            later = later[later.index(chosen) + 1 :]
            found += [chosen] if any(chosen not in before[a] for a in later) else []
        return found

    def plant(self, patch, chosen):
        act = beside._Ranks.act

        def astray(ranks, rank, action):
            tails = ranks.tails[rank], ranks.before[rank]
            with pytest.MonkeyPatch.context() as inner:
                if action == chosen:
                    inner.setattr(beside, "branch", lambda name: branches.branch(f"{name}, astray"))
                act(ranks, rank, action)
            if action == chosen:
                ranks.tails[rank], ranks.before[rank] = tails

        patch.setattr(beside._Ranks, "act", astray)


def hazardous(hazard, count, seed):
    """Schedules of several ranks, and an action at which this hazard can be planted."""
    rng = rng_of.Random(seed)
    while count:
        made = drawn.generated(rng.choice(drawn.GENERATORS), rng, rng.randint(2, 4))
        if fits(made) and made.stages * made.microbatches < 33 and (places := hazard.of(made)):
            yield made, rng.choice(places)
            count -= 1


def planted(hazard, seed, count, monkeypatch):
    """The number of planted hazards of so many that a capture finds, and of those that it reports where none was planted."""
    found = false = 0
    for made, place in hazardous(hazard, count, seed):
        cfg, params, xs, given = model("linears", made)
        try:
            captured(made, cfg, params, xs, given)
        except CaptureError:
            false += 1
        with monkeypatch.context() as patch:
            hazard.plant(patch, place)
            try:
                captured(made, cfg, params, xs, given)
            except CaptureError as error:
                assert "may run" in str(error), error
                found += 1
    return found, false


HAZARDS = (MissingJoin(), ReusedEarly(), WrongOrder())


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: type(hazard).__name__)
def test_a_planted_hazard_is_found(hazard, monkeypatch):
    assert planted(hazard, 7, 1, monkeypatch) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: type(hazard).__name__)
def test_a_hundred_planted_hazards_are_found(hazard, monkeypatch):
    """And none is reported in as many right captures."""
    assert planted(hazard, 1, 34, monkeypatch) == (34, 0)


def waiting(monkeypatch, block):
    """The bytes of residuals and pendings after each action, by rank, in multiples of `block`, as a list that a run fills."""
    through, found = Pass.through, []

    def noted(self, act):
        def both(rank, action):
            act(rank, action)
            own = {}
            for _, sizes in self.ledgers[rank]._waiting.values():
                own |= sizes
            found.append((rank, sum(-(-size // block) * block for size in own.values())))

        return through(self, both)

    monkeypatch.setattr(Pass, "through", noted)
    return found


@pytest.mark.turns("made", every=4)
@pytest.mark.parametrize("made", [zb_v(2, 6), zb_h1(4, 6), dualpipe_v(2, 5), one_f_one_b(3, 7)], ids=lambda made: made.name)
def test_the_slots_are_the_schedules_liveness(made, monkeypatch):
    """Known before the capture: their number, and the most bytes at once, as the simulator counts them."""
    cfg, params, xs, given = model("decoder", made)
    ahead = schedule_memory(made, params, xs[0], cfg)
    costs = measure_stages(params, xs[0], cfg, repeats=1, block=512)
    assert ahead.peak_bytes == simulate(made, costs).peak_bytes
    sizes = waiting(monkeypatch, 512)
    captured(made, cfg, params, xs, given)
    assert tuple(max(size for of, size in sizes if of == rank) for rank in range(len(made.ranks))) == ahead.peak_bytes
    for stage, most in enumerate(ahead.slots):
        alone = [simulate(made, [_one(i == stage) for i in range(made.stages)]).peak_bytes[made.rank_of[stage]]]
        assert [most] == alone and ahead.slot_bytes[stage] >= costs[stage].residual_bytes


def _one(counts):
    return Costs(residual_bytes=float(counts), pending_bytes=float(counts))


class Alive(branches.TorchDispatchMode):
    """The storages that operators make and that are still alive."""

    runs = True

    def __init__(self):
        super().__init__()
        self.made, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for t in tensors(out):
            storage = t.untyped_storage()
            if storage._cdata not in given:
                self.made[storage._cdata] = branches.StorageWeakRef(storage), storage.nbytes()
        self.made = {key: one for key, one in self.made.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.made.values()))
        return out


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches():
    """A capture lets go of messages as ranks hear of each other: twice the microbatches take no more memory."""
    most = []
    for count in (6, 12):
        cfg, params, xs, given = model("decoder", one_f_one_b(3, count))
        with Alive() as alive:
            captured(one_f_one_b(3, count), cfg, params, xs, given)
        most.append(alive.most)
    assert most[1] < 1.25 * most[0], most


def trained(made, cfg, beside):
    """A step in bfloat16 with float32 masters and accumulators, clipping, AdamW, and no update if a gradient is not finite; and the
    tensors that it writes to, of which the last are the masters."""
    adamw = AdamWConfig(lr=1e-2)
    params = chain.init(cfg, key=random.key(0))
    compute, sums, state = cast(params, torch.bfloat16), tree_map_tensors(torch.zeros_like, params), adamw_init(params, adamw)

    def update(params, state, compute, factor):
        adamw_update(params, sums, state, adamw, factor=factor, into=compute, in_place=True)

    def step(ids, labels, scale):
        for t in tensors(sums):
            t.zero_()
        xs = [WithExtras(x, {"labels": y}) for x, y in zip(ids, labels, strict=True)]
        ran = (run_beside if beside else run)(made, compute, xs, cfg, [scale / len(xs)] * len(xs), into=sums)
        norm = global_norm(sums)
        when(all_finite(norm), update, params, state, compute, clip_factor(norm, 0.5))
        return torch.stack(ran.ys), norm

    return step, (compute, sums, state, params)


def batch(count, seed):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, 11, (2, count, 3, 5), generator=generator)
    return ids, labels, torch.tensor(float("nan") if seed == 2 else 1.0)


@pytest.mark.turns("make")
@pytest.mark.parametrize("make", [zb_v, gpipe])
def test_a_training_step_is_one_graph(make):
    """Accumulators, clipping and the optimiser inside; the third step has a gradient that is not finite, and changes nothing."""
    made = make(2, 4)
    cfg = decoder(made.stages)
    plain, (*_, params) = trained(made, cfg, False)
    inside, state = trained(made, cfg, True)
    own, first = state[-1], tree_map_tensors(torch.clone, state)
    step = graphed(inside, *batch(4, 0), state=state, warmup=2)
    assert same(state, first), "warm-up and capture train nothing"
    for seed in range(5):
        before = tree_map_tensors(torch.clone, own)
        with torch.no_grad():
            want = plain(*batch(4, seed))
        got = step(*batch(4, seed))
        assert all(torch.equal(a, b) or (a.isnan().any() and b.isnan().any()) for a, b in zip(got, want, strict=True))
        assert same(own, params) and same(own, before) is (seed == 2)


def calls_before_the_launch(step, *given):
    """The calls of Python functions between the call of a replay and the launch: on a device, of the driver."""
    count, launch = 0, Recording.replay_part.__wrapped__.__code__

    def note(frame, event, _):
        nonlocal count
        if event == "call":
            if frame.f_code is launch:
                sys.setprofile(None)
            count += 1

    sys.setprofile(note)
    try:
        step(*given)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("sizes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_replay_calls_little_python_however_many_microbatches(sizes):
    found = []
    for count in (2, 3, 16)[:sizes]:
        step, state = trained(zb_v(2, count), decoder(4), True)
        found.append(calls_before_the_launch(graphed(step, *batch(count, 0), state=state, warmup=0), *batch(count, 1)))
    assert len(set(found)) == 1 and found[0] <= 40, found
