"""Tiny models of Hugging Face that `from_torch` has no row for: conv nets, encoder-decoders, state spaces, vision and speech."""

import pytest
import torch

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # attention's dropout keeps all scores on a CPU
IMAGE = dict(image_size=32, patch_size=4)
SEQ2SEQ = dict(
    vocab_size=64,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    pad_token_id=0,
    decoder_start_token_id=1,
)
STAGES = dict(hidden_sizes=[16, 32], depths=[1, 1])
IDS, PIXELS, SPEECH = "ids", "pixels", "speech"

CONV_NETS = {
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", PIXELS, dict(STAGES, embedding_size=16, layer_type="basic")),
    "ResNet, bottleneck": ("ResNetForImageClassification", "ResNetConfig", PIXELS, dict(STAGES, embedding_size=16)),
    "RegNet": ("RegNetForImageClassification", "RegNetConfig", PIXELS, dict(STAGES, embedding_size=16, groups_width=8)),
    "ConvNext": ("ConvNextForImageClassification", "ConvNextConfig", PIXELS, dict(STAGES, num_stages=2, patch_size=2)),
    "ConvNextV2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", PIXELS, dict(STAGES, num_stages=2, patch_size=2)),
    "MobileNetV1": ("MobileNetV1ForImageClassification", "MobileNetV1Config", PIXELS, dict(depth_multiplier=0.25, image_size=32)),
    "MobileNetV2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", PIXELS, dict(depth_multiplier=0.35, image_size=32)),
    "BiT": ("BitForImageClassification", "BitConfig", PIXELS, dict(STAGES, embedding_size=16, num_groups=4)),
    "PoolFormer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        PIXELS,
        dict(hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
    ),
    "FocalNet": (
        "FocalNetForImageClassification",
        "FocalNetConfig",
        PIXELS,
        dict(image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]),
    ),
}
ENCODER_DECODERS = {
    "Bart": ("BartForConditionalGeneration", "BartConfig", IDS, dict(SEQ2SEQ, bos_token_id=1, eos_token_id=2)),
    "MBart": ("MBartForConditionalGeneration", "MBartConfig", IDS, dict(SEQ2SEQ, bos_token_id=1, eos_token_id=2)),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", IDS, SEQ2SEQ),
    "Blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", IDS, SEQ2SEQ),
    "M2M100": ("M2M100ForConditionalGeneration", "M2M100Config", IDS, SEQ2SEQ),
    "Marian": ("MarianMTModel", "MarianConfig", IDS, SEQ2SEQ),
    "mT5": (
        "MT5ForConditionalGeneration",
        "MT5Config",
        IDS,
        dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SPEECH,
        dict(SEQ2SEQ, num_mel_bins=16, max_source_positions=32, max_target_positions=32, bos_token_id=1, eos_token_id=2),
    ),
}
OTHERS = {
    "Mamba": ("MambaForCausalLM", "MambaConfig", IDS, dict(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        IDS,
        dict(
            SIZES, vocab_size=64, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0
        ),
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        IDS,
        dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        IDS,
        dict(SIZES, vocab_size=64, hidden_dropout=0.0, attention_dropout=0.0, max_position_embeddings=64),
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        "GPTJConfig",
        IDS,
        dict(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            n_positions=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        ),
    ),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", IDS, dict(SIZES, **STILL, vocab_size=64, max_position_embeddings=64)),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", IDS, dict(SIZES, **STILL, vocab_size=64, embedding_size=16)),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", IDS, dict(SIZES, **STILL, vocab_size=64, embedding_size=16)),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        IDS,
        dict(vocab_size=64, dim=32, hidden_dim=64, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0),
    ),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", PIXELS, dict(SIZES, **STILL, **IMAGE)),
    "BEiT": ("BeitForImageClassification", "BeitConfig", PIXELS, dict(SIZES, **STILL, **IMAGE)),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", PIXELS, dict(SIZES, **STILL, **IMAGE)),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        PIXELS,
        dict(STILL, image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, drop_path_rate=0.0),
    ),
    "SegFormer": (
        "SegformerForImageClassification",
        "SegformerConfig",
        PIXELS,
        dict(
            STILL,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
        ),
    ),
    "CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", PIXELS, dict(SIZES, **IMAGE)),
    "SigLIP vision": ("SiglipVisionModel", "SiglipVisionConfig", PIXELS, dict(SIZES, **IMAGE)),
}
MORE = {**CONV_NETS, **ENCODER_DECODERS, **OTHERS}


def more(name):
    """The model in float64, and a batch."""
    transformers = pytest.importorskip("transformers")
    model, config, kind, sizes = MORE[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).double()
    if kind == PIXELS:
        return made, dict(pixel_values=torch.randn(2, 3, 32, 32, dtype=torch.float64))
    ids = torch.randint(3, 64, (2, 12))
    if kind == SPEECH:
        return made, dict(input_features=torch.randn(2, 16, 64, dtype=torch.float64), labels=ids, use_cache=False)
    return made, dict(input_ids=ids, labels=ids, **({"use_cache": False} if name not in NO_CACHE else {}))


NO_CACHE = ("RoBERTa", "ELECTRA", "ALBERT", "DistilBERT")
