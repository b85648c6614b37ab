"""Plans of models in low precision: the bytes that are gathered in codes, against programs."""

import dataclasses
import math

import pytest
import torch

from funcops import WithExtras, chain, dist
from funcops.low_precision import MXFP8, Fp8Block, Fp8Current, with_recipe
from funcops.models.blocks import Sizes, decoder_config
from funcops.schedule import GPUS, Decoder, Layout, Mixture
from funcops.schedule.layout import gathered_bytes, stages_of


def tokens(rows, seq):
    ids = torch.zeros(rows, seq, dtype=torch.int64)
    return WithExtras(ids, {"positions": torch.arange(seq), "labels": ids})


CODED = [Fp8Block(), MXFP8(w_tile=(32, 32)), Fp8Current()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CODED, ids=lambda one: one.w.name)
def test_the_bytes_of_gathers_are_the_recorded_ones(recipe):
    """A layer's gather of `zero3` with a recipe, in codes where it gathers these; shards of k and v are whole blocks of 32."""

    def sent(layers):
        sizes = Sizes(dim=256, layers=layers, heads=4, kv_heads=2, hidden=512, vocab=32)
        cfg = with_recipe(decoder_config(sizes), recipe, only=("blocks.*",))

        def step(mesh):
            own = dist.zero3(cfg, mesh["dp"], dtype=torch.bfloat16, ordered=False)
            chain.fwd(chain.init(own, device="meta"), tokens(2, 8), own)

        program = dist.check_program(step, {"dp": 4}, ranks=(0,))[0]
        gathers = [one for one in program.sent if one.op == "all_gather"]
        return sum(4 * math.prod(one.shape) * one.dtype.itemsize for one in gathers)

    model = Decoder(256, 512, 1, 4, 32, 8, 8, kv_heads=2, low=recipe)
    (said, _), plain = gathered_bytes(model, 1, 1, 4, 4), gathered_bytes(dataclasses.replace(model, low=True), 1, 1, 4, 4)[0]
    assert said == pytest.approx(sent(2) - sent(1), rel=2e-3), "but for the padding of scales"
    assert (said < plain) == (recipe != Fp8Current())
    found = [c.nbytes for c in stages_of(model, Layout(dp=4, zero=3), GPUS["H100"]).last.collectives if c.kind == "all_gather"]
    assert said in found and (plain in found) == (said == plain)


SPLITS = [(1, 4, "qkvoud"), (2, 2, "qkvoud"), (2, 4, "quod"), (4, 4, "oud"), (1, 1, "qkvoud")]  # tp, ranks, what goes in codes


@pytest.mark.parametrize(("tp", "ranks", "coded"), SPLITS)
def test_whole_blocks_are_gathered_in_codes(tp, ranks, coded):
    """A weight goes in codes if each of the ranks has whole blocks of 32 rows of its tp part; all else in two bytes."""
    model = Decoder(256, 512, 1, 4, 32, 8, 8, kv_heads=2, low=MXFP8(w_tile=(32, 32)))
    q, k, v, o = (256 // tp, 256), (128 // tp, 256), (128 // tp, 256), (256, 256 // tp)
    shapes = dict(q=q, k=k, v=v, o=o, u=(1024 // tp, 256), d=(256, 512 // tp))
    want = sum(sum(model.low.w.nbytes(*one)) if name in coded else 2 * math.prod(one) for name, one in shapes.items())
    assert gathered_bytes(model, tp, 1, ranks, 1) == (want + 2 * 2 * 256 / tp, 0.0)


@pytest.mark.parametrize(("ep", "replicas", "coded"), [(1, 2, True), (2, 4, True), (4, 8, False)])
def test_the_experts_of_a_rank_are_gathered_in_codes(ep, replicas, coded):
    """They are sharded by their first dimension, over the ranks with the same experts; in codes only if these divide them."""
    model = Decoder(64, 96, 1, 4, 32, 8, 8, mixture=Mixture(8, 2), low=MXFP8(w_tile=(32, 32)))
    own, shapes = 8 // ep, ((192, 64), (64, 96))
    want = own * sum(sum(model.low.w.nbytes(*one)) if coded else 2 * math.prod(one) for one in shapes)
    assert gathered_bytes(model, 1, ep, 1, replicas)[1] == want
