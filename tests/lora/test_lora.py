"""LoRA: PEFT's gradients, what a frozen model keeps, merging, and what raises."""

import pytest
import torch
from committed import committed
from lora_model import MODULES, SIZES, TARGETS, base_config, batch, drawn, layered, ours, peft_name, same_bits, theirs
from torch.testing import assert_close

from benchmarks import residuals
from funcops import (
    ChainConfig,
    EmbeddingConfig,
    LinearConfig,
    LinearParams,
    Needs,
    ParallelConfig,
    Policy,
    Recompute,
    RMSNormConfig,
    Step,
    WithExtras,
    batch_wgrads,
    chain,
    differentiable,
    dist,
    embedding,
    linear,
    parallel,
    random,
    remat,
    report,
    rms_norm,
    with_policy,
)
from funcops.engine.errors import StaleResidualError
from funcops.engine.trees import nbytes, paths, tree_map_tensors
from funcops.graphs import check_capturable
from funcops.lora import (
    LowRankParams,
    ParameterOf,
    RowsOf,
    adapter,
    lora_init,
    lora_needs,
    merge,
    save_adapter,
    unmerge,
    with_adapter,
    with_lora,
)
from funcops.lora.rewrite import adapted_linears
from funcops.low_precision import Fp8Block, Fp8Delayed, gradients_like, quantize_params, split_amaxes, with_recipe
from funcops.models.blocks import gpt2_block_config
from funcops.testing import Error

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")


# gradients


def gradients(model, ids, labels):
    loss = model(ids, labels)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_gradients_equal_pefts(stacked):
    """The adapters' gradients, in float64 within 1e-9: by the whole backward, by halves, joined, and into accumulators."""
    _, cfg, params = ours(stacked=stacked)
    x, ids, labels = batch()
    loss, want = gradients(theirs(cfg, params), ids, labels)
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    assert_close(y, loss, rtol=1e-12, atol=1e-12)
    dy = torch.ones_like(y)
    whole, _ = chain.bwd(residuals, dy, cfg)
    pending = chain.dgrad(residuals, dy, cfg)[1]
    into = tree_map_tensors(torch.zeros_like, params)
    batch_wgrads(chain, [pending], cfg, into=into)
    zeros = tree_map_tensors(torch.zeros_like, params)
    chain.wgrad(pending, cfg, into=zeros)
    for dparams in (whole, chain.wgrad(pending, cfg)):
        got = {peft_name(path): g for path, g in layered(cfg, dparams).items()}
        assert got.keys() == want.keys() and len(got) == 2 * len(MODULES) * SIZES.layers
        assert_close(got, want, rtol=1e-9, atol=1e-9)
    for sums in (into, zeros):
        got = {peft_name(path): g for path, g in layered(cfg, sums).items()}
        assert_close({name: got.pop(name) for name in want}, want, rtol=1e-9, atol=1e-9)
        assert not any(g.any() for g in got.values()), "a frozen weight got a gradient"


