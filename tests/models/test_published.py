"""config.json as published with models before transformers 5, and the number of their parameters."""

import json

import pytest

from funcops.engine.trees import tensors
from funcops.models import decoder
from funcops.models.decoder_config import groups
from funcops.models.fields import read_config, write_config

SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size max_position_embeddings"
COMMON = dict(use_cache=True, torch_dtype="bfloat16", initializer_range=0.02, attention_dropout=0.0, hidden_act="silu")
LLAMA3 = dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3")
YARN = dict(
    beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, type="yarn"
)


def sized(family, *sizes, **fields):
    return COMMON | {"model_type": family} | dict(zip(SIZES.split(), sizes, strict=True)) | fields


GPT2 = dict(model_type="gpt2", n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257)
PUBLISHED = {  # the config, its groups of layers (period, times), and its parameters
    "gpt2": (
        GPT2 | dict(activation_function="gelu_new", attn_pdrop=0.1, layer_norm_epsilon=1e-5, summary_type="cls_index"),
        [(1, 12)],
        124_439_808,
    ),
    "Llama-3.2-1B": (
        sized(
            "llama",
            2048,
            8192,
            16,
            32,
            8,
            128256,
            131072,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
        ),
        [(1, 16)],
        1_235_814_400,
    ),
    "Llama-4-Scout-17B-16E": (
        sized(
            "llama4_text",
            5120,
            8192,
            48,
            40,
            8,
            202048,
            10485760,
            intermediate_size_mlp=16384,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3 | dict(factor=8.0),
            attention_bias=False,
            attention_chunk_size=8192,
            attn_temperature_tuning=4,
            attn_scale=0.1,
            floor_scale=8192,
            interleave_moe_layer_step=1,
            no_rope_layers=[],
            num_experts_per_tok=1,
            num_local_experts=16,
            router_jitter_noise=0.0,
            use_qk_norm=True,
            for_llm_compressor=False,
            tie_word_embeddings=False,
        ),
        [(4, 12)],
        107_769_861_120,
    ),
    "Qwen2.5-0.5B": (
        sized(
            "qwen2",
            896,
            4864,
            24,
            14,
            2,
            151936,
            32768,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            sliding_window=32768,
            use_mrope=False,
            use_sliding_window=False,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        [(1, 24)],
        494_032_768,
    ),
    "Qwen3-Next-80B-A3B": (
        sized(
            "qwen3_next",
            2048,
            5120,
            48,
            16,
            2,
            151936,
            262144,
            head_dim=256,
            rms_norm_eps=1e-6,
            rope_theta=1e7,
            rope_scaling=None,
            partial_rotary_factor=0.25,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            norm_topk_prob=True,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
            use_sliding_window=False,
            attention_bias=False,
            tie_word_embeddings=False,
        ),
        [(4, 12)],
        79_674_391_296,  # and 1.6 billion of the layer that predicts a second token, which is not read
    ),
    "gemma-2-2b": (
        sized(
            "gemma2",
            2304,
            9216,
            26,
            8,
            4,
            256000,
            8192,
            head_dim=256,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            sliding_window=4096,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            cache_implementation="hybrid",
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        [(2, 13)],
        2_614_341_888,
    ),
    "Mixtral-8x7B": (
        sized(
            "mixtral",
            4096,
            14336,
            32,
            32,
            8,
            32000,
            32768,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            router_aux_loss_coef=0.02,
            output_router_logits=False,
        ),
        [(1, 32)],
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        sized(
            "qwen2_moe",
            2048,
            5632,
            24,
            16,
            16,
            151936,
            8192,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            sliding_window=32768,
            use_sliding_window=False,
            max_window_layers=21,
            tie_word_embeddings=False,
            decoder_sparse_step=1,
            num_experts=60,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            router_aux_loss_coef=0.001,
            output_router_logits=False,
        ),
        [(1, 24)],
        14_315_784_192,
    ),
    "DeepSeek-V3": (
        sized(
            "deepseek_v3",
            7168,
            18432,
            61,
            128,
            128,
            129280,
            163840,
            rms_norm_eps=1e-6,
            rope_theta=10000,
            rope_scaling=YARN,
            first_k_dense_replace=3,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            moe_layer_freq=1,
            ep_size=1,
            aux_loss_alpha=0.001,
            seq_aux=True,
            num_nextn_predict_layers=1,
            pretraining_tp=1,
            attention_bias=False,
        ),
        [(1, 3), (1, 58)],
        671_026_419_200,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_parameters(name):
    given, rows, count = PUBLISHED[name]
    cfg = read_config(name, json.loads(json.dumps(given)))
    assert [(len(group.kinds), group.times) for group in groups(cfg)] == rows
    assert sum(t.numel() for t in tensors(decoder(cfg).abstract())) == count
    assert read_config(name, json.loads(json.dumps(write_config(cfg)))) == cfg
