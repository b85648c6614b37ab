"""Rules of a policy for some layers of a repeat: drawn rules leave the bits of all gradients alone, each layer keeps what its rules
say, and rules for layers that are not there are refused by name."""

import copy
import pickle
import random as pyrandom
import re

import pytest
import torch
from policy_cases import WAYS, by_backward, bytes_of, drawn_needs, report_before

from funcops import (
    ActivationConfig,
    ChainConfig,
    Compress,
    Drop,
    DropoutConfig,
    LinearConfig,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    Save,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    batch_wgrads,
    chain,
    dropout,
    explain,
    linear,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    with_policy,
)
from funcops.engine.trees import tree_map_tensors
from funcops.low_precision import Fp8Block, Fp8Current, with_recipe
from funcops.memory.parts import kept_paths
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config
from funcops.testing import assert_close
from funcops.testing.checks import same_bits

D = 16
MLP = mlp_config(D, 24)
DROPS = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(D)),
        Step("up", linear, LinearConfig(D, D)),
        Step("act", activation, ActivationConfig("silu")),
        Step("drop", dropout, DropoutConfig(0.2), takes=("key",)),
    ),
    extras=("key",),
)
KEY, PLACES = {"key": random.key(3)}, {"positions": torch.arange(3)}


def in_a_model(name, body, times, extras=(), **options):
    """A repeat between two linear layers, with the head's x recomputable."""
    steps = (
        Step("stem", linear, LinearConfig(D, D)),
        Step(name, repeat, RepeatConfig(*body, times, **options), takes=tuple(extras)),
        Step("norm", rms_norm, RMSNormConfig(D)),
        Step("head", linear, LinearConfig(D, 5)),
    )
    return chain, ChainConfig(steps=steps, extras=tuple(extras)), extras


MODELS = {
    "llama": in_a_model("blocks", (chain, block_config(D, 2, 24)), 5, PLACES),
    "gpt-2": in_a_model("blocks", (chain, gpt2_block_config(D, 2, 24, 0.1)), 3, KEY),
    "keys": in_a_model("layers", (skip, SkipConfig(chain, DROPS)), 6, KEY),
    "stacked": in_a_model("layers", (skip, SkipConfig(chain, MLP)), 4, stacked=True),
    "nested": in_a_model("outer", (repeat, RepeatConfig(skip, SkipConfig(chain, MLP), 3)), 3),
    "leaves": in_a_model("layers", (rms_norm, RMSNormConfig(D)), 4),
    "alone": (repeat, RepeatConfig(chain, MLP, 4), {}),
}
RECIPES = [None, None, None, Fp8Current(), Fp8Block()]


def times_of(op, cfg):
    """The layers of the repeats, from the residuals of a model: by the path of the repeat, with the numbers of outer layers."""
    return next(step.cfg for step in cfg.steps if step.op is repeat).times if isinstance(cfg, ChainConfig) else cfg.times


def drawn_layers(rng, times):
    """Layers as a rule writes them, and their numbers."""
    first = rng.randrange(times)
    last = rng.randrange(first, times)
    some = rng.choice([("*", range(times)), (str(first), [first]), (f"{first}-{last}", range(first, last + 1))])
    if rng.random() < 0.2 and first + 1 < last:
        return f"{first},{last}", [first, last]
    return some


def drawn_rules(rng, op, cfg, actions):
    """Rules for drawn paths and layers: each with its action, and the layers of the outermost repeat that it names."""
    known = [kept.path for kept in kept_paths(op, cfg) if not kept.waits]
    found = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice([one for one in known if "*" in one])
        path = rng.choice([path, path.rpartition(".")[0], path.rpartition(".")[0].rpartition(".")[0]])
        path = path if "*" in path else next(one for one in known if "*" in one and one.endswith("*"))
        said, numbers = drawn_layers(rng, times_of(op, cfg))
        inner = rng.choice(["0", "1-2", "*"])
        head, _, tail = path.partition("*")
        found.append((head, said, tail.replace("*", inner), rng.choice(actions), set(numbers)))
    return found


