"""Every field of a config.json that is read is varied: Hugging Face's logits change as ours do, or the field is refused by name."""

import copy
import json
import re

import pytest
import torch
from tiny_hf import BASE, FAMILIES, Wide, transformers

from funcops import WithExtras, chain
from funcops.models import decoder, decoder_x, fields, from_hf
from funcops.testing.tolerances import HF_GRADIENTS

IDS = torch.randint(1, 48, (2, 19), generator=torch.Generator().manual_seed(2))
ROPES = [dict(rope_type="linear", rope_theta=100.0, factor=2.0), dict(rope_type="default", rope_theta=100.0)]
PART = [{**rope, "partial_rotary_factor": 0.5} for rope in ROPES]
VALUES = {  # of fields whose values their types do not tell
    "hidden_act": ["gelu", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "activation_function": ["gelu", "relu", "silu"],
    "partial_rotary_factor": [0.5],
    "rope_parameters": [*ROPES, *PART],
    "rope_theta": [50.0],
    "rope_local_base_freq": [50.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}],
    "original_max_position_embeddings": [8],
    "num_hidden_layers": [1],
    "sliding_window": [2, None],
    "layer_types": [["full_attention", kind] * 3 for kind in ("sliding_attention", "chunked_attention", "linear_attention")],
    "full_attention_interval": [3],
    "query_pre_attn_scalar": [2, 30],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [0.5, None],
    "mlp_only_layers": [[0], [1]],
    "rms_norm_eps": [0.5],
    "layer_norm_epsilon": [0.5],
    "n_inner": [24],
    "head_dim": [12],
    "hidden_size": [16],
    "n_embd": [16],
    "intermediate_size": [24],
    "vocab_size": [64],
    "max_position_embeddings": [32],
    "n_positions": [32],
    "num_key_value_heads": [1],
    "model_type": [],
    "architectures": [],
    "routed_scaling_factor": [2.5],
    "use_mrope": [True],
    "swiglu_limit": [1.5],
    "swiglu_alpha": [0.7],
    "router_jitter_noise": [0.5],
    "attention_dropout": [0.5],
    "no_rope_layers": [[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]],
    "no_rope_layer_interval": [2],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [0.5],
    "attention_multiplier": [0.5],
    "logits_scaling": [3.0],
    "attn_scale": [0.9],
    "attention_chunk_size": [4, None],
    "moe_layers": [[0], [1, 0]],
}
NOT_ALONE = {  # sizes, which the shapes of params hold
    "num_attention_heads",
    "n_head",
    "n_layer",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "n_group",
    "topk_group",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "first_k_dense_replace",
    "linear_num_key_heads",
    "linear_num_value_heads",
}
FIRST = ("partial_rotary_factor", "attn_logit_softcapping")  # of the first tier: those that some families read and do not use
REFUSED = {  # what an error names in the place of the field
    "head_dim": "rotary_dim",
    "rope_parameters": "rope",
    "rope_scaling": "rope",
    "rope_theta": "rope",
    "partial_rotary_factor": "rotary_dim",
    "num_hidden_layers": "moe.dense|first_k_dense_replace",
    "mlp_only_layers": "moe.dense",
    "no_rope_layers": "layer_types",
    "num_key_value_heads": "kv_heads",
}


def read_by(family):
    """The fields that are read of a family's config."""
    seen = fields.Fields("test", {}, None).taken
    kind, options = FAMILIES[family]
    options = copy.deepcopy(options if kind == "gpt2" else {**BASE, **options})
    given = transformers.AutoConfig.for_model(kind, **options).to_dict()
    real = fields.Fields

    class Noting(real):
        def __init__(self, *args):
            super().__init__(*args)
            self.taken = seen

    fields.Fields = Noting
    try:
        fields.read_config("test", given, 19)
    except ValueError:  # of fields that a folder's config.json has under other names
        pass
    finally:
        fields.Fields = real
    return sorted(seen), given


def variants():
    for family in FAMILIES:
        names, given = read_by(family)
        for name in names:
            before = given.get(name)
            if name in NOT_ALONE:
                values = []
            elif name in VALUES:
                values = VALUES[name]
            elif isinstance(before, bool) or before is None:
                values = [not before]
            elif isinstance(before, int):
                values = [before + 1]
            else:
                raise AssertionError(f"name values of {name} ({before!r}) in VALUES")
            for value in values:
                marks = () if name in FIRST else pytest.mark.slow
                yield pytest.param(family, name, value, id=f"{family}-{name}-{value}", marks=marks)


@pytest.mark.parametrize(("family", "name", "value"), list(variants()))
def test_a_field_that_is_read_is_used_as_hugging_face_uses_it(family, name, value, tmp_path):
    kind, options = FAMILIES[family]
    options = copy.deepcopy({**({} if kind == "gpt2" else BASE), **options, name: value})  # Hugging Face writes into them
    if name == "layer_types":
        options["layer_types"] = value[: options.get("num_hidden_layers", 2)]
    with Wide():
        try:
            own = transformers.AutoConfig.for_model(kind, **options)
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                model = transformers.AutoModelForCausalLM.from_config(
                    own, attn_implementation="eager", experts_implementation="eager"
                )
            finally:
                torch.set_default_dtype(default)
            draw = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in model.double().eval().parameters():
                    p.copy_((p.mean() if p.dim() == 1 else 0) + 0.3 * torch.randn(p.shape, generator=draw, dtype=torch.float64))
                want = model(IDS).logits
            model.save_pretrained(tmp_path)
        except Exception as error:  # Hugging Face has no such model
            pytest.skip(f"{type(error).__name__}: {error}"[:100])
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {name: options[name]} if options[name] is not None else said))
    try:
        params, cfg = from_hf(tmp_path, length=IDS.shape[1])
    except (ValueError, TypeError) as error:
        assert re.search(rf"{name}|{REFUSED.get(name, name)}", str(error)), error
        return
    y, _ = chain.fwd(params, decoder_x(cfg, IDS, torch.float64), decoder(cfg))
    got = y.main if type(y) is WithExtras else y
    torch.testing.assert_close(got, want, atol=HF_GRADIENTS, rtol=0)
