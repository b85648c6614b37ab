"""Tiny models of other projects than Hugging Face's transformers. Each is skipped where its project is not installed.

None is a dependency of the tests. `pip install --no-deps` puts them beside a CPU build of torch: timm and torchvision; diffusers;
litgpt; x-transformers with einops, einx, frozendict, loguru and torch-einops-utils; torchtune with torchao 0.10.0, datasets, dill,
multiprocess, omegaconf, pandas, pyarrow, sentencepiece, tiktoken and xxhash.
"""

import importlib

import pytest
import torch

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
STAGES = dict(layers=(1, 1, 1, 1), channels=(8, 16, 32, 64))
SWIN = dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
TWINS = dict(img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 64), num_heads=(1, 2, 2, 4))
TIMM = {  # by name: the model's name there, pixels, and sizes
    "ViT": ("vit_tiny_patch16_224", 32, VIT),
    "DINOv2, registers": ("vit_small_patch14_reg4_dinov2", 32, VIT),
    "EVA-02": ("eva02_tiny_patch14_224", 32, VIT),
    "CaiT": ("cait_xxs24_224", 32, VIT),
    "ConViT": ("convit_tiny", 32, VIT),
    "XCiT": ("xcit_nano_12_p16_224", 64, dict(img_size=64, depth=2)),
    "Swin": ("swin_tiny_patch4_window7_224", 32, SWIN),
    "SwinV2": ("swinv2_tiny_window8_256", 32, SWIN),
    "Twins": ("twins_svt_small", 64, TWINS),
    "Mixer": ("mixer_s32_224", 224, {}),
    "MambaOut": ("test_mambaout", 64, {}),
    "ResNet": ("resnet18", 32, STAGES),
    "ResNet-D": ("resnet50d", 32, STAGES),
    "NFNet": ("test_nfnet", 64, {}),
    "ConvNeXt": ("test_convnext", 64, {}),
    "ConvNeXtV2": ("test_convnext2", 64, {}),
    "EfficientNet": ("test_efficientnet", 64, {}),
    "EfficientNet, EvoNorm": ("test_efficientnet_evos", 64, {}),
    "EfficientNet, GroupNorm": ("test_efficientnet_gn", 64, {}),
    "MobileNetV3": ("mobilenetv3_small_050", 64, {}),
    "MobileNetV4": ("mobilenetv4_conv_small_035", 64, {}),
    "MobileViT": ("mobilevit_xxs", 64, {}),
    "RegNetY": ("regnety_002", 64, {}),
    "PoolFormer": ("poolformer_s12", 64, {}),
}
TORCHVISION = {  # by name: its function, and pixels
    "ResNet": ("resnet18", 32),
    "DenseNet": ("densenet121", 32),
    "MobileNetV2": ("mobilenet_v2", 32),
    "ShuffleNet": ("shufflenet_v2_x0_5", 32),
    "SqueezeNet": ("squeezenet1_1", 64),
    "GoogLeNet": ("googlenet", 64),
}


def draw(*shape):
    return lambda: torch.randn(shape, dtype=torch.float64)


def steps():
    return torch.tensor([3, 7])


