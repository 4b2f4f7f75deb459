"""Small pipelines of diffusers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

TITLES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline")
LATENTS = 32
"""Sides of a picture are twice as long."""
HF: Any = transformers
DIFFUSERS: Any = diffusers
CHARACTERS = [chr(code) for code in range(33, 127)]
VOCABULARY = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{c}</w>" for c in CHARACTERS)]
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": len(VOCABULARY)}


def save_pipeline(title: str, folder: Path, *, width: int = 1) -> Any:
    """Save a pipeline of this class, and return it; `width` times as many channels."""
    torch.manual_seed(0)
    made = {
        "StableDiffusionPipeline": _sd,
        "StableDiffusionXLPipeline": _sdxl,
        "StableDiffusion3Pipeline": _sd3,
    }[title](width)
    made.set_progress_bar_config(disable=True)
    made.save_pretrained(folder)
    return made


def _sd(width: int) -> Any:
    return DIFFUSERS.StableDiffusionPipeline(
        vae=_vae(width),
        text_encoder=_clip("CLIPTextModel"),
        tokenizer=make_tokenizer(),
        unet=_unet(width, cross_attention_dim=32),
        scheduler=DIFFUSERS.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(width: int) -> Any:
    return DIFFUSERS.StableDiffusionXLPipeline(
        vae=_vae(width),
        text_encoder=_clip("CLIPTextModel"),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer(),
        unet=_unet(
            width,
            cross_attention_dim=64,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32,
            use_linear_projection=True,
        ),
        scheduler=DIFFUSERS.EulerDiscreteScheduler(),
    )


def _sd3(width: int) -> Any:
    t5 = HF.T5EncoderModel(
        HF.T5Config(
            vocab_size=len(VOCABULARY), d_model=96, d_kv=8, d_ff=64, num_layers=2, num_heads=4
        )
    )
    # transformers' own starts with embeddings of ones alone in some layers.
    _randomize(t5)
    return DIFFUSERS.StableDiffusion3Pipeline(
        vae=_vae(width, shift_factor=0.1),
        text_encoder=_clip("CLIPTextModelWithProjection"),
        text_encoder_2=_clip("CLIPTextModelWithProjection"),
        text_encoder_3=t5.eval(),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer(),
        tokenizer_3=_t5_tokenizer(),
        transformer=DIFFUSERS.SD3Transformer2DModel(
            sample_size=LATENTS,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8 * width,
            num_attention_heads=4,
            joint_attention_dim=96,
            caption_projection_dim=32 * width,
            pooled_projection_dim=64,
            pos_embed_max_size=LATENTS,
        ).eval(),
        scheduler=DIFFUSERS.FlowMatchEulerDiscreteScheduler(),
    )


def _randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)


def _vae(width: int, **options: Any) -> Any:
    return DIFFUSERS.AutoencoderKL(
        block_out_channels=(32 * width, 64 * width),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=2 * LATENTS,
        **options,
    ).eval()


def _unet(width: int, **options: Any) -> Any:
    return DIFFUSERS.UNet2DConditionModel(
        block_out_channels=(32 * width, 64 * width),
        layers_per_block=1,
        sample_size=LATENTS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        **options,
    ).eval()


def _clip(kind: str) -> Any:
    config = HF.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **SIZES,
    )
    return getattr(HF, kind)(config).eval()


def make_tokenizer() -> Any:
    """Of CLIP, for ASCII characters."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    return HF.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return HF.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", model_max_length=77
    )
