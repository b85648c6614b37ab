"""A recording compiles nothing anew: a compiled step once for all, programs of funcops once, Triton kernels not at all."""

import random as drawn
from contextlib import ExitStack

import pytest
import torch
from test_compare import PARAMS, SIZES, of, step, x_of
from triton.runtime import interpreter

from funcops import (
    ChainConfig,
    LinearConfig,
    SoftcapConfig,
    Step,
    backend,
    chain,
    compare,
    linear,
    named_steps,
    random,
    recording,
    softcap,
    vjp,
)
from funcops.engine.program import programs
from funcops.models import decoder
from funcops.testing.aot import name_of

SMALL = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("cap", softcap, SoftcapConfig(30.0))))
WAYS = {
    "plain": lambda: (),
    "recorded": lambda: (recording(),),
    "stops": lambda: (recording(stop_at_nonfinite=True),),
    "like": lambda: (recording(like=[of(lambda: None)]),),
    "nested": lambda: (recording(), recording()),
    "named": lambda: (named_steps(),),
    "both": lambda: (named_steps(), recording()),
}
LEVEL = {"plain": 0, "named": 1}  # all others record


def small(params, x):
    y, pullback = vjp(chain, params, x, SMALL)
    return y, pullback(y)


@pytest.mark.parametrize("case", ["small", pytest.param("decoder", marks=pytest.mark.slow)])
def test_a_compiled_step_is_compiled_once_for_all_recordings(case):
    """In any order of runs with and without: as often as there are kinds of programs among them."""
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return graph

    fn, params, x = (small, chain.init(SMALL, key=random.key(0)), torch.ones(2, 4)) if case == "small" else (step, PARAMS, x_of())
    compiled, order = torch.compile(fn, fullgraph=True, backend=counting), [*WAYS, *WAYS]
    drawn.Random(case).shuffle(order)
    seen = set()
    for way in order:
        with _all(WAYS[way]()):
            compiled(params, x)
        seen.add(LEVEL.get(way, 2))
        assert len(made) == len(seen), (way, order)
    with recording() as first:
        compiled(params, x)
    with recording() as second:
        compiled(params, x)
    assert len(first) and compare(first, second).first is None and len(made) == 3


def test_no_program_is_made_for_a_second_recording(monkeypatch):
    made, real = [], programs.compile_source
    monkeypatch.setattr(programs, "compile_source", lambda *args: made.append(args) or real(*args))
    model = decoder(SIZES, loss=True)
    counts = []
    for way in ("plain", "recorded", "plain", "recorded", "stops", "nested", "plain"):
        with _all(WAYS[way]()):
            step(PARAMS, x_of(), chain, model)
        counts.append(len(made))
    assert 0 < counts[0] < counts[1] and set(counts[1:]) == {counts[1]}


def test_kernels_of_triton_are_the_same(monkeypatch):
    """The launches of a step, each with the dtypes of its tensors and its other arguments, of which compiled kernels are found."""
    found, real = [], interpreter.InterpretedFunction.__getitem__

    def launcher(kernel, grid):
        def launch(*args, **kwargs):
            found.append((name_of(kernel.fn), *[str(getattr(a, "dtype", a)) for a in (*args, *kwargs.values())]))
            return real(kernel, grid)(*args, **kwargs)

        return launch

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", launcher)
    counts = []
    with backend("triton"):
        for way in ("plain", "recorded"):
            with _all(WAYS[way]()):
                step(PARAMS, x_of())
            counts.append(len(found))
    assert counts[0] > 5 and found[counts[0] :] == found[: counts[0]]


def _all(blocks):
    ends = ExitStack()
    for block in blocks:
        ends.enter_context(block)
    return ends
