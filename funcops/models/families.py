"""Hugging Face's families of models as `DecoderConfig`s: tables of the fields of their config.json and of their tensors.

A `Rule` maps tensors of a checkpoint to params. In its paths and names `{l}` stands for a layer's path, `{i}` for the layer's
number and `{e}` for an expert's number. The rows of the tensors, one below the other, are the rows of the params. A rule applies
only if a model has its params, so one list serves families with and without biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Rule:
    """`transposed`: the tensors are [in, out]. `stacked`: params are [E, rows, ...]; the tensors too or, if names have `{e}`, there
    is one tensor per expert. `order`: the params' rows are the tensors' in another order, "evens_first" (GPT-OSS, whose gate rows
    alternate with the rows that they multiply), "turning_first" (DeepSeek, whose heads end with the rotated rows), "by_head" or
    "by_key_head" (Qwen3-Next, whose tensors have a row of each param for the first head, and so on). `depthwise`: the tensors are
    [rows, 1, ...], as torch's weights of depthwise convolutions.
    `wide`: read in float32 if 16 bits are requested, as in Hugging Face's models."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
    order: str = ""
    depthwise: bool = False
    wide: bool = False


def rule(paths: str, names: str, *parts: str, **options: Any) -> list[Rule]:
    """Make a rule for each of a layer's `parts`: "weight", "bias". Spaces separate several paths or names."""
    return [
        Rule(tuple(f"{path}.{part}" for path in paths.split()), tuple(f"{name}.{part}" for name in names.split()), **options)
        for part in parts or ("weight",)
    ]


WB = ("weight", "bias")
EMBED = rule("embed", "model.embed_tokens")
HEAD = rule("head", "lm_head")
ENDS = [*EMBED, *rule("norm", "model.norm"), *HEAD]
A, H = "{l}.attn", "model.layers.{i}"
OUT = rule(f"{A}.out", f"{H}.self_attn.o_proj", *WB)
ATTENTION = [
    *[r for n in "qkv" for r in rule(f"{A}.qkv.{n}.proj", f"{H}.self_attn.{n}_proj", *WB)],
    *[r for n in "qk" for r in rule(f"{A}.qkv.{n}.norm", f"{H}.self_attn.{n}_norm")],
    *OUT,
    Rule((f"{A}.mix.sinks",), (f"{H}.self_attn.sinks",)),
]
NORMS = [*rule(f"{A}.norm", f"{H}.input_layernorm"), *rule("{l}.mlp.norm", f"{H}.post_attention_layernorm")]
MLP = [*rule("{l}.mlp.up", f"{H}.mlp.gate_proj {H}.mlp.up_proj", *WB), *rule("{l}.mlp.down", f"{H}.mlp.down_proj", *WB)]
LLAMA = [*ENDS, *NORMS, *ATTENTION, *MLP]
OLMO2 = [
    *ENDS,
    *ATTENTION,
    *MLP,
    *rule(f"{A}.post", f"{H}.post_attention_layernorm"),
    *rule("{l}.mlp.post", f"{H}.post_feedforward_layernorm"),
]
GEMMA = [*OLMO2, *rule(f"{A}.norm", f"{H}.input_layernorm"), *rule("{l}.mlp.norm", f"{H}.pre_feedforward_layernorm")]
GLM4 = [
    *ENDS,
    *NORMS,
    *ATTENTION,
    *rule(f"{A}.post", f"{H}.post_self_attn_layernorm"),
    *rule("{l}.mlp.post", f"{H}.post_mlp_layernorm"),
    *rule("{l}.mlp.up", f"{H}.mlp.gate_up_proj"),
    *rule("{l}.mlp.down", f"{H}.mlp.down_proj"),
]
PHI3 = [
    *ENDS,
    *NORMS,
    *OUT,
    *rule(f"{A}.qkv.q.proj {A}.qkv.k.proj {A}.qkv.v.proj", f"{H}.self_attn.qkv_proj"),
    *rule("{l}.mlp.up", f"{H}.mlp.gate_up_proj"),
    *rule("{l}.mlp.down", f"{H}.mlp.down_proj"),
]
T = "transformer.h.{i}"
GPT2 = [
    *rule("embed", "transformer.wte"),
    *rule("places", "transformer.wpe"),
    *rule("norm", "transformer.ln_f", *WB),
    *rule(f"{A}.norm", f"{T}.ln_1", *WB),
    *rule("{l}.mlp.norm", f"{T}.ln_2", *WB),
    *rule(f"{A}.qkv.q.proj {A}.qkv.k.proj {A}.qkv.v.proj", f"{T}.attn.c_attn", *WB, transposed=True),
    *rule(f"{A}.out", f"{T}.attn.c_proj", *WB, transposed=True),
    *rule("{l}.mlp.up", f"{T}.mlp.c_fc", *WB, transposed=True),
    *rule("{l}.mlp.down", f"{T}.mlp.c_proj", *WB, transposed=True),
    *HEAD,
]


