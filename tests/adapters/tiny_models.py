"""A small random model of each row that `from_torch` knows."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

SIZES = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=64)


def decoder(kind, **more):
    sizes = dict(SIZES, vocab_size=256, num_key_value_heads=2, pad_token_id=0)
    return f"{kind}ForCausalLM", f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config", {**sizes, **more}


def t5(**more):
    sizes = dict(vocab_size=256, d_model=64, d_kv=16, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0)
    return "T5ForConditionalGeneration", "T5Config", {**sizes, **more}


# By name: the row, the model, its config, sizes. Attention without dropout: on CPUs SDPA keeps all scores for it.
MODELS = {
    "Llama": ("llama", *decoder("Llama")),
    "Mistral": ("mistral", *decoder("Mistral")),
    "Qwen2": ("qwen2", *decoder("Qwen2")),
    "Qwen3": ("qwen3", *decoder("Qwen3", head_dim=16)),
    "Gemma": ("gemma", *decoder("Gemma", head_dim=16)),
    "Gemma2": ("gemma2", *decoder("Gemma2", head_dim=16)),
    "Gemma3": ("gemma3", *decoder("Gemma3", head_dim=16)),
    "Phi3": ("phi3", *decoder("Phi3")),
    "Olmo2": ("olmo2", *decoder("Olmo2")),
    "Granite": ("granite", *decoder("Granite")),
    "SmolLM3": ("smollm3", *decoder("SmolLM3")),
    "DeepSeek-V3": (
        "deepseek_v3",
        *decoder(
            "DeepseekV3",
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **EXPERTS,
        ),
    ),
    "Mixtral": ("mixtral", *decoder("Mixtral", num_local_experts=4)),
    "Qwen2-MoE": ("qwen2_moe", *decoder("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=64, **EXPERTS)),
    "Qwen3-MoE": ("qwen3_moe", *decoder("Qwen3Moe", num_experts=4, head_dim=16, mlp_only_layers=[1], **EXPERTS)),
    "GPT-2": (
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0),
    ),
    "BERT": (
        "bert",
        "BertForMaskedLM",
        "BertConfig",
        dict(SIZES, intermediate_size=256, vocab_size=256, max_position_embeddings=64, attention_probs_dropout_prob=0),
    ),
    "ViT": (
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        dict(SIZES, intermediate_size=256, num_hidden_layers=4, image_size=32, patch_size=4),
    ),
    "T5": ("t5", *t5(d_ff=256)),
    "T5 1.1": ("t5", *t5(d_ff=176, feed_forward_proj="gated-gelu")),
}
H = dict(head_dim=16)
UNKNOWN = {  # without a row
    name: ("", *decoder(name, attention_dropout=0.0, **more))
    for name, more in {
        "Arcee": {},
        "Cohere": {},
        "Cohere2": {},
        "Ernie4_5": H,
        "Exaone4": {},
        "Glm4": H,
        "GPTNeoX": {},
        "Helium": H,
        "HunYuanDenseV1": H,
        "Llama4": dict(H, intermediate_size_mlp=176, interleave_moe_layer_step=3, num_local_experts=2),
        "Ministral": H,
        "Nemotron": {},
        "Olmo3": {},
        "Phi": {},
        "SeedOss": H,
        "StableLm": {},
        "Starcoder2": {},
    }.items()
}
APART = ("Experts", "TopKRouter", "TopkRouter", "SparseMoeBlock", "MoE")  # of a mixture of experts, what is not dense


def tiny(name, **more):
    transformers = pytest.importorskip("transformers")
    _, model, config, sizes = {**MODELS, **UNKNOWN}[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **more}))


def batch_of(model, rows=8, length=64):
    if "pixel" in model.main_input_name:
        return dict(pixel_values=torch.randn(rows, 3, 32, 32, dtype=model.dtype), labels=torch.randint(2, (rows,)))
    ids = torch.randint(1, 256, (rows, length))
    return dict(input_ids=ids, labels=ids)


def kept(model, batch):
    """The model's output, and the bytes kept for the backward, without parameters: all, those that attention itself keeps,
    and those that experts keep."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    seen, inside, handles = {}, [], []

    def pack(t):
        if t.untyped_storage()._cdata not in parameters:
            key, at = t.untyped_storage()._cdata, inside[-1] if inside else ""
            if key not in seen or at == "experts":  # whoever else kept it before
                seen[key] = t.untyped_storage().nbytes(), at, t
        return t

    def enter(module, given, kind):
        inside.append(kind)

    def leave(*_):
        inside.pop()

    for module in model.modules():
        cls = type(module).__name__
        attends, expert = cls.endswith("Attention"), cls.endswith(APART)
        if attends or expert:
            kind = "attention" if attends else "experts"
            layers = [m for m in module.children() if not cls.endswith("Experts") and not type(m).__name__.endswith(APART)]
            for m, at in [(module, kind), *((layer, "") for layer in layers)]:
                handles.append(m.register_forward_pre_hook(lambda m, given, at=at: inside.append(at)))
                handles.append(m.register_forward_hook(leave))
    with saved_tensors_hooks(pack, lambda t: t):
        out = model(**batch)
    for handle in handles:
        handle.remove()
    total, attention, experts = (
        sum(size for size, at, _ in seen.values() if at == kind or not kind) for kind in ("", "attention", "experts")
    )
    return out, total, attention, experts