def test_autograd_and_policies_give_the_same_gradients():
    _, cfg, params = ours()
    x, _, _ = batch()
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    want = adapter(chain.bwd(residuals, torch.ones_like(y), cfg)[0], cfg)
    for op in (remat(chain), with_policy(chain, "minimal"), with_policy(chain, Policy({"*.lora": Recompute()}))):
        y, residuals = op.fwd(params, x, cfg, needs=lora_needs(cfg))
        assert_close(paths(adapter(op.bwd(residuals, torch.ones_like(y), cfg)[0], cfg)), paths(want), rtol=1e-12, atol=1e-12)
    own = tree_map_tensors(lambda t: t.clone().requires_grad_(), adapter(params, cfg))
    differentiable(chain)(with_adapter(params, own, cfg), x, cfg).backward()
    assert_close({p: t.grad for p, t in paths(own).items()}, paths(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stacked", [False, True], ids=["by layer", "stacked"])
def test_accumulators_of_adapters_alone(stacked):
    """They take the adapters' bytes, and two backwards into them give twice the gradients of one."""
    _, cfg, params = ours(stacked=stacked)
    x, needs = batch()[0], lora_needs(cfg)
    into = gradients_like(params, torch.float64, needs)
    assert nbytes(into) == nbytes(adapter(params, cfg))
    for _ in range(2):
        y, residuals = chain.fwd(params, x, cfg, needs=needs)
        total, _ = chain.bwd(residuals, torch.ones_like(y), cfg, into=into)
    want = paths(chain.bwd(chain.fwd(params, x, cfg, needs=needs)[1], torch.ones_like(y), cfg)[0])
    found = paths(total)
    assert found.keys() == want.keys() and {p for p, t in found.items() if t is None} == {p for p, t in want.items() if t is None}
    assert_close({p: t for p, t in found.items() if t is not None}, {p: 2 * t for p, t in want.items() if t is not None})


def test_every_weight_learns_beside_its_adapter():
    """`Needs.ALL` is full fine-tuning: the base's gradients equal the merged weight's."""
    base, cfg, params = ours(alpha=3.0)
    x, _, _ = batch()
    y, residuals = chain.fwd(params, x, cfg)
    got, _ = chain.bwd(residuals, torch.ones_like(y), cfg)
    y, residuals = chain.fwd(merge(params, cfg), x, base)
    want, _ = chain.bwd(residuals, torch.ones_like(y), base)
    assert_close(
        {p.replace(".both.base", ""): g for p, g in paths(got).items() if ".lora." not in p and g is not None},
        {p: g for p, g in paths(want).items() if g is not None},
        rtol=1e-9,
        atol=1e-12,
    )


def test_dropout_drops_for_each_adapter_alone():
    """A mask depends on the key and on the adapter's path: two adapters of one x have different masks."""
    base = ChainConfig(
        steps=(
            Step("both", parallel, ParallelConfig(branches=tuple(Step(n, linear, LinearConfig(64, 64, bias=False)) for n in "qk"))),
        )
    )
    cfg = with_lora(base, 64, ("*",), dropout=0.5)
    assert cfg.extras == ("key",)
    eye = torch.eye(64)
    params = lora_init(tree_map_tensors(torch.zeros_like, chain.init(base, key=random.key(0))), cfg, key=random.key(0))
    params = with_adapter(params, {path: LowRankParams(eye, eye) for path in adapter(params, cfg)}, cfg)
    x = torch.ones(8, 64)
    (q, k), residuals = chain.fwd(params, WithExtras(x, {"key": random.key(1)}), cfg, needs=lora_needs(cfg))
    again, _ = chain.fwd(params, WithExtras(x, {"key": random.key(1)}), cfg)
    other, _ = chain.fwd(params, WithExtras(x, {"key": random.key(2)}), cfg)
    assert set(q.unique().tolist()) == {0.0, 2.0} and same_bits((q, k), again)
    assert not torch.equal(q, k) and not torch.equal(q, other[0]) and 0.3 < q.mean() / 2 < 0.7
    grads, _ = chain.bwd(residuals, (torch.ones_like(q), None), cfg)
    assert_close(adapter(grads, cfg)["both.q"].b, torch.ones(8, 64).mT @ q, rtol=0, atol=0)
    assert adapter(grads, cfg)["both.k"].b is None
    kept = {id(t) for t in paths(residuals).values() if t is not None and t.shape == x.shape}
    assert id(x) in kept and len(kept) == 3, "x once, and a product of the rank for each adapter"


def test_an_extra_key_goes_down_to_the_adapters_and_joins_one_that_is_there():
    _, cfg, params = ours(dropout=0.25)
    assert cfg.extras == ("positions", "labels", "key")
    x, _, _ = batch()
    with pytest.raises(ValueError, match="extras"):
        chain.fwd(params, x, cfg)
    keyed = WithExtras(x.main, {**x.extras, "key": random.key(3)})
    y, residuals = chain.fwd(params, keyed, cfg, needs=lora_needs(cfg))
    want = numeric(params, keyed, cfg)
    got = adapter(chain.bwd(residuals, torch.ones_like(y), cfg)[0], cfg)["blocks.1.mlp.up"].a[1, 2]
    assert_close(got, want, rtol=1e-5, atol=1e-8)
    block = gpt2_block_config(8, 2, 16, 0.1)
    assert with_lora(block, 2, ("*",), dropout=0.1).extras == block.extras == ("key",)
    assert with_lora(block, 2, ("*",), dropout=0.1, key="other").extras == ("key", "other")


def numeric(params, x, cfg, step=1e-5):
    """The loss's slope along one number of an adapter."""
    losses = []
    for sign in (1, -1):
        own = adapter(params, cfg)
        a = own["blocks.1.mlp.up"].a.clone()
        a[1, 2] += sign * step
        own = {**own, "blocks.1.mlp.up": LowRankParams(a, own["blocks.1.mlp.up"].b)}
        losses.append(chain.fwd(with_adapter(params, own, cfg), x, cfg)[0])
    return (losses[0] - losses[1]) / (2 * step)


# what is kept


def test_frozen_weights_keep_no_input_of_their_own():
    """A linear with an adapter keeps x once, for a, and `rank` numbers a row for b; a linear without one keeps nothing."""
    base, cfg, params = ours()
    x, _, _ = batch()
    _, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    held = {path: t for path, t in paths(residuals).items() if t is not None}
    assert not any(path.endswith(("base.x", "k.proj.x")) for path in held)
    assert not any(path.endswith(("base.bias", "embed.ids")) for path in held)
    block = "blocks.1"
    assert {path.removeprefix(f"{block}.mlp.up.both.") for path in held if path.startswith(f"{block}.mlp.up.both.")} == {
        "base.weight",
        "lora.u",
        "lora.a",
        "lora.b",
    }, "its x is computed again, by the norm before it"
    assert chain.fwd(merge(params, cfg), x, base, needs=Needs.NONE)[1] is None
    full = report(chain.fwd(params, x, cfg)[1], params, x).kept_bytes
    assert report(residuals, params, x).kept_bytes < full


def test_a_block_keeps_at_most_six_tenths_of_pefts_bytes():
    """The rows of `python -m benchmarks residuals`, counted again."""
    rows, case = {row.provider: row.value for row in residuals._lora()}, "frozen llama block, LoRA"
    assert rows["funcops"] == pytest.approx(committed("cpu-residuals")[case, "funcops", "kept"], rel=1e-3)
    assert rows["funcops"] <= 0.6 * rows["autograd, peft"]
    if torch.__version__.startswith("2.13."):
        assert rows["autograd, peft"] == pytest.approx(committed("cpu-residuals")[case, "autograd, peft", "kept"], rel=1e-3)


# params


def test_a_fresh_adapter_changes_nothing_and_is_drawn_as_peft_draws_it():
    for stacked in (False, True):
        base = base_config(stacked)
        cfg = with_lora(base, 4, TARGETS, alpha=8)
        params = chain.init(base, key=random.key(0), dtype=torch.float64)
        x, _, _ = batch()
        made = lora_init(params, cfg, key=random.key(1))
        assert same_bits(chain.fwd(made, x, cfg)[0], chain.fwd(params, x, base)[0])
        every = [t for path, t in layered(cfg, made).items() if path.endswith("lora.a")]
        for a in every:
            assert a.abs().max() <= a.shape[1] ** -0.5 and a.abs().max() > 0.9 * a.shape[1] ** -0.5
            assert abs(a.std() * (3 * a.shape[1]) ** 0.5 - 1) < 0.3  # of a uniform in ±1/sqrt(I)
        firsts = torch.stack([a[0, :4] for a in every])
        assert len(firsts.unique(dim=0)) == len(every), "two adapters with one key"
        assert same_bits(made, lora_init(params, cfg, key=random.key(1)))
    wide = lora_init(params, cfg, key=random.key(1), dtype=torch.float32)
    assert {t.dtype for t in paths(adapter(wide, cfg)).values()} == {torch.float32}


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_merged_is_unmerged_within_rounding(stacked):
    base, cfg, params = ours(stacked=stacked)
    x, _, _ = batch()
    merged = merge(params, cfg)
    assert_close(chain.fwd(merged, x, base)[0], chain.fwd(params, x, cfg)[0], rtol=1e-12, atol=1e-12)
    want = theirs(cfg, params).merge_and_unload().state_dict()
    for path, t in layered(base, merged).items():
        assert_close(t, want[peft_name(path).removeprefix("base_model.model.")], rtol=1e-12, atol=1e-12)
    back = unmerge(merged, adapter(params, cfg), cfg)
    assert_close(paths(back), paths(params), rtol=1e-12, atol=1e-12)


def test_a_merge_in_16_bits_rounds_once():
    base = ChainConfig(steps=(Step("a", linear, LinearConfig(64, 64)),))
    cfg = with_lora(base, 32, ("a",), alpha=32)
    params = drawn(lora_init(chain.init(base, key=random.key(0), dtype=torch.bfloat16), cfg, key=random.key(1)), cfg)
    both = params["a"]["both"]
    exact = both["base"].weight.double() + both["lora"].b.double() @ both["lora"].a.double()
    got = merge(params, cfg)["a"].weight
    assert (got == exact.bfloat16()).float().mean() > 0.999 and got.dtype is torch.bfloat16
    assert params["a"]["both"]["base"].bias is merge(params, cfg)["a"].bias


def test_a_tie_stays_one_of_the_linears_own_weight():
    steps = (Step("embed", embedding, EmbeddingConfig(5, 4)), Step("head", linear, LinearConfig(4, 5, bias=False)))
    base = ChainConfig(steps=steps, ties={"head.weight": "embed.weight"})
    cfg = with_lora(base, 2, ("head",))
    assert cfg.ties == (("head.both.base.weight", "embed.weight"),)
    params = drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg)
    ids = torch.arange(5)
    y, residuals = chain.fwd(params, ids, cfg, needs=lora_needs(cfg))
    lora, weight = params["head"]["both"]["lora"], params["embed"].weight
    assert params["head"]["both"]["base"].weight is None and lora.a.shape == (2, 4)
    assert_close(y, weight @ weight.mT + weight @ lora.a.mT @ lora.b.mT)
    grads, _ = chain.bwd(residuals, torch.ones_like(y), cfg)
    assert grads["embed"].weight is None and grads["head"]["both"]["lora"].b is not None
    with pytest.raises(ValueError, match="merge: cfg must be one where head.both.base.weight is not tied"):
        merge(params, cfg)


def test_a_bare_linear_becomes_a_chain():
    base = LinearConfig(4, 3)
    cfg = with_lora(base, 2, ("",))
    params = lora_init(linear.init(base, key=random.key(0)), cfg, key=random.key(1))
    x = torch.randn(2, 4)
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    assert_close(y, linear.fwd(params["both"]["base"], x, base)[0])
    assert chain.bwd(residuals, y, cfg)[0]["both"]["lora"].b.shape == (3, 2)
    assert merge(params, cfg).weight.shape == (3, 4)


def test_adapters_of_two_ranks():
    base = base_config()
    cfg = with_lora(with_lora(base, 2, ("*.q.proj",)), 5, ("*.down",), alpha=10)
    params = lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1))
    ranks = {path.rpartition(".")[2] if "proj" not in path else "q": len(own.a) for path, own in adapter(params, cfg).items()}
    assert ranks == {"q": 2, "down": 5}


