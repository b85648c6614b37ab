"""What the exact benches promise; timings are not tested."""

from funcops.bench import memory, residuals


def test_peak_memory_is_no_higher_than_autograds():
    ratio = memory.run()[-1]
    assert ratio.metric == "ratio to autograd" and 0.2 < ratio.value <= 1.0


def test_a_block_keeps_less_than_autograd():
    ours, autograd = residuals.run()
    assert 10 < ours.value < autograd.value
