"""A planner's prediction of a layout, against a simulation of all its ranks."""

import pytest

from funcops.schedule import predict, simulate
from funcops.schedule.layout import microbatches, problem, rank_memory
from funcops.schedule.predict import bound, schedule_of, without_communication, without_replicas


def check_prediction(model, layout, gpu):
    """Time, bounds and memory are the simulation's; a layout that does not divide is refused by the name of what does not."""
    wrong = problem(model, layout, gpu)
    if wrong is not None:
        with pytest.raises(ValueError, match=f"predict: layout.{wrong.name} must be .*, got"):
            predict(model, layout)
        return
    said, known, count = predict(model, layout), bound(model, layout, gpu), microbatches(model, layout)
    costs = known.stages.all(layout.stages)
    whole = simulate(schedule_of(layout.pp, layout.chunks, count), costs, known.network)
    assert said.time == pytest.approx(whole.time + known.update) and known.time <= said.time * (1 + 1e-12)
    assert without_communication(model, layout, gpu) <= without_replicas(model, layout, gpu) <= known.time * (1 + 1e-12)
    assert sum(said.spent) == pytest.approx(said.time) and min(said.spent) >= 0
    ranks = [rank_memory(model, layout, rank) for rank in range(layout.pp)]
    assert said.memory == ranks[said.rank] and said.peak_bytes == max(one.total for one in ranks)
    held = [one.residuals for one in ranks]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(whole.peak_bytes, held, strict=True)), "the bound of what is in flight"
