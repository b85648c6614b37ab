"""The named variant of every program is the plain one with scopes around its lines, and gives the same bits."""

import re

import pytest
import torch
from law_cases import FIRST

from funcops import ChainConfig, LinearConfig, RopeConfig, Step, WithExtras, chain, linear, named_steps, random, rope_table, trees
from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label
from funcops.engine.compose.fork import fork
from funcops.engine.contract.needs import Needs
from funcops.engine.program import programs
from funcops.engine.program.lower import Call, lower
from funcops.engine.program.rules import cover
from funcops.engine.program.source import Source
from funcops.engine.program.templates import half_of
from funcops.models.blocks import block_config, gpt2_block_config

BLOCKS = {"GPT-2": gpt2_block_config(32, 2, 64, 0.0), "Llama": block_config(32, 2, 64, 1)}
WHICH = ("forward", "backward", "dgrad", "wgrad", "products")
SCOPE = re.compile(r"^( *)with scopes\.named_scope\(('[^']*'), ('[a-z]+')\):$")

TOLD = re.compile(r"^ *(if \w+ is not NotImplemented: )?notes\.tell\(")


def without_scopes(text):
    """The lines of a named program without its scopes, and the scopes."""
    lines, found, depth = [], [], []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        while depth and line.strip() and indent <= depth[-1]:
            depth.pop()
        scope = SCOPE.match(line)
        if scope:
            depth.append(indent)
            found.append(Label(scope[2].strip("'"), scope[3].strip("'")))
        else:
            lines.append(line[4 * len(depth) :])
    return re.sub(r" *scopes\.kept\(\w+\)\n", "", "\n".join(lines)), found


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("block", BLOCKS)
def test_only_scopes_are_added(block, which, device, traced):
    lowered = lower(chain, BLOCKS[block], Needs.ALL)
    rules = cover(lowered, device, torch.float32 if device else None, which == "backward")
    rows = programs.rows_of(which, lowered, rules, traced)
    plain, names = Source().function(which, rows, traced)
    named, _ = Source(named=scopes.NAMED).function(which, rows, traced)
    assert "scopes" not in plain and "scopes" not in names, "nothing is paid for names that are off"
    text, found = without_scopes(named)
    assert text == plain
    noted, names = Source(named=scopes.NOTED).function(which, rows, traced)
    lines = noted.split("\n")
    told = [line for line in lines if TOLD.match(line)]
    assert "\n".join(line for line in lines if line not in told) == named, "only lines that tell are added"
    assert told and "notes" in names
    paths = {row.path for row in lowered.forward if isinstance(row, Call) and row.op is not fork}
    got = {path for label in found for path in label.path.split("+")}
    assert got <= paths | {""}
    halves = {"forward": {"fwd"}, "wgrad": {"wgrad", "recompute"}, "products": {"wgrad", "recompute"}}
    assert {label.half for label in found} <= halves.get(which, {"dgrad", "wgrad", "bwd", "recompute"})
    if which == "forward":
        assert got >= paths


def choices(rows):
    """The rows that choose between a call without checks and one with them."""
    return [row for row in rows if row.kind == "call" and row.then]


@pytest.mark.parametrize("whole", [True, False], ids=["backward", "dgrad"])
def test_a_step_has_the_same_name_with_checks_as_without(whole):
    """Else a profile's names would tell which of the two ran: a compiled step has all checks, a donated one as a rule none."""
    alone = [case for case in FIRST if not getattr(case.cfg, "extras", ()) and not getattr(case.cfg, "outputs", ())]
    configs = [*BLOCKS.values(), *(ChainConfig(steps=(Step("one", case.op, case.cfg),)) for case in alone)]
    seen = 0
    for cfg in configs:
        lowered = lower(chain, cfg, Needs.ALL)
        rows = programs.rows_of("backward" if whole else "dgrad", lowered, cover(lowered, None, None, whole), False)
        for row in choices(rows):
            fast, checked = ({half_of(one) for one in way} - {None} for way in (row.then, row.otherwise))
            assert fast == checked, row.path
            seen += 1
    assert seen > 30


@pytest.mark.parametrize("block", BLOCKS)
def test_named_programs_give_the_same_bits(block):
    cfg = BLOCKS[block]
    params = chain.init(cfg, key=random.key(0))
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    extras = {name: random.key(1) for name in cfg.keys}
    if "positions" in cfg.extras:
        extras["positions"] = rope_table(torch.arange(8), RopeConfig(16))
    given = WithExtras(x, extras) if extras else x

    def run():
        y, kept = chain.fwd(params, given, cfg)
        dx, pending = chain.dgrad(kept, x, cfg)
        _, again = chain.fwd(params, given, cfg)
        return trees.tensors((y, dx, chain.wgrad(pending, cfg), chain.bwd(again, x, cfg)))

    want = run()
    with named_steps():
        got = run()
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_sum_of_tied_gradients_is_named_by_their_source():
    steps = tuple(Step(name, linear, LinearConfig(4, 4, bias=False)) for name in "ab")
    lowered = lower(chain, ChainConfig(steps=steps, ties={"a.weight": "b.weight"}), Needs.ALL)
    text, _ = Source(named=scopes.NAMED).function(
        "backward", programs.rows_of("backward", lowered, cover(lowered, None, None, True), False), False
    )
    assert re.search(r"with scopes\.named_scope\('b', 'bwd'\):\n *return run\.collected\(", text)


def test_a_recomputed_half_stays_one_inside():
    assert Label("a", "fwd").inside("b", "dgrad") == Label("a.b", "dgrad")
    assert Label("a", "fwd").inside("", "") == Label("a", "fwd")
    assert Label("a", scopes.RECOMPUTE).inside("b", "fwd") == Label("a.b", "recompute")
    assert str(Label()) == "" and str(Label("a")) == "a" and str(Label("", "fwd")) == "fwd"


def test_what_an_error_leaves_open_is_ended_with_the_block():
    with pytest.raises(ValueError, match="in the middle"), scopes.named_steps():
        scopes.enter("up", "fwd")
        assert scopes.label().half == "fwd"
        raise ValueError("in the middle of a step")
    assert not scopes.label().half and not scopes._thread.open