def routed(path: str, block: str, gate: str, up: str, down: str) -> list[Rule]:
    """Make the rules of a router and its experts, with one matrix per expert."""
    return [
        *rule(f"{path}.gate", f"{block}.{gate}", *WB),
        *rule(f"{path}.experts.up", " ".join(f"{block}.experts.{{e}}.{name}" for name in up.split()), stacked=True),
        *rule(f"{path}.experts.down", f"{block}.experts.{{e}}.{down}", stacked=True),
    ]


MIXTRAL = [*ENDS, *NORMS, *ATTENTION, *routed("{l}.mlp", f"{H}.block_sparse_moe", "gate", "w1 w3", "w2")]
QWEN3_MOE = [*LLAMA, *routed("{l}.mlp", f"{H}.mlp", "gate", "gate_proj up_proj", "down_proj")]
B = "{l}.mlp.moe"
DEEPSEEK = [
    *ENDS,
    *NORMS,
    *OUT,
    *MLP,
    *rule(f"{A}.qkv.q.down", f"{H}.self_attn.q_a_proj", *WB),
    *rule(f"{A}.qkv.q.norm", f"{H}.self_attn.q_a_layernorm"),
    *rule(f"{A}.qkv.kv.down {A}.qkv.shared.proj", f"{H}.self_attn.kv_a_proj_with_mqa", *WB),
    *rule(f"{A}.qkv.kv.norm", f"{H}.self_attn.kv_a_layernorm"),
    *rule(f"{A}.qkv.kv.up", f"{H}.self_attn.kv_b_proj"),
    *rule(f"{A}.qkv.q.up", f"{H}.self_attn.q_b_proj", order="turning_first"),
    *rule(f"{A}.qkv.q.proj", f"{H}.self_attn.q_proj", order="turning_first"),  # for models without a latent for q
    *routed(f"{B}.routed", f"{H}.mlp", "gate", "gate_proj up_proj", "down_proj"),
    Rule((f"{B}.routed.route.bias",), (f"{H}.mlp.gate.e_score_correction_bias",), wide=True),
    *rule(f"{B}.shared.up", f"{H}.mlp.shared_experts.gate_proj {H}.mlp.shared_experts.up_proj"),
    *rule(f"{B}.shared.down", f"{H}.mlp.shared_experts.down_proj"),
]
QWEN2_MOE = [
    *LLAMA,
    *routed(f"{B}.routed", f"{H}.mlp", "gate", "gate_proj up_proj", "down_proj"),
    *rule(f"{B}.shared.gated.mlp.up", f"{H}.mlp.shared_expert.gate_proj {H}.mlp.shared_expert.up_proj"),
    *rule(f"{B}.shared.gated.mlp.down", f"{H}.mlp.shared_expert.down_proj"),
    *rule(f"{B}.shared.gated.gate", f"{H}.mlp.shared_expert_gate"),
]
G, L, D = f"{A}.gated", "{l}.linear_attn.gated", f"{H}.linear_attn"
P = f"{L}.mixed.parts"
QWEN3_NEXT = [
    *QWEN2_MOE,
    *rule(f"{G}.mixed.qkv.q.proj {G}.gate.proj", f"{H}.self_attn.q_proj", *WB, order="by_head"),
    *[r for n in "kv" for r in rule(f"{G}.mixed.qkv.{n}.proj", f"{H}.self_attn.{n}_proj", *WB)],
    *[r for n in "qk" for r in rule(f"{G}.mixed.qkv.{n}.norm", f"{H}.self_attn.{n}_norm")],
    *rule("{l}.linear_attn.norm", f"{H}.input_layernorm"),
    *rule(f"{P}.q.proj {P}.k.proj {P}.v.proj {L}.gate.proj", f"{D}.in_proj_qkvz", order="by_key_head"),
    *rule(f"{P}.beta.proj {P}.g.proj", f"{D}.in_proj_ba", order="by_key_head"),
    *rule(f"{P}.q.conv {P}.k.conv {P}.v.conv", f"{D}.conv1d", depthwise=True),
    Rule((f"{P}.g.decay.a_log",), (f"{D}.A_log",)),
    Rule((f"{P}.g.decay.dt_bias",), (f"{D}.dt_bias",)),
    *rule(f"{L}.mixed.norm", f"{D}.norm"),
    *rule("{l}.linear_attn.out", f"{D}.out_proj"),
]
F = f"{H}.feed_forward"
LLAMA4 = [
    *ENDS,
    *NORMS,
    *ATTENTION,
    *rule("{l}.mlp.up", f"{F}.gate_proj {F}.up_proj"),
    *rule("{l}.mlp.down", f"{F}.down_proj"),
    *rule(f"{B}.routed.gate", f"{F}.router"),
    Rule((f"{B}.routed.experts.up.weight",), (f"{F}.experts.gate_up_proj",), transposed=True, stacked=True),
    Rule((f"{B}.routed.experts.down.weight",), (f"{F}.experts.down_proj",), transposed=True, stacked=True),
    *rule(f"{B}.shared.up", f"{F}.shared_expert.gate_proj {F}.shared_expert.up_proj"),
    *rule(f"{B}.shared.down", f"{F}.shared_expert.down_proj"),
]
E = f"{H}.mlp.experts"
GPT_OSS = [
    *ENDS,
    *NORMS,
    *ATTENTION,
    *rule("{l}.mlp.gate", f"{H}.mlp.router", *WB),
    Rule(("{l}.mlp.experts.up.weight",), (f"{E}.gate_up_proj",), transposed=True, stacked=True, order="evens_first"),
    Rule(("{l}.mlp.experts.up.bias",), (f"{E}.gate_up_proj_bias",), stacked=True, order="evens_first"),
    Rule(("{l}.mlp.experts.down.weight",), (f"{E}.down_proj",), transposed=True, stacked=True),
    Rule(("{l}.mlp.experts.down.bias",), (f"{E}.down_proj_bias",), stacked=True),
]


