"""Answers of a rule of one's own that no program can use raise, with the name of the rule."""

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    Rule,
    Saving,
    ScaleConfig,
    SoftcapConfig,
    Step,
    activation,
    chain,
    explain,
    linear,
    random,
    register_fusion,
    scale,
    softcap,
    unregister_fusion,
)
from funcops.engine.trees import tensors

CFG = ChainConfig(
    steps=(
        Step("head", linear, LinearConfig(8, 64)),
        Step("cap", softcap, SoftcapConfig(30.0)),
        Step("cool", scale, ScaleConfig(0.7)),
    )
)


def both(window):
    return 2 if [call.op for call in window.calls[:2]] == [softcap, scale] else None


def call(phase, match, run):
    """A forward and backward while a rule is registered."""
    rule = register_fusion(Rule("mine", phase, match, run, Saving(3, 2), on_cpu=True))
    try:
        params = chain.init(CFG, key=random.key(0))
        y, residuals = chain.fwd(params, torch.ones(4096, 8), CFG)
        return chain.bwd(residuals, torch.ones_like(y), CFG)
    finally:
        unregister_fusion(rule)


@pytest.mark.parametrize("answer", [0, -1, True, False, 2.0, 9, (1,), (1, 1), [2]], ids=repr)
def test_an_answer_of_match(answer):
    with pytest.raises(TypeError, match=r"rule 'mine': the result of match must be how many of the \d calls it covers.*, got"):
        call("forward", lambda window: answer, lambda *given: NotImplemented)


ANSWERS = {"None": None, "y alone": torch.ones(2), "one part": (torch.ones(2), [None]), "a list": [1, 2], "three": (1, 2, 3)}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_of_run(answer):
    with pytest.raises(TypeError, match=r"rule 'mine': the result of run must be \(y, residuals of each of 2 calls\), or NotImpl"):
        call("forward", both, lambda *given: answer)
    with pytest.raises(TypeError, match=r"rule 'mine': the result of run must be \(dx, pending of each of 2 calls\), or NotImpl"):
        call("backward", both, lambda *given: answer)


def test_a_rule_may_leave_the_calls_to_themselves():
    assert call("forward", both, lambda *given: NotImplemented)[1].shape == (4096, 8)
    assert call("backward", both, lambda *given: NotImplemented)[1].shape == (4096, 8)
    assert call("forward", lambda window: "not today", lambda *given: None)[1].shape == (4096, 8)


def test_a_rule_that_recomputes_may_leave_the_calls_to_themselves():
    """The weight gradient of the linear layer behind it was to read the rule's y: it reads one computed again."""
    steps = (
        Step("in", linear, LinearConfig(8, 8)),
        Step("act", activation, ActivationConfig("silu")),
        Step("out", linear, LinearConfig(8, 8)),
    )
    cfg = ChainConfig(steps=steps)
    params, x, declined = chain.init(cfg, key=random.key(0)), torch.ones(4096, 8), []
    y, residuals = chain.fwd(params, x, cfg)
    want = chain.bwd(residuals, torch.ones_like(y), cfg)
    alone = lambda window: 1 if window.calls[0].op is activation and window.calls[0].readers else None  # noqa: E731
    decline = lambda *given: declined.append(given) or NotImplemented  # noqa: E731
    rule = register_fusion(Rule("mine", "backward", alone, decline, Saving(9, 9), on_cpu=True, whole=True, recompute=True))
    try:
        found = chain.bwd(chain.fwd(params, x, cfg)[1], torch.ones_like(y), cfg)
    finally:
        unregister_fusion(rule)
    assert declined and all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(want), strict=True))


@pytest.mark.parametrize(
    ("saves", "says"),
    [
        (Saving(1, 1), "it saves 1 pass and 1 launch, and 'wins' saves 3 passes and 2 launches"),
        (Saving(3, 2), "it saves 3 passes and 2 launches, and 'wins' saves 3 passes and 2 launches too: of equals most calls win"),
    ],
    ids=["cheaper", "equal"],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("first", ["head", "cap"])
def test_a_rule_that_lost_is_named_with_the_one_that_won(first, phase, saves, says):
    """To a rule for the same calls, and to one that begins a call before its own."""
    longer = lambda window: 3 if first == "head" and window.calls[0].op is linear and len(window.calls) > 2 else both(window)  # noqa: E731
    rules = [
        Rule("loses", phase, both, lambda *given: NotImplemented, saves),
        Rule("wins", phase, longer, lambda *given: NotImplemented, Saving(3, 2)),
    ]
    for rule in rules:
        register_fusion(rule)
    try:
        text = str(explain(CFG))
    finally:
        for rule in rules:
            unregister_fusion(rule)
    assert f"not loses at cap ({phase}): {says}" in text and "not wins" not in text
    assert text.count("not loses") == 1
