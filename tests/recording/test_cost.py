"""The bench of a recording has its rows, and a step of width 512 at 2,048 tokens takes at most half as long again."""

import pytest

from benchmarks import recording


def rows(**sizes):
    return {(row.case.partition(" ")[0], row.provider, row.metric): row.value for row in recording.run(**sizes)}


def test_rows():
    found = rows(width=32, tokens=16, rounds=1)
    assert found["digest", "funcops", "time"] > 0 and found["step", "recorded", "values"] > 100
    assert found["step", "recorded over plain", "ratio"] > 0 and {"plain", "recorded"} <= {provider for _, provider, _ in found}


@pytest.mark.slow
def test_a_wide_step():
    assert rows(rounds=2)["step", "recorded over plain", "ratio"] <= 1.5
