"""Steps of published tables, as the plans predict them: those that an efficiency was fitted to, and those that none was."""

import pytest
from committed import committed

from benchmarks import published
from funcops.schedule import GPUS


@pytest.mark.parametrize("row", (*published.PUBLISHED, *published.HELD_OUT), ids=lambda row: row.name)
def test_published_steps_are_predicted(row):
    """Within 15 %, with one efficiency for each kind of GPU, to which nothing of `HELD_OUT` was fitted; the page quotes these
    figures."""
    said = row.predicted()
    assert abs(said.time / row.seconds - 1.0) <= 0.15
    quoted = committed("cpu-schedule")[row.name, "funcops.schedule.predict", "seconds per step"]
    assert said.time == pytest.approx(quoted, rel=1e-3)
    assert said.peak_bytes < 80e9, "it ran"


@pytest.mark.parametrize(("row", "seconds"), published.RECOMPUTED, ids=lambda one: getattr(one, "name", ""))
def test_the_ratio_of_two_ways_to_recompute_is_predicted(row, seconds):
    """Within 10 %, which a published table has and nothing was fitted to."""
    assert published.ratio_of_recomputing(row) == pytest.approx(seconds / row.seconds, rel=0.1)


@pytest.mark.parametrize("gpu", GPUS)
def test_an_efficiency_is_the_fitted_one(gpu):
    at = GPUS[gpu].efficiency
    errors = {step: published.largest_error(gpu, at + step) for step in (-0.02, -0.01, 0.0, 0.01, 0.02)}
    assert min(errors, key=errors.get) == 0.0