# low precision


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Block(keep="input")], ids=["row", "input"])
def test_a_base_in_low_precision(recipe):
    """Whichever rewrite comes first: one config, codes of only the frozen weights, and gradients of the adapters."""
    base = base_config()
    only = ("*.proj", "*.out", "*.up", "*.down")
    low_first = with_lora(with_recipe(base, recipe, only=only), 3, TARGETS, alpha=6.0)
    cfg = with_recipe(with_lora(base, 3, TARGETS, alpha=6.0), recipe, only=("*.proj", "*.base"))
    assert low_first == cfg
    params = drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg)
    work = quantize_params(params, cfg, dtype=torch.float32)
    x, _, _ = batch()
    y, residuals = chain.fwd(work, x, cfg, needs=lora_needs(cfg))
    dparams, amaxes = split_amaxes(chain.bwd(residuals, torch.ones_like(y), cfg)[0])
    got = {path: g for path, g in paths(dparams).items() if g is not None}
    assert got.keys() == {path for path in paths(params) if ".lora." in path} and not amaxes
    _, exact, same = ours(dtype=torch.float32)
    want, kept = chain.fwd(params, x, exact, needs=lora_needs(exact))
    grads = paths(chain.bwd(kept, torch.ones_like(want), exact)[0])
    assert_close(y, want, rtol=0.1, atol=0.1)
    for path, g in got.items():  # fp8 rounds by 6 % an element: the direction is what stays
        assert torch.cosine_similarity(g.flatten(), grads[path].flatten(), dim=0) > 0.9, path
    with pytest.raises(
        TypeError, match=r"params\.blocks.0.* must be a float tensor, got QWeight.*: merge before the weights are quantised"
    ):
        merge(work, cfg)


