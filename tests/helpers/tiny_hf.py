"""Tiny models of Hugging Face's with random weights, one of each family; and the same models in float64 throughout."""

import copy
import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers", minversion="5.0", reason="families and their files as version 5 has them")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
BASE = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
WINDOW = dict(sliding_window=3)
TYPES = {"s": "sliding_attention", "f": "full_attention"}
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
LONG = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 4.0, 8.0], partial_rotary_factor=0.75
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
DEEPSEEK_YARN = dict(YARN, mscale=0.7, mscale_all_dim=1.3, beta_fast=4)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT = dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=2,
    kv_lora_rank=12,
    qk_rope_head_dim=6,
    qk_nope_head_dim=4,
    v_head_dim=10,
    first_k_dense_replace=1,
)


def types(row):
    return dict(layer_types=[TYPES[one] for one in row], num_hidden_layers=len(row), **WINDOW)


FAMILIES = {  # model: its type, and its config beside BASE
    "llama": ("llama", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, head_dim=6)),
    "llama4": (
        "llama4_text",
        dict(
            EXPERTS,
            num_hidden_layers=5,
            head_dim=6,
            intermediate_size_mlp=36,
            interleave_moe_layer_step=2,
            no_rope_layer_interval=3,
            attention_chunk_size=7,
            floor_scale=4,
            attn_scale=0.5,
            rope_parameters=LLAMA3,
        ),
    ),
    "llama4_plain": (
        "llama4_text",
        dict(num_local_experts=4, use_qk_norm=False, attn_temperature_tuning=False, attention_chunk_size=32, attention_bias=True),
    ),
    "mistral": ("mistral", dict(WINDOW, tie_word_embeddings=True)),
    "qwen2": ("qwen2", dict(use_sliding_window=True, max_window_layers=1, num_hidden_layers=3, **WINDOW)),
    "qwen3": ("qwen3", dict(head_dim=12, rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=2.0))),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(types("sssf"), rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_theta=300.0)))),
    "smollm3": ("smollm3", dict(num_hidden_layers=5, no_rope_layer_interval=3)),
    "smollm3_windows": (
        "smollm3",
        dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], use_sliding_window=True, tie_word_embeddings=False, **WINDOW),
    ),
    "granite": (
        "granite",
        dict(embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=0.4, attention_bias=True),
    ),
    "glm4": ("glm4", dict(head_dim=12)),
    "phi3": ("phi3", dict(rope_parameters=LONG, original_max_position_embeddings=16)),
    "gpt2": ("gpt2", dict(vocab_size=48, n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=None, eos_token_id=None)),
    "gemma2": (
        "gemma2",
        dict(types("sfsf"), head_dim=6, query_pre_attn_scalar=9, attn_logit_softcapping=2.0, final_logit_softcapping=1.0),
    ),
    "gemma3": ("gemma3_text", dict(types("sfsfs"), head_dim=6, query_pre_attn_scalar=9)),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": (
        "qwen2_moe",
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            decoder_sparse_step=2,
            num_hidden_layers=3,
            use_sliding_window=True,
            **WINDOW,
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False, mlp_only_layers=[0]),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(
            num_hidden_layers=3,
            full_attention_interval=2,
            head_dim=16,
            attention_bias=True,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=5,
            linear_conv_kernel_dim=3,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            mlp_only_layers=[0],
        ),
    ),
    "deepseek_v3": ("deepseek_v3", dict(LATENT, q_lora_rank=16, rope_parameters=DEEPSEEK_YARN)),
    "deepseek_v3_plain": ("deepseek_v3", dict(LATENT, q_lora_rank=None, rope_interleave=False)),
    "gpt_oss": (
        "gpt_oss",
        dict(EXPERTS, head_dim=6, rope_parameters=dict(YARN, truncate=False), swiglu_limit=0.5, **types("sfsf")),
    ),
}


class Wide(TorchFunctionMode):
    """A mode in which float64 replaces every request for float32. Hugging Face's norms, rotary tables, softmax and routers compute
    in float32 whatever their input; in this mode they are the same formulas in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*args, **{n: torch.float64 if a is torch.float32 else a for n, a in (kwargs or {}).items()})


def tiny(name, dtype=torch.float32):
    """A model in evaluation mode with every parameter and the routers' biases drawn, also norms and biases, which are ones and
    zeros by default."""
    kind, options = FAMILIES[name]
    options = options if kind == "gpt2" else {**BASE, **options}
    made = transformers.AutoConfig.for_model(kind, **copy.deepcopy(options))  # which writes into the options of rope
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))  # of constants, such as what Gemma multiplies embeddings by
    try:
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", experts_implementation="eager")
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        biases = [(path, t) for path, t in model.named_buffers() if path.endswith("e_score_correction_bias")]
        for path, p in [*model.named_parameters(), *biases]:
            centre = p.mean() if "norm" in path or ".ln_" in path else 0.0
            std = 0.1 if any(end in path for end in ("embed", "wte", "lm_head")) else 0.3  # logits near 1
            p.copy_(centre + torch.randn(p.shape, generator=draw, dtype=torch.float64) * std)
    return model.to(dtype).eval()


def saved(name, folder, dtype=torch.float32, **options):
    """The model, and the folder that holds it."""
    model = tiny(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def edited(folder, **fields):
    """Change fields of a folder's config.json; a field that is None is removed."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
