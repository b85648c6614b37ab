"""Each family with each option that it can write: Hugging Face's own class takes the config.json, and its logits are ours."""

import dataclasses
import json

import pytest
import torch
from tiny_hf import BASE, FAMILIES, transformers

from funcops import WithExtras, chain, random
from funcops.models import decoder, decoder_x, from_hf, to_hf
from funcops.models.fields import read_config, write_config
from funcops.testing.tolerances import HF_LOGITS

IDS = torch.randint(1, 48, (2, 11), generator=torch.Generator().manual_seed(2))
OPTIONS = {
    "as it is": lambda cfg: {},
    "no window": lambda cfg: dict(windows=(), local_rope=None if cfg.family != "gemma3_text" else cfg.local_rope),
    "all windows": lambda cfg: dict(windows=(5,) * cfg.layers),
    "one window": lambda cfg: dict(windows=(*(None,) * (cfg.layers - 1), 4)),
    "no chunks": lambda cfg: dict(chunks=()),
    "all chunks": lambda cfg: dict(chunks=(4,) * cfg.layers),
    "no temperature": lambda cfg: dict(temperature=None),
    "no softcap": lambda cfg: dict(softcap=None, logit_softcap=None),
    "the other head": lambda cfg: dict(tied=not cfg.tied),
    "other biases": lambda cfg: dict(qkv_bias=not cfg.qkv_bias, out_bias=not cfg.out_bias),
    "another bias": lambda cfg: dict(qkv_bias=not cfg.qkv_bias),
    "the other mlp": lambda cfg: dict(mlp_bias=not cfg.mlp_bias),
    "all rotated": lambda cfg: dict(unrotated=()),
    "no norm of q": lambda cfg: dict(qk_norm=None),
    "gelu": lambda cfg: dict(mlp="geglu", moe=None if cfg.moe is None else changed(cfg.moe, "geglu")),
    "scale": lambda cfg: dict(scale=0.25),
    "plain rope": lambda cfg: dict(rope=None if cfg.rope is None else dataclasses.replace(cfg.rope, scaling=None)),
}
FIRST = ("gemma2", "gemma3", "gpt_oss")
# null where an absent field would mean a default, or another model
NULLS = {"rope_scaling", "sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping"}
WINDOWS = ("mistral", "mixtral", "phi3", "qwen3_moe")  # the families whose layers all have the window, null for none


def changed(moe, kind):
    return dataclasses.replace(moe, experts=dataclasses.replace(moe.experts, kind=kind))


def config_of(name, option, folder):
    """The tiny model's config, and what the option changes."""
    kind, options = FAMILIES[name]
    made = transformers.AutoConfig.for_model(kind, **({} if kind == "gpt2" else BASE) | json.loads(json.dumps(options)))
    made.save_pretrained(folder)
    cfg = read_config("test", json.loads((folder / "config.json").read_text()), 11)
    return cfg, OPTIONS[option](cfg)


def cells():
    for name in FAMILIES:
        for option in OPTIONS:
            first = name in FIRST and option == "no window"
            yield pytest.param(name, option, marks=() if first else pytest.mark.slow, id=f"{name}-{option}")


@pytest.mark.parametrize(("name", "option"), list(cells()))
def test_hugging_face_takes_what_is_written(name, option, tmp_path):
    plain, changes = config_of(name, option, tmp_path)
    try:
        cfg = dataclasses.replace(plain, **changes)
        said = write_config(cfg)
    except ValueError as error:  # the family has no such model
        assert option != "as it is" and " must be " in str(error)
        return
    nulls = {field for field, value in said.items() if value is None}
    assert nulls <= NULLS and ("sliding_window" not in nulls or cfg.family in WINDOWS)
    params = chain.init(decoder(cfg), key=random.key(0), dtype=torch.float32)
    params["embed"].weight.mul_(0.1)  # logits near 1 where it is the head's, too
    to_hf(params, cfg, tmp_path / "ours", fields={"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    again, same = from_hf(tmp_path / "ours", length=IDS.shape[1])
    assert same == dataclasses.replace(cfg, embed_scale=same.embed_scale, scale=same.scale)
    y, _ = chain.fwd(again, decoder_x(cfg, IDS, torch.float32), decoder(cfg))
    got = y.main if type(y) is WithExtras else y
    torch.testing.assert_close(got, model.eval()(IDS).logits, atol=HF_LOGITS, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_read_as_it_was(name, tmp_path):
    """The config alone is read, with the numbers that the family calls by names of its own."""
    cfg, _ = config_of(name, "as it is", tmp_path)
    assert read_config("test", json.loads(json.dumps(write_config(cfg))), 11) == cfg
    assert ("rope_theta" in write_config(cfg)) is (cfg.rope is not None)
    local = cfg.local_rope.theta if cfg.family == "gemma3_text" else None  # by its name in versions before 5
    assert write_config(cfg).get("rope_local_base_freq") == local
    for part in ("moe", "latent"):
        if getattr(cfg, part) is not None and cfg.family in ("mixtral", "qwen3_moe", "llama4_text"):
            with pytest.raises(ValueError, match=f"to_hf: cfg.{part} must be a MoEConfig, for family '{cfg.family}', got None"):
                write_config(dataclasses.replace(cfg, **{part: None}))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepseek_v3", {"latent": None, "rope": None}, "latent must be a LatentConfig, for family 'deepseek_v3', got None"),
        ("llama", {"rope": None}, r"rope must be RopeConfig\(dim=6\) for family 'llama' with these other fields, got None"),
    ],
)
def test_a_config_without_what_its_family_has_is_not_written(name, changes, said, tmp_path):
    cfg, _ = config_of(name, "as it is", tmp_path)
    with pytest.raises(ValueError, match=rf"^to_hf: cfg\.{said}$"):
        write_config(dataclasses.replace(cfg, **changes))


def test_phis_longrope_by_its_earlier_name(tmp_path):
    cfg, _ = config_of("phi3", "as it is", tmp_path)
    said = write_config(cfg)
    del said["rope_parameters"]
    for key in ("rope_type", "type"):
        scaling = {name: value for name, value in said["rope_scaling"].items() if name != "rope_type"}
        assert read_config("test", {**said, "rope_scaling": {key: "yarn", **scaling}}, 11) == cfg


WRONG = {
    "cfg must be DecoderConfig, got 'llama'": {"cfg": "llama"},
    "folder must be str or PathLike, got 3": {"folder": 3},
    "fields must be Mapping or NoneType, got list": {"fields": ["use_cache"]},
    "shard_bytes must be at least 1, got 0": {"shard_bytes": 0},
    "shard_bytes must be int or SymInt, got 1000000000.0": {"shard_bytes": 1e9},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_argument_is_refused_before_a_folder_is_made(said, tmp_path):
    """Before the params are looked at, too."""
    cfg = read_config("test", BASE | dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e4))
    given = {"params": None, "cfg": cfg, "folder": tmp_path / "model", **WRONG[said]}
    with pytest.raises((ValueError, TypeError)) as raised:
        to_hf(**given)
    assert str(raised.value) == f"to_hf: {said}" and not list(tmp_path.iterdir())