def test_adapters_of_an_embedding():
    """ "*" is all linears, as PEFT's "all-linear"; a written name is an embedding too. The head keeps the base's weight."""
    steps = (Step("embed", embedding, EmbeddingConfig(7, 4)), Step("head", linear, LinearConfig(4, 7, bias=False)))
    base = ChainConfig(steps=steps, ties={"head.weight": "embed.weight"})
    assert [one.path for one in adapted_linears(with_lora(base, 2, ("*",)))] == ["head"]
    cfg = with_lora(base, 2, ("embed", "*"), dropout=0.5)
    assert cfg.extras == ("key",) and [one.path for one in adapted_linears(cfg)] == ["embed", "head"]
    cfg, ids = with_lora(base, 2, ("embed",), alpha=3.0, dropout=0.5), torch.tensor([[3, 0, 3], [6, 1, 2]])
    assert not cfg.extras  # ids have no dropout
    pretrained = chain.init(base, key=random.key(0), dtype=torch.float64)
    params = lora_init(pretrained, cfg, key=random.key(1))
    assert torch.equal(chain.fwd(params, ids, cfg)[0], chain.fwd(pretrained, ids, base)[0])
    params = drawn(params, cfg)
    own = adapter(params, cfg)["embed"]
    y, residuals = chain.fwd(params, ids, cfg, needs=lora_needs(cfg))
    leaves_of = [t.detach().clone().requires_grad_() for t in (own.a, own.b)]
    table = pretrained["embed"].weight
    want = (table[ids] + 1.5 * leaves_of[0].mT[ids] @ leaves_of[1].mT) @ table.mT
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    grads = adapter(chain.bwd(residuals, dy, cfg)[0], cfg)["embed"]
    for got, wanted in zip((grads.a, grads.b), torch.autograd.grad(want, leaves_of, dy), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="merge: cfg must be one where embed.both.base.weight is not tied"):
        merge(params, cfg)