def made(name, recipe, dtype=torch.float32):
    op, cfg, extras = MODELS[name]
    cfg = cfg if recipe is None else with_recipe(cfg, recipe)
    params = op.init(cfg, key=random.key(0), dtype=dtype)
    x = random.normal(random.key(1), (2, 3, D), dtype=dtype)
    dy = random.normal(random.key(2), (2, 3, 5 if op is chain else D), dtype=dtype)
    return op, cfg, params, WithExtras(x, dict(extras)) if extras else x, dy


def kept_by_layer(residuals, name):
    """For each layer the shapes and dtypes that it keeps, by path, without the number of the layer."""
    layers = residuals if name is None else residuals[name]
    return [{row.path: row[1:3] for row in report(layers[i]).rows} for i in layers]


def check(name, rng, recipe=None):
    """Whether drawn rules were taken, after every check of them."""
    op, cfg, params, x, dy = made(name, recipe)
    rules = drawn_rules(rng, op, cfg, (Recompute(), Recompute(), Save(), Offload()))
    needs, outputs = drawn_needs(rng, params), rng.choice(["recomputable", "recomputable", "none"])
    policy = Policy([(f"{head}{said}{tail}", action) for head, said, tail, action, _ in rules], outputs=outputs)
    under, plain = with_policy(op, policy), with_policy(op, Policy(outputs=outputs))
    try:
        y, kept = under.fwd(params, x, cfg, needs=needs)
    except ValueError as error:
        assert re.match(r"with_policy: rules .*must be .*, got .", str(error)), policy
        return False
    want_y, plainly = plain.fwd(params, x, cfg, needs=needs)
    same_bits(y, want_y, str(policy))
    zeros = tree_map_tensors(torch.zeros_like, plain.bwd(plainly, dy, cfg)[0])
    for how in WAYS:
        again = under.fwd(params, x, cfg, needs=needs)[1]
        same_bits(by_backward(under, again, dy, cfg, how), plain.bwd(plainly, dy, cfg), f"{policy} {how}")
    into, other = (tree_map_tensors(torch.clone, zeros) for _ in range(2))
    same_bits(by_backward(under, kept, dy, cfg, "halves", into)[0], plain.bwd(plainly, dy, cfg, into=other)[0], str(policy))
    said = report_before(under, params, x, cfg, needs)
    assert said.kept_bytes == report(kept, params, x).kept_bytes == bytes_of(kept, params, x), policy
    assert (pickle.loads(pickle.dumps(policy)), copy.deepcopy(kept).keys()) == (policy, kept.keys())
    # each layer keeps what a policy says that has the rules of this layer for all layers
    where = next((step.name for step in getattr(cfg, "steps", ()) if step.op is repeat), None)
    layers = kept_by_layer(kept, where)
    for i, found in enumerate(layers):
        own = Policy([(f"{head}*{tail}", action) for head, _, tail, action, of in rules if i in of], outputs=outputs)
        try:
            alike = with_policy(op, own).fwd(params, x, cfg, needs=needs)[1]
        except ValueError:  # a rule has no effect in this layer alone
            continue
        assert found == kept_by_layer(alike, where)[i], (policy, i)
    return True


@pytest.mark.turns("name", every=4)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_drawn_rules_for_layers_leave_the_bits_alone(name, seeds, device):
    rng = pyrandom.Random(f"{name} {seeds}")
    assert sum(check(name, rng, rng.choice(RECIPES)) for _ in seeds for _ in range(4)) >= len(seeds)


def ten_layers(rules, **options):
    """A model of ten blocks under rules, its params, x and dy."""
    op, cfg, extras = in_a_model("blocks", (chain, block_config(D, 2, 24)), 10, PLACES)
    x, dy = (random.normal(random.key(i), (2, 3, size)) for i, size in ((1, D), (2, 5)))
    params = op.init(cfg, key=random.key(0))
    return with_policy(op, Policy(rules, **options)), cfg, params, WithExtras(x, dict(extras)), dy


