"""Networks of many kinds at their published dimensions, without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from nesa_node.sharding.capture import capture
from nesa_node.sharding.operation_graph import OperationGraph


def _ids(tokens: int) -> torch.Tensor:
    return torch.zeros(1, tokens, dtype=torch.long)


def _image(size: int, channels: int = 3) -> torch.Tensor:
    return torch.zeros(1, channels, size, size)


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": _image(224)}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": _ids(128)}


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(depths=[3, 4, 23, 3])
    )
    return model, {"pixel_values": _image(224)}


def _convnext() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ConvNextConfig(depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024])
    model = transformers.ConvNextForImageClassification(config)
    return model, {"pixel_values": _image(224)}


def _swin() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
    model = transformers.SwinForImageClassification(config)
    return model, {"pixel_values": _image(224)}


def _segformer() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.SegformerConfig(
        depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768
    )
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": _image(512)}


def _detr() -> tuple[nn.Module, dict[str, Any]]:
    backbone = {"model_type": "resnet", "out_features": ["stage4"]}
    config = transformers.DetrConfig(backbone_config=backbone)
    return transformers.DetrForObjectDetection(config), {"pixel_values": _image(800)}


def _clip() -> tuple[nn.Module, dict[str, Any]]:
    model = transformers.CLIPModel(transformers.CLIPConfig())
    return model, {"input_ids": _ids(77), "pixel_values": _image(224)}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    inputs = {"input_ids": _ids(128), "decoder_input_ids": _ids(32), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), inputs


def _bart() -> tuple[nn.Module, dict[str, Any]]:
    inputs = {"input_ids": _ids(128), "decoder_input_ids": _ids(32), "use_cache": False}
    return transformers.BartForConditionalGeneration(transformers.BartConfig()), inputs


def _whisper() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    inputs = {
        "input_features": torch.zeros(1, 80, 3000),
        "decoder_input_ids": _ids(32),
        "use_cache": False,
    }
    return transformers.WhisperForConditionalGeneration(config), inputs


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": _ids(128), "use_cache": False}


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    model = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    inputs = {
        "sample": _image(64, 4),
        "timestep": torch.zeros(1),
        "encoder_hidden_states": torch.zeros(1, 77, 768),
    }
    return model, inputs


def _sd3() -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=128,
        num_layers=24,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
    )
    inputs = {
        "hidden_states": _image(64, 16),
        "encoder_hidden_states": torch.zeros(1, 333, 4096),
        "pooled_projections": torch.zeros(1, 2048),
        "timestep": torch.zeros(1),
    }
    return model, inputs


def _vae() -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
    )
    return model, {"sample": _image(512)}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "ViT-L/16": _vit,
    "BERT-large": _bert,
    "ResNet-101": _resnet,
    "ConvNeXt-B": _convnext,
    "Swin-B": _swin,
    "SegFormer-B2": _segformer,
    "DETR R50": _detr,
    "CLIP ViT-B/32": _clip,
    "T5-base": _t5,
    "BART-large": _bart,
    "Whisper-small": _whisper,
    "Llama 3.2 1B": _llama,
    "SD 1.5 UNet": _unet,
    "SD 3 transformer": _sd3,
    "SD 1.5 VAE": _vae,
}


def capture_published(name: str) -> OperationGraph:
    """One forward pass of a model of `MODELS`, in float32, of one item."""
    with torch.device("meta"):
        model, inputs = MODELS[name]()
        return capture(model, (), inputs).graph