def test_an_embedding_is_merged():
    steps = (Step("embed", embedding, EmbeddingConfig(7, 4, padding_idx=2)), Step("norm", rms_norm, RMSNormConfig(4)))
    base = ChainConfig(steps=steps)
    cfg, ids = with_lora(base, 2, ("embed",), alpha=3.0), torch.arange(7)
    params = drawn(lora_init(chain.init(base, key=random.key(0), dtype=torch.float64), cfg, key=random.key(1)), cfg)
    merged = merge(params, cfg)
    torch.testing.assert_close(chain.fwd(merged, ids, base)[0], chain.fwd(params, ids, cfg)[0])
    assert_close(paths(unmerge(merged, adapter(params, cfg), cfg)), paths(params))
    y, residuals = chain.fwd(params, ids, cfg)
    grads = chain.bwd(residuals, torch.ones_like(y) + torch.arange(4), cfg)[0]["embed"]["both"]
    assert not grads["lora"].a[:, 2].any() and not grads["base"].weight[2].any() and grads["lora"].a[:, 3].any()
    with pytest.raises(TypeError, match="lora_init: params.embed must be an EmbeddingParams .*, got RMSNormParams"):
        lora_init({"embed": merged["norm"], "norm": merged["norm"]}, cfg, key=random.key(1))