def test_the_first_layers_run_again():
    op, cfg, params, x, dy = ten_layers({"blocks.0-3": Recompute()})
    y, kept = op.fwd(params, x, cfg)
    again = [set(kept["blocks"][i].fields) if hasattr(kept["blocks"][i], "fields") else set() for i in range(10)]
    assert again == [{"params", "x", "device", "notes"} & again[0]] * 4 + [set()] * 6 and again[0]
    assert "blocks.0-3.x.main (x 4)" in str(report(kept, params)) and "blocks.4-9.mlp.act.x (x 6)" in str(report(kept, params))
    same_bits(op.bwd(kept, dy, cfg), chain.bwd(chain.fwd(params, x, cfg)[1], dy, cfg), "")


def test_the_last_rule_that_matches_a_layer_wins():
    op, cfg, params, x, _ = ten_layers({"blocks.*.mlp": Recompute(), "blocks.7-9.mlp": Save(), "blocks.8": Recompute()})
    found = {row.path for row in report(op.fwd(params, x, cfg)[1]).rows}
    acts, down = ([i for i in range(10) if f"blocks.{i}.mlp.{name}.x" in found] for name in ("act", "down"))
    assert (acts, down) == ([7, 9], [7, 9])  # all fields, though down's x could be recomputed
    assert [i for i in range(10) if f"blocks.{i}.mlp.x" in found] == list(range(7))


def test_layers_with_equal_rules_share_a_program_that_explain_names():
    op, cfg, params, x, dy = ten_layers({"blocks.2,5-6.mlp": Recompute(), "blocks.0.attn": Recompute()})
    shown = [path for path in explain(cfg, op=op).plans if path.startswith("blocks")]
    assert shown == ["blocks.0", "blocks.0.attn", "blocks.1,3-4,7-9", "blocks.2,5-6", "blocks.2,5-6.mlp"]
    assert [path for path in explain(cfg).plans if path.startswith("blocks")] == ["blocks.*"]
    kept = op.fwd(params, x, cfg)[1]
    op.bwd(kept, dy, cfg)
    bodies = [kept["blocks"].cfg.of_layer[i][1] for i in range(10)]
    assert len({id(body) for body in bodies}) == 3 and len({id(body.programs) for body in bodies}) == 3


WRONG = {
    "blocks.10": r"rules at 'blocks.10' must be of layers 0 to 9 of the repeat blocks \(did you mean 'blocks.9'\?\), got 10$",
    "blocks.8-12.mlp": r"of layers 0 to 9 of the repeat blocks \(did you mean 'blocks.8-9.mlp'\?\), got 8-12$",
    "blocks.30-40.mlp": r"of layers 0 to 9 of the repeat blocks \(did you mean 'blocks.9.mlp'\?\), got 30-40$",
    "*.11.mlp": r"of layers 0 to 9 of the repeat blocks \(did you mean '\*.9.mlp'\?\), got 11$",
    "blocks.5-2": r"ranges that do not end before they begin \(did you mean 'blocks.2-5'\?\), got '5-2'$",
    "blocks.1..4": r"ranges of layers as first-last \(did you mean 'blocks.1-4'\?\), got 'blocks.1..4'$",
    "blocks.0:4": r"ranges of layers as first-last \(did you mean 'blocks.0-4'\?\)",
    "blocks.-1": r"layers as a number from 0, or a range, such as 3 or 0-9, got '-1'$",
    "blocks.3-": r"layers as a number from 0, or a range, such as 3 or 0-9, got '3-'$",
    "head.0-3": r"globs over the paths of cfg, got 'head.0-3', nearest head",
    "blocks.0-3.mpl": r"globs over the paths of cfg, got 'blocks.0-3.mpl', nearest .*blocks.\*.mlp",
}


@pytest.mark.parametrize("pattern", WRONG)
def test_layers_that_are_not_there_are_refused(pattern):
    with pytest.raises(ValueError, match=WRONG[pattern]):
        op, cfg, params, x, _ = ten_layers({pattern: Recompute()})
        op.fwd(params, x, cfg)


