"""Steps of many microbatches, computed from few of them, against the simulation of all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import check_prediction

from funcops.schedule import GPUS, Costs, Decoder, Layout, Network, simulate
from funcops.schedule.layout import Stages
from funcops.schedule.predict import schedule_of, simulate_few

UNEVEN = st.floats(0.5, 1.5)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.lists(st.tuples(UNEVEN, UNEVEN), min_size=3, max_size=3))
def test_many_microbatches_take_as_long_as_the_whole_simulation(p, v, groups, drawn):
    """With stages of uneven cost the slowest rank may take over late, long after the first microbatches."""
    layout, count = Layout(pp=p, chunks=v if p > 1 else 1), groups * p
    stages = Stages(*[Costs(forward, dgrad) for forward, dgrad in drawn])
    whole = simulate(schedule_of(p, layout.chunks, count), stages.all(layout.stages))
    assert simulate_few(layout, count, stages, Network())[1] == pytest.approx(whole.time, rel=1e-9)


def test_the_slowest_rank_takes_over_late():
    model = Decoder(1024, 512, 8, 16, 32000, 1024, 64, kv_heads=4)
    check_prediction(model, Layout(dp=2, tp=4, pp=2, cp=2, chunks=2, zero=2, recompute="mlp"), GPUS["H100"])