PLAIN = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "rms_norm_eps": "eps",
    "max_position_embeddings": "context",
    "tie_word_embeddings": "tied",
}
GPT2_FIELDS = {
    "vocab_size": "vocab",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
    "n_positions": "context",
    "layer_norm_epsilon": "eps",
    "tie_word_embeddings": "tied",
}


@dataclass(frozen=True)
class Family:
    """`architecture`: Hugging Face's class; `rules`: for its tensors; `fields`: the fields of config.json that DecoderConfig has
    under another name; `defaults`: the values of absent or null ones; `absent`: the values of fields that config.json lacks, as
    Hugging Face's class has them; `has`: the arguments of DecoderConfig that all models of the family share; `only`: fields that,
    if present, must have one value; `sections`: parts of the config that take more than one field (see `fields.py`); `ignored`:
    further fields that change nothing here; `prefix`: a prefix of names that a checkpoint may lack; `skipped`: patterns of tensors
    that are not params."""

    architecture: str
    rules: list[Rule]
    sections: tuple[str, ...]
    has: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=PLAIN.copy)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    skipped: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


BIASED = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
GEMMAS: dict[str, Any] = dict(zero_centered=True, norm_after=True)
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
FOUR_HEADS = {"num_key_value_heads": 4}
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
MOE_LOSS = ("router_aux_loss_coef", "output_router_logits")

