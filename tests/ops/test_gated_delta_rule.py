"""The gated delta rule against Hugging Face's recurrence of it, by autograd; going on from a state; long sequences and strong
decays."""

import pytest
import torch
from tiny_hf import Wide

from funcops import (
    GatedDeltaRuleConfig,
    L2NormConfig,
    gated_delta_rule,
    gated_delta_rule_bwd,
    gated_delta_rule_fwd,
    l2_norm_bwd,
    l2_norm_fwd,
)
from funcops.testing.tolerances import assert_close

B, T, K, H, D, V = 2, 37, 2, 4, 6, 5
NAMES = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")


def parts(seed, length=T, dtype=torch.float64, fastest=1.0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v, g, beta, state = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((B, length, K, D), (B, length, K, D), (B, length, H, V), (B, length, H), (B, length, H), (B, H, D, V))
    )
    wide = torch.promote_types(dtype, torch.float32)
    return q.to(dtype), k.to(dtype), v.to(dtype), (-fastest * g.sigmoid()).to(wide), beta.sigmoid().to(dtype), state.to(wide)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_hugging_faces(name, chunk):
    """With both norms, the first and the last state, and all gradients."""
    rule = getattr(pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next"), name)
    given = [t.requires_grad_() for t in parts(0)]
    with Wide():
        want = rule(*given[:5], initial_state=given[5], output_final_state=True, use_qk_l2norm_in_kernel=True)
        dy = tuple(torch.randn(t.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for t in want)
        gradients = torch.autograd.grad(want, given, dy)
    cfg, norm = GatedDeltaRuleConfig(chunk=chunk, state=True), L2NormConfig(D)
    q, k, *rest = (t.detach() for t in given)
    (q, of_q), (k, of_k) = (l2_norm_fwd(None, t, norm) for t in (q, k))
    y, kept = gated_delta_rule_fwd(None, (q, k, *rest), cfg)
    dq, dk, *others = gated_delta_rule_bwd(kept, dy, cfg)[1]
    got = [l2_norm_bwd(of, d, norm)[1] for of, d in ((of_q, dq), (of_k, dk))]
    assert_close((y, [*got, *others]), (tuple(t.detach() for t in want), list(gradients)), dtype=torch.float64, by_leaf=True)


def test_a_sequence_goes_on_from_its_state():
    """In parts of several lengths, among them single times: the same y, last state and gradients."""
    q, k, v, g, beta, state = parts(1)
    cfg = GatedDeltaRuleConfig(chunk=8, state=True)
    (y, last), kept = gated_delta_rule_fwd(None, (q, k, v, g, beta, state), cfg)
    found, s = [], state
    for start, stop in ((0, 1), (1, 2), (2, 20), (20, 20), (20, T)):
        (part, s), residuals = gated_delta_rule_fwd(None, (*(t[:, start:stop] for t in (q, k, v, g, beta)), s), cfg)
        found.append((part, residuals, slice(start, stop)))
    assert_close((torch.cat([part for part, _, _ in found], 1), s), (y, last), dtype=torch.float64)
    dy, ds = torch.ones_like(y), torch.ones_like(last)
    want = gated_delta_rule_bwd(kept, (dy, ds), cfg)[1]
    gradients = []
    for _, residuals, at in reversed(found):
        *of, ds = gated_delta_rule_bwd(residuals, (dy[:, at], ds), cfg)[1]
        gradients.append(of)
    whole = tuple(torch.cat(pieces[::-1], 1) for pieces in zip(*gradients, strict=True))
    assert_close((*whole, ds), want, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "fastest"), [(torch.float32, 60.0), (torch.float32, 1e-3), (torch.bfloat16, 1.0)], ids=str)
def test_long_sequences_with_strong_and_weak_decays(dtype, fastest):
    """Nothing overflows where a chunk decays by e^-3000; keys of nearly one direction, which make the triangular systems stiff."""
    q, k, v, g, beta, _ = parts(2, 300, dtype, fastest)
    k = torch.nn.functional.normalize((k.double() * 0.1 + 1.0), dim=-1).to(dtype)
    x, cfg = (q, k, v, g, beta), GatedDeltaRuleConfig()
    y, kept = gated_delta_rule_fwd(None, x, cfg)
    dx = gated_delta_rule_bwd(kept, torch.ones_like(y), cfg)[1]
    of_wide, one = tuple(t.double() for t in x), GatedDeltaRuleConfig(chunk=1)
    want, kept = gated_delta_rule_fwd(None, of_wide, one)
    gradients = gated_delta_rule_bwd(kept, torch.ones_like(want), one)[1]
    assert all(bool(t.isfinite().all()) for t in (y, *dx))
    assert_close((y, dx), (want, gradients), dtype=dtype, length=300 * 64, by_leaf=True)


def test_outputs_without_a_gradient_give_none():
    cfg = GatedDeltaRuleConfig(state=True)
    x = [torch.randn(1, 3, 2, 4) for _ in range(3)] + [-torch.rand(1, 3, 2), torch.rand(1, 3, 2), torch.randn(1, 2, 4, 4)]
    _, kept = gated_delta_rule.fwd(None, tuple(x), cfg)
    assert gated_delta_rule.dgrad(kept, (None, None), cfg) == ((None,) * 6, None)