@pytest.mark.parametrize("rules", [{"embed": "vocab"}, {"up": "column", "down": "row"}], ids=str)
def test_an_embedding_with_an_adapter_over_ranks(rules):
    steps = (Step("embed", embedding, EmbeddingConfig(8, 4)), Step("up", linear, LinearConfig(4, 8)))
    base = ChainConfig(steps=(*steps, Step("down", linear, LinearConfig(8, 4))))
    cfg, mesh = with_lora(base, 2, ("embed", "*")), dist.Mesh.abstract({"tp": 2}, rank=0)
    if "embed" in rules:
        with pytest.raises(ValueError, match="rules for embed must be of another role .*, got LowRankEmbeddingConfig"):
            dist.parallel(cfg, rules, mesh)
        return
    assert chain.init(dist.parallel(cfg, rules, mesh), device="meta")["embed"]["both"]["lora"].a.shape == (2, 8)


def test_a_recipe_whose_scales_would_never_move_is_refused():
    low = with_recipe(with_lora(base_config(), 3, TARGETS), Fp8Delayed(history=2), only=("*.up.both.base",))
    with pytest.raises(ValueError, match=r"lora_needs: the recipe of blocks\.\*\.mlp\.up\.both\.base must be one without delayed"):
        lora_needs(low)


def test_a_write_to_a_frozen_weight_is_seen():
    _, cfg, params = ours(dtype=torch.float32)
    x, _, _ = batch()
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    params["blocks"][0]["mlp"]["up"]["both"]["lora"].b.add_(1)
    with pytest.raises(StaleResidualError, match=r"blocks\.0\.mlp\.up\.both\.lora"):
        chain.bwd(residuals, torch.ones_like(y), cfg)


@pytest.mark.slow
def test_a_step_compiles():
    base = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("a", linear, LinearConfig(8, 4))))
    cfg = with_lora(base, 2, ("a",), dropout=0.25)
    params = drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg)
    x, needs = WithExtras(torch.randn(3, 8), {"key": random.key(3)}), lora_needs(cfg)

    def step(params, x):
        y, residuals = chain.fwd(params, x, cfg, needs=needs)
        return adapter(chain.bwd(residuals, y, cfg)[0], cfg)

    got, want = torch.compile(step, backend="aot_eager", fullgraph=True)(params, x), step(params, x)
    assert_close(paths(got), paths(want))


def test_a_step_can_be_captured():
    _, cfg, params = ours(dtype=torch.float32)
    x, _, _ = batch()

    def step(params, x):
        y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
        return adapter(chain.bwd(residuals, torch.ones_like(y), cfg)[0], cfg)

    assert check_capturable(step, params, x) == []


# what raises


NORMED = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("a", linear, LinearConfig(4, 4, bias=False))))


def _made():
    cfg = with_lora(NORMED, 2, ("a",))
    return cfg, lora_init(chain.init(NORMED, key=random.key(0)), cfg, key=random.key(1))


LONE = ChainConfig(steps=NORMED.steps[1:])


def _words():
    base = ChainConfig(steps=(Step("words", embedding, EmbeddingConfig(6, 4)),))
    cfg = with_lora(base, 2, ("words",))
    return cfg, lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1))


def _dropping():
    """Two adapters, one of them with dropout."""
    base = ChainConfig(steps=(Step("a", linear, LinearConfig(4, 4)), Step("b", linear, LinearConfig(4, 4))))
    cfg = with_lora(with_lora(base, 2, ("a",)), 2, ("b",), dropout=0.5, key="key")
    return cfg, lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1))