def test_an_optional_rule_for_layers_that_are_not_there_is_skipped():
    op, cfg, params, x, _ = ten_layers({"blocks.8-30": Recompute()}, optional=True)
    found = {row.path for row in report(op.fwd(params, x, cfg)[1]).rows}
    assert [i for i in range(10) if f"blocks.{i}.x.main" in found] == [8, 9]


@pytest.mark.parametrize("action", [Save(), Offload()])
def test_an_action_on_a_step_is_short_for_its_fields(action, device):
    for name in ("mlp", "attn", *["mlp.act"] * (action == Offload())):
        op, cfg, params, x, dy = ten_layers({f"blocks.*.{name}": action})
        fields, *_ = ten_layers({f"blocks.*.{name}.*": action})
        kept, wanted = (one.fwd(params, x, cfg)[1] for one in (op, fields))
        assert report(kept).rows == report(wanted).rows
        same_bits(op.bwd(kept, dy, cfg), chain.bwd(chain.fwd(params, x, cfg)[1], dy, cfg), name)


@pytest.mark.turns("name", "blocks")
@pytest.mark.parametrize("blocks", ["inputs", "offloaded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_rule_keeps_some_layers_whole_where_the_others_keep_their_inputs(name, blocks, device):
    """They keep what they would if a rule let the others run again."""
    op, cfg, params, x, dy = made(name, None)
    where, times = next((step.name + "." for step in getattr(cfg, "steps", ()) if step.op is repeat), ""), times_of(op, cfg)
    wanted = op.bwd(op.fwd(params, x, cfg)[1], dy, cfg)
    rng = pyrandom.Random(f"{name} {blocks}")
    for action in (Save(), Offload()):
        last = rng.randrange(1, times)
        said, others = f"{where}{last}-{times - 1}", f"{where}0-{last - 1}"
        under = with_policy(op, Policy({said: action}, blocks=blocks))
        alike = with_policy(op, Policy({f"{where}*": action, others: Recompute()}, optional=name == "leaves"))
        y, kept = under.fwd(params, x, cfg)
        if blocks == "inputs":
            assert report(kept, params, x).rows == report(alike.fwd(params, x, cfg)[1], params, x).rows
        assert report_before(under, params, x, cfg).places == report(kept, params, x).places
        for how in WAYS:
            same_bits(by_backward(under, under.fwd(params, x, cfg)[1], dy, cfg, how), wanted, f"{said} {action} {how}")


@pytest.mark.parametrize("rules", [{"blocks.3.mlp": Save()}, {"blocks.*.mlp.act.x": Compress("fp8")}, {"blocks.3.*": Offload()}])
def test_a_rule_inside_a_layer_that_keeps_its_inputs_says_what_to_write(rules):
    op, cfg, params, x, _ = ten_layers(rules, blocks="inputs")
    with pytest.raises(ValueError, match=r"keeps its inputs, as blocks='inputs' says: Save or Offload of blocks\.[3*] itself"):
        op.fwd(params, x, cfg)


@pytest.mark.parametrize("action", [Compress("fp8"), Drop()])
def test_other_actions_on_a_step_are_refused(action):
    op, cfg, params, x, _ = ten_layers({"blocks.3.mlp.act": action})
    with pytest.raises(ValueError, match=r"takes only Save, Recompute and Offload; the fields of blocks.3.mlp.act are blocks.3"):
        op.fwd(params, x, cfg)


RULES = {"blocks.0-3": Recompute(), "blocks.5.mlp": Recompute(), "blocks.7-9": Save()}


def test_layers_under_a_policy_in_graphs():
    from funcops.graphs import graphed_op

    op, cfg, params, x, dy = ten_layers(RULES)
    graph = graphed_op(op, cfg, params, x, slots=2, dy=dy)
    y, residuals = graph.fwd(params, x)
    dx, pending = graph.dgrad(residuals, dy)
    want = chain.bwd(chain.fwd(params, x, cfg)[1], dy, cfg)
    same_bits((graph.wgrad(pending), dx), want, "")


@pytest.mark.slow
def test_a_compiler_follows_layers_under_a_policy():
    op, cfg, params, x, dy = ten_layers(RULES)

    def step(params, x, dy):
        y, residuals = op.fwd(params, x, cfg)
        return y, op.bwd(residuals, dy, cfg)

    found = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)(params, x, dy)
    assert_close(found, step(params, x, dy), dtype=torch.float32)


def test_delayed_weight_gradients_of_layers_under_a_policy():
    op, cfg, params, x, dy = ten_layers(RULES)
    pendings = [op.dgrad(op.fwd(params, x, cfg)[1], dy, cfg)[1] for _ in range(3)]
    plainly = [chain.dgrad(chain.fwd(params, x, cfg)[1], dy, cfg)[1] for _ in range(3)]
    same_bits(batch_wgrads(op, pendings, cfg), batch_wgrads(chain, plainly, cfg), "")


def test_layers_under_a_policy_in_turns():
    """Parts of the rows of an interleave run in turns: forwards and backwards that pause."""
    from funcops import InterleaveConfig, interleave

    op, cfg, params, x, dy = ten_layers(RULES)
    both = [InterleaveConfig(one, cfg, 2) for one in (op, chain)]
    found, want = (interleave.bwd(interleave.fwd(params, x, one)[1], dy, one) for one in both)
    same_bits(found, want, "")


def test_layers_under_a_policy_as_a_stage_of_a_schedule():
    from funcops.schedule import run, zb_h1

    op, cfg, params, _, _ = ten_layers(RULES)
    stages = [
        ChainConfig(
            steps=(Step("first", one, cfg, takes=("positions",)), Step("last", linear, LinearConfig(5, 5))), extras=("positions",)
        )
        for one in (op, chain)
    ]
    weights = {"first": params, "last": linear.init(LinearConfig(5, 5), key=random.key(4))}
    xs = [WithExtras(random.normal(random.key(i), (2, 3, D)), dict(PLACES)) for i in range(4)]
    dys = [random.normal(random.key(9 + i), (2, 3, 5)) for i in range(4)]
    found, want = (run(zb_h1(2, 4), weights, xs, one, dys) for one in stages)
    same_bits(found.dparams, want.dparams, "")


def test_an_op_that_reruns_already_is_told_apart_by_layer():
    body = ChainConfig(steps=(Step("mlp", remat(chain), MLP), Step("up", linear, LinearConfig(D, D))))
    cfg = RepeatConfig(chain, body, 4, stacked=True)
    params, x = repeat.init(cfg, key=random.key(0)), random.normal(random.key(1), (3, D))
    op = with_policy(repeat, Policy({"1-2": Recompute()}))
    same_bits(op.bwd(op.fwd(params, x, cfg)[1], x, cfg), repeat.bwd(repeat.fwd(params, x, cfg)[1], x, cfg), "")


ONE = LinearConfig(4, 4)
BODIES = {
    "a list": ([("0-2", linear, ONE)], r"a tuple of \(layers, op, cfg\), with layers such as \"0-9\""),
    "a name": ((("x", linear, ONE),), r"a tuple of \(layers, op, cfg\)"),
    "a number": ((3,), r"a tuple of \(layers, op, cfg\)"),
    "no op": ((("0-2", chain, ONE), ("0", 3, ONE)), r"a tuple of \(layers, op, cfg\)"),
    "a layer twice": ((("0-1", linear, ONE), ("1-2", linear, ONE)), "of each of 3 layers, the first with this op and cfg"),
    "a layer too few": ((("0", linear, ONE), ("2", linear, ONE)), "of each of 3 layers"),
    "another first body": (
        (("0", remat(linear), ONE), ("1-2", linear, ONE)),
        "of each of 3 layers, the first with this op and cfg",
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_bodies_that_are_not_those_of_all_layers_are_refused(what):
    bodies, message = BODIES[what]
    with pytest.raises(ValueError, match=f"RepeatConfig: bodies must be {message}"):
        RepeatConfig(linear, ONE, 3, bodies=bodies)