FAMILIES = {
    "llama": Family("LlamaForCausalLM", LLAMA, ("rope", "act", "biases", "mlp_bias"), defaults=UNTIED),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        LLAMA4,
        ("rope", "act", "biases", "llama4"),
        fields={"intermediate_size_mlp" if name == "intermediate_size" else name: of for name, of in PLAIN.items()},
        defaults={**UNTIED, "head_dim": 128, "num_key_value_heads": 8, "intermediate_size_mlp": 16384},
        only={"router_jitter_noise": 0.0},
        ignored=("for_llm_compressor", *MOE_LOSS),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        LLAMA,
        ("rope", "act", "one_window"),
        defaults=UNTIED,
        absent={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        LLAMA,
        ("rope", "act", "windows"),
        has=dict(qkv_bias=True),
        defaults=UNTIED,
        absent={"max_window_layers": 28},
        only={"use_mrope": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        LLAMA,
        ("rope", "act", "biases", "windows"),
        has=dict(qk_norm="head"),
        defaults=UNTIED,
        absent={"head_dim": 128, "max_window_layers": 28},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        OLMO2,
        ("rope", "act", "biases"),
        has=dict(norm_before=False, norm_after=True, qk_norm="all"),
        defaults=UNTIED,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        OLMO2,
        ("rope", "act", "biases", "windows"),
        has=dict(norm_before=False, norm_after=True, qk_norm="all"),
        defaults=UNTIED,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", LLAMA, ("rope", "act", "biases", "mlp_bias", "smollm3"), defaults=TIED, absent=FOUR_HEADS
    ),
    "granite": Family("GraniteForCausalLM", LLAMA, ("rope", "act", "biases", "mlp_bias", "granite"), defaults=UNTIED),
    "glm4": Family(
        "Glm4ForCausalLM",
        GLM4,
        ("rope", "act", "glm4"),
        has=dict(norm_after=True),
        defaults=UNTIED,
        absent={"head_dim": 128, "num_key_value_heads": 2},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        PHI3,
        ("rope", "act", "one_window"),
        defaults=UNTIED,
        absent={"original_max_position_embeddings": 4096},
        only={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        ignored=("resid_pdrop", "embd_pdrop"),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        GPT2,
        ("act", "gpt2"),
        has=dict(norm="layer_norm", places=True, **BIASED),
        fields=GPT2_FIELDS,
        defaults=TIED,
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        ignored=("n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", *SUMMARY),
        prefix="transformer.",
        skipped=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA,
        ("rope", "act", "biases", "windows", "gemma"),
        has=GEMMAS,
        defaults=TIED,
        absent={**FOUR_HEADS, "head_dim": 256},
        only={"use_bidirectional_attention": False},
        ignored=("hidden_act",),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA,
        ("rope", "act", "biases", "windows", "gemma"),
        has=dict(qk_norm="head", **GEMMAS),
        defaults=TIED,
        absent={**FOUR_HEADS, "head_dim": 256},
        only={"use_bidirectional_attention": False},
        ignored=("hidden_act", "_sliding_window_pattern"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        MIXTRAL,
        ("rope", "act", "one_window", "mixtral"),
        defaults=UNTIED,
        absent={"num_key_value_heads": 8},
        only={"router_jitter_noise": 0.0},
        ignored=MOE_LOSS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", QWEN2_MOE, ("rope", "act", "qkv_bias", "windows", "qwen2_moe"), defaults=UNTIED, ignored=MOE_LOSS
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        QWEN3_MOE,
        ("rope", "act", "biases", "one_window", "qwen3_moe"),
        has=dict(qk_norm="head"),
        defaults=UNTIED,
        absent={**FOUR_HEADS, "sliding_window": 4096},
        ignored=("max_window_layers", *MOE_LOSS),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        QWEN3_NEXT,
        ("rope", "act", "biases", "qwen3_next"),
        has=dict(qk_norm="head", zero_centered=True, attention_gate=True),
        defaults={**UNTIED, "head_dim": 256, "num_key_value_heads": 2},
        only={"hidden_act": "silu", "use_sliding_window": False},  # silu also of the convolutions
        ignored=MOE_LOSS,
        skipped=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        DEEPSEEK,
        ("latent", "rope", "act", "biases", "deepseek"),
        defaults=UNTIED,
        absent={"q_lora_rank": 1536, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1},
        ignored=("qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "aux_loss_alpha", "seq_aux", "output_router_logits"),
        skipped=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.{layers}\..*"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        GPT_OSS,
        ("rope", "act", "biases", "windows", "gpt_oss"),
        has=dict(sinks=True),
        defaults=UNTIED,
        absent={"head_dim": 64, "num_key_value_heads": 8},
        ignored=("initial_context_length", "experts_per_token", *MOE_LOSS),
    ),
}
IGNORED = (
    "architectures",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "cache_implementation",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "pretraining_tp",
    "name_or_path",
    "_name_or_path",
    "task_specific_params",
    "tokenizer_class",
    "gradient_checkpointing",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "model_name",
    "unsloth_fixed",
    "unsloth_version",
    "transformers.js_config",
    # which transformers wrote into each config.json before version 4.45: options of generate and of other tasks
    "add_cross_attention",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "top_k",
    "top_p",
    "torchscript",
    "typical_p",
    "use_bfloat16",
)