BAD = [
    Error(call=lambda: with_lora(NORMED, 0, ("a",)), match="with_lora: rank must be"),
    Error(
        call=lambda: with_lora(NORMED, 2, ("b",)),
        match="with_lora: targets must be globs over linear steps and names of embeddings, without an adapter (a), got 'b'",
    ),
    Error(call=lambda: with_lora(NORMED, 2, ("norm",)), match="got 'norm', which matches norm (RMSNormConfig)"),
    Error(
        call=lambda: with_lora(EmbeddingConfig(4, 4), 2, ("*",)),
        match="without an adapter (''), got '*', which matches '' (embedding)",
    ),
    Error(call=lambda: with_lora(_made()[0], 2, ("*",)), match="got '*', which matches a, which has one"),
    Error(call=lambda: with_lora(NORMED, 2, ()), match="with_lora: targets must be at least one glob, got ()"),
    Error(call=lambda: with_lora(NORMED, 2, "a"), match="with_lora: targets must be a tuple of globs", error=TypeError),
    Error(call=lambda: with_lora(NORMED, 2, ("a",), dropout=1.0), match="with_lora: dropout must be below 1, got 1.0"),
    Error(call=lambda: lora_needs(NORMED), match="lora_needs: cfg must be one that with_lora made"),
    Error(
        call=lambda: lora_init(_made()[1], _made()[0], key=random.key(0)),
        match="lora_init: params.a must be a LinearParams (params of the base config), got dict",
        error=TypeError,
    ),
    Error(call=lambda: lora_init({}, _made()[0], key=random.key(0)), match="lora_init: params must be a tree with a, got"),
    Error(
        call=lambda: with_adapter(_made()[1], {"b": LowRankParams(None, None)}, _made()[0]),
        match="with_adapter: adapter must be keyed by the paths a, got missing a; extra b",
    ),
    Error(
        call=lambda: with_adapter(_made()[1], {"a": LowRankParams(torch.ones(3, 4), torch.ones(4, 2))}, _made()[0]),
        match="with_adapter: adapter['a'].a must be [2, 4], got [3, 4]",
    ),
    Error(
        call=lambda: merge(chain.init(NORMED, key=random.key(0)), _made()[0]), match="merge: params must be a tree with a.both.base"
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"b": "c"}),
        match="save_adapter: names must be globs, one of them for a, got b",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"?": "c"}),
        match="names: '?' must be a glob whose only wildcard is '*', got others",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_words()), names={"words": ("c", "d")}),
        match="save_adapter: names['words'] must be a name, as words is an embedding, got ('c', 'd')",
        error=TypeError,
    ),
    Error(
        call=lambda: lora_init({"a": LinearParams(None, None)}, with_lora(LONE, 2, ("a",)), key=random.key(0)),
        match="lora_init: params must be a tree with float tensors, got",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"*": "c"}),
        match="save_adapter: names['*'] must be a name with as many '*', got 'c'",
    ),
    Error(
        call=lambda: adapter({"a": {"both": {"lora": {"a": torch.ones(2, 4), "b": torch.ones(4, 2)}}}}, _made()[0]),
        match="adapter: tree.a.both.lora must be LowRankParams, got dict",
        error=TypeError,
    ),
    Error(
        call=lambda: with_adapter(_made()[1], {"a": (torch.ones(2, 4), torch.ones(4, 2))}, _made()[0]),
        match="with_adapter: adapter['a'] must be LowRankParams, got tuple",
        error=TypeError,
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), base=3), match="save_adapter: base must be str, got 3", error=TypeError
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), task=3),
        match="save_adapter: task must be str or NoneType, got 3",
        error=TypeError,
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"a": ()}),
        match="save_adapter: names['a'] must be a name, or several, got ()",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"a": ("c", "d", "e")}),
        match="save_adapter: names['a'] must be names for equal parts of 4 rows, got 3 of them",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"a": ""}),
        match="save_adapter: names must be a name for each adapter, got none for a",
    ),
    Error(
        call=lambda: save_adapter("no", *reversed(_dropping())),
        match="save_adapter: cfg must be one with the same dropout for all adapters, as PEFT has one, got [0.0, 0.5]",
    ),
    Error(call=lambda: RowsOf(3, 4, (0,)), match="RowsOf: module must be str, got 3", error=TypeError),
    Error(call=lambda: ParameterOf(None), match="ParameterOf: parameter must be str, got None", error=TypeError),
    Error(
        call=lambda: save_adapter("no", *reversed(_made()), names={"a": "c", "b": "d"}),
        match="save_adapter: names must be globs over the paths of adapters (a; of a decoder: models.peft_names), got 'b'",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.match[:60])
def test_bad_calls_raise_by_name(bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bad.error) as raised:
        bad.call()
    assert bad.match in str(raised.value) and not list(tmp_path.iterdir())
