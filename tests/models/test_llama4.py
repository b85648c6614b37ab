"""Llama 4: greedy tokens over the ends of chunks, what a temperature keeps, and how fields of config.json are read."""

import pytest
import torch
from tiny_hf import BASE, EXPERTS, saved

from funcops import ExpertsConfig, chain
from funcops.engine.trees import paths
from funcops.models import decoder, decoder_x, from_hf, generate
from funcops.models.fields import read_config, write_config

GIVEN = BASE | EXPERTS | dict(model_type="llama4_text", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500.0)
IDS = torch.randint(1, 48, (1, 19), generator=torch.Generator().manual_seed(2))


def test_greedy_tokens_are_hugging_faces(tmp_path):
    """The prompt ends within its third chunk of 7 positions; the tokens go on through three more."""
    model = saved("llama4", tmp_path)
    params, cfg = from_hf(tmp_path)
    assert cfg.chunks == (7, 7, None, 7, 7) and cfg.unrotated == (2,) and cfg.temperature == (0.5, 4.0)
    with torch.no_grad():
        want = model.generate(IDS, max_new_tokens=20, do_sample=False)[:, IDS.shape[1] :]
    got = torch.stack(list(generate(params, cfg, IDS, 20, chunk=5)), 1)
    assert torch.equal(got, want) and len(set(want[0].tolist())) > 5


def test_a_temperature_keeps_no_activation(tmp_path):
    saved("llama4", tmp_path)
    params, cfg = from_hf(tmp_path)
    _, kept = chain.fwd(params, decoder_x(cfg, IDS, torch.float32), decoder(cfg))
    found = {path.rpartition(".")[2]: t.shape for path, t in paths(kept).items() if ".temperature." in path and t is not None}
    assert found == {"gate": (IDS.shape[1], 1)}


def test_fields_of_early_files_and_defaults():
    cfg = read_config("test", GIVEN | dict(num_hidden_layers=5, no_rope_layers=[], attn_temperature_tuning=4, head_dim=8))
    assert cfg.unrotated == (3,) and cfg.chunks == (8192, 8192, 8192, None, 8192) and cfg.temperature == (0.1, 8192.0)
    assert cfg.moe.experts == ExpertsConfig(4, 32, 40, weights_on="input") and cfg.moe.shared == 40 and cfg.hidden == 16384
    assert cfg.rope.interleaved and read_config("test", write_config(cfg)) == cfg
    without = read_config(
        "test",
        GIVEN
        | dict(attn_temperature_tuning=False, use_qk_norm=False, attention_chunk_size=None, layer_types=["full_attention"] * 2),
    )
    assert without.chunks == () and without.temperature is None and without.qk_norm is None
    assert read_config("test", write_config(without)) == without


WRONG = {
    "no_rope_layers must be a list of 2, got 1": dict(no_rope_layers=[1]),
    "layer_types must be a list of 2, got 1": dict(layer_types=["full_attention"]),
    "layer_types must be of 'chunked_attention' and 'full_attention', got 'sliding'": dict(layer_types=["sliding"] * 2),
    "attention_chunk_size must be given, got none": dict(attention_chunk_size=None),
    "interleave_moe_layer_step must be at least 1, got 0": dict(interleave_moe_layer_step=0),
    "no_rope_layer_interval must be at least 1, got 0": dict(no_rope_layer_interval=0),
    "router_jitter_noise must be 0.0, got 0.5": dict(router_jitter_noise=0.5),
    "attn_temperature_tuning must be bool, got 'yes'": dict(attn_temperature_tuning="yes"),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_fields_are_named(said):
    with pytest.raises((ValueError, TypeError), match=f"^test: {said}"):
        read_config("test", GIVEN | WRONG[said])


@pytest.mark.parametrize(("interval", "unrotated"), [(1, (0, 1, 2, 3, 4)), (2, (1, 3)), (3, (2,)), (5, (4,)), (6, ())])
def test_every_interval_from_one_is_read(interval, unrotated):
    given = GIVEN | dict(num_hidden_layers=5, no_rope_layer_interval=interval, router_jitter_noise=0.0)
    assert read_config("test", given).unrotated == unrotated