HEADS = dict(num_attention_heads=2, attention_head_dim=16)
BLOCKS = dict(block_out_channels=(16, 32), norm_num_groups=8)
LATENTS, TEXT, POOLED = draw(2, 4, 16, 16), draw(2, 6, 24), draw(2, 20)
DIFFUSERS = {  # by name: the class, its sizes, and its arguments
    "UNet": (
        "UNet2DModel",
        dict(BLOCKS, layers_per_block=1, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"))
        | dict(up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        dict(sample=draw(2, 3, 16, 16), timestep=steps),
    ),
    "UNet, text": (
        "UNet2DConditionModel",
        dict(BLOCKS, layers_per_block=1, attention_head_dim=4, cross_attention_dim=24)
        | dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        dict(sample=LATENTS, timestep=steps, encoder_hidden_states=TEXT),
    ),
    "AutoencoderKL": (
        "AutoencoderKL",
        dict(BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
        dict(sample=draw(2, 3, 16, 16)),
    ),
    "VQ": (
        "VQModel",
        dict(BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=16),
        dict(sample=draw(2, 3, 16, 16)),
    ),
    "DiT": (
        "DiTTransformer2DModel",
        dict(HEADS, in_channels=4, num_layers=2, sample_size=16, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10),
        dict(hidden_states=LATENTS, timestep=steps, class_labels=steps),
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        dict(HEADS, in_channels=4, num_layers=2, sample_size=16, caption_channels=24, cross_attention_dim=32)
        | dict(use_additional_conditions=False),
        dict(hidden_states=LATENTS, encoder_hidden_states=TEXT, timestep=steps),
    ),
    "SD3": (
        "SD3Transformer2DModel",
        dict(HEADS, sample_size=16, in_channels=4, num_layers=2, joint_attention_dim=24, caption_projection_dim=32)
        | dict(pooled_projection_dim=20, out_channels=4, pos_embed_max_size=16),
        dict(hidden_states=LATENTS, encoder_hidden_states=TEXT, pooled_projections=POOLED, timestep=steps),
    ),
    "Flux": (
        "FluxTransformer2DModel",
        dict(HEADS, in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=24, pooled_projection_dim=20)
        | dict(axes_dims_rope=(4, 4, 8)),
        dict(hidden_states=draw(2, 16, 16), encoder_hidden_states=TEXT, pooled_projections=POOLED, timestep=draw(2))
        | dict(img_ids=draw(16, 3), txt_ids=draw(6, 3)),
    ),
    "Sana": (
        "SanaTransformer2DModel",
        dict(HEADS, in_channels=4, out_channels=4, num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=16)
        | dict(cross_attention_dim=32, caption_channels=24, sample_size=8),
        dict(hidden_states=draw(2, 4, 8, 8), encoder_hidden_states=TEXT, timestep=steps),
    ),
    "CogVideoX": (
        "CogVideoXTransformer3DModel",
        dict(HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=24, num_layers=2, sample_frames=5)
        | dict(sample_width=8, sample_height=8, max_text_seq_length=6),
        dict(hidden_states=draw(2, 2, 4, 8, 8), encoder_hidden_states=TEXT, timestep=steps),
    ),
}
DECODER = dict(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=32)
WIDER = dict(DECODER, intermediate_dim=64)
LORA = dict(DECODER, lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8)
TORCHTUNE = {  # by name: its function, and sizes
    "Llama 2": ("llama2.llama2", DECODER),
    "Llama 3.2": ("llama3_2.llama3_2", DECODER),
    "Llama 3, LoRA": ("llama3.lora_llama3", LORA),
    "Mistral": ("mistral.mistral", WIDER),
    "Qwen2": ("qwen2.qwen2", WIDER),
    "Gemma": ("gemma.gemma", dict(WIDER, head_dim=8)),
    "Gemma 2": ("gemma2.gemma2", dict(WIDER, head_dim=8, sliding_window_size=8)),
    "Phi-3": ("phi3.phi3", WIDER),
}
GPT = dict(n_layer=2, n_head=4, n_embd=32, head_size=8, intermediate_size=64, block_size=16, vocab_size=64, padded_vocab_size=64)
LITGPT = {  # by name: the config's name there, and sizes
    "Pythia": ("pythia-14m", dict(GPT, n_query_groups=4)),
    "Llama 3.2": ("Llama-3.2-1B", dict(GPT, n_query_groups=2)),
    "Gemma 2": ("Gemma-2-2b", dict(GPT, n_query_groups=2)),
    "Gemma 3": ("Gemma-3-1b-it", dict(GPT, n_query_groups=1)),
    "Falcon": ("falcon-7b", dict(GPT, n_query_groups=1)),
    "Phi-2": ("phi-2", dict(GPT, n_query_groups=4)),
    "Qwen3": ("Qwen3-0.6B", dict(GPT, n_query_groups=2)),
    "OLMo 2": ("OLMo-2-1124-7B", dict(GPT, n_query_groups=4)),
}
X_TRANSFORMERS = {  # by name: the class of its layers, and options
    "decoder": ("Decoder", {}),
    "encoder": ("Encoder", {}),
    "flash, rotary": ("Decoder", dict(attn_flash=True, rotary_pos_emb=True)),
    "rotary, xpos": ("Decoder", dict(rotary_xpos=True)),
    "SwiGLU, RMSNorm": ("Decoder", dict(ff_glu=True, ff_swish=True, ff_no_bias=True, use_rmsnorm=True)),
    "ReLU squared, ScaleNorm": ("Decoder", dict(ff_relu_squared=True, use_scalenorm=True)),
    "ALiBi": ("Decoder", dict(alibi_pos_bias=True)),
    "relative positions": ("Encoder", dict(rel_pos_bias=True)),
    "grouped heads, normed": ("Decoder", dict(attn_kv_heads=1, attn_qk_norm=True, attn_qk_norm_dim_scale=True)),
    "talking heads": ("Decoder", dict(attn_pre_talking_heads=True, attn_post_talking_heads=True)),
    "sparse attention": ("Encoder", dict(attn_sparse_topk=4)),
    "memory": ("Encoder", dict(attn_num_mem_kv=4, attn_on_attn=True)),
    "macaron, sandwich": ("Decoder", dict(macaron=True, sandwich_norm=True)),
    "hyper-connections": ("Decoder", dict(num_residual_streams=2)),
    "dropout": ("Decoder", dict(attn_dropout=0.1, ff_dropout=0.1)),
}


def _timm(module, name, pixels, sizes):
    return module.create_model(name, num_classes=10, **sizes), (draw(2, 3, pixels, pixels)(),)


def _torchvision(module, name, pixels):
    options = dict(aux_logits=False, init_weights=True) if name == "googlenet" else {}
    return getattr(module.models, name)(num_classes=10, **options), (draw(2, 3, pixels, pixels)(),)


def _diffusers(module, name, sizes, arguments):
    return getattr(module, name)(**sizes), {name: value() for name, value in arguments.items()}


def _torchtune(module, name, sizes):
    family, _, name = name.partition(".")
    return getattr(importlib.import_module(f"torchtune.models.{family}"), name)(**sizes), (torch.randint(64, (2, 12)),)


def _litgpt(module, name, sizes):
    return module.GPT(module.Config.from_name(name, **sizes)), (torch.randint(64, (2, 12)),)


def _x_transformers(module, name, options):
    layers = getattr(module, name)(dim=32, depth=2, heads=2, attn_dim_head=32, **options)
    return module.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers), (torch.randint(64, (2, 12)),)


PROJECTS = {  # and the versions that were tried, with torch 2.13.0 and transformers 5.23.0
    "timm": (_timm, TIMM),  # 1.0.31
    "torchvision": (_torchvision, TORCHVISION),  # 0.28.0
    "diffusers": (_diffusers, DIFFUSERS),  # 0.42.1
    "torchtune": (_torchtune, TORCHTUNE),  # 0.6.1
    "litgpt": (_litgpt, LITGPT),  # 0.5.13
    "x_transformers": (_x_transformers, X_TRANSFORMERS),  # 2.31.10
}
OTHER = {f"{project}, {name}": (project, *row) for project, (_, table) in PROJECTS.items() for name, row in table.items()}


def other(project, *row):
    """The model in float64, and a batch: its arguments, or a dict of these."""
    module = pytest.importorskip(project, exc_type=ImportError)
    torch.manual_seed(0)
    model, batch = PROJECTS[project][0](module, *row)
    return model.double(), batch
