"""A small diffusion transformer that is trained here, and the states of its inner blocks.

It is of the class and sampler of Stable Diffusion 3 (`SD3Transformer2DModel`, rectified flow), and
learns made-up pictures of three blots in three colours. There is no model hub here, and with random
weights the last step would be as much noise as the first. The picture is the latent: there is no
VAE, and no text.

N pictures, C channels, H and W sides, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SIDE, CHANNELS, PATCH = 16, 3, 2
HEADS, HEAD_DIM, LAYERS = 4, 16, 4
TEXT_DIM = 32
LATENT_PIXELS = 8
"""What pipelines take a latent for."""
BATCH = 32
LEARNING_RATE = 2e-3
BLOTS = 3


def make_pictures(count: int, generator: torch.Generator) -> Tensor:
    """Pictures [N, C, H, W] with values from -1 to 1: blots before a background of one colour."""

    def colours() -> Tensor:
        return 2 * torch.rand(count, CHANNELS, 1, 1, generator=generator) - 1

    line = torch.linspace(-1, 1, SIDE)
    pictures_NCHW = colours().expand(count, CHANNELS, SIDE, SIDE)
    for _ in range(BLOTS):
        centers = 1.6 * torch.rand(2, count, 1, 1, generator=generator) - 0.8
        radii = 0.2 + 0.5 * torch.rand(2, count, 1, 1, generator=generator)
        x, y = (line[None] - centers[0]) / radii[0], (line[:, None] - centers[1]) / radii[1]
        covered_N1HW = torch.sigmoid(6 * (1 - x**4 - y**4))[:, None]
        pictures_NCHW = pictures_NCHW * (1 - covered_N1HW) + colours() * covered_N1HW
    return pictures_NCHW


def make_transformer(seed: int, layers: int = LAYERS) -> Any:
    """With random weights."""
    import diffusers

    kinds: Any = diffusers
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kinds.SD3Transformer2DModel(
            sample_size=SIDE,
            patch_size=PATCH,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=HEADS * HEAD_DIM,
            pooled_projection_dim=TEXT_DIM,
            pos_embed_max_size=SIDE,
        ).eval()


def train_denoiser(steps: int, seed: int, *, layers: int = LAYERS, batch: int = BATCH) -> Any:
    """A transformer that predicts noise minus picture along straight paths between the two.

    Noise levels are drawn as for Stable Diffusion 3 (Esser et al. 2024: logit-normal).
    """
    transformer = make_transformer(seed, layers)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(transformer.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        pictures = make_pictures(batch, generator)
        noise = torch.randn(pictures.shape, generator=generator)
        sigma_N = torch.sigmoid(torch.randn(batch, generator=generator))
        found = denoise(transformer, mix(pictures, noise, sigma_N), sigma_N)
        loss: Any = (found - (noise - pictures)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return transformer


def mix(pictures_NCHW: Tensor, noise_NCHW: Tensor, sigma_N: Tensor) -> Tensor:
    """What lies between pictures (sigma 0) and noise (sigma 1)."""
    sigma = sigma_N.view(-1, 1, 1, 1)
    return (1 - sigma) * pictures_NCHW + sigma * noise_NCHW


def denoise(transformer: Any, latents_NCHW: Tensor, sigma_N: Tensor) -> Tensor:
    """One pass of the transformer, [N, C, H, W]."""
    count = len(latents_NCHW)
    found: Tensor = transformer(
        hidden_states=latents_NCHW,
        encoder_hidden_states=torch.zeros(count, 1, TEXT_DIM),
        pooled_projections=torch.zeros(count, TEXT_DIM),
        timestep=1000 * sigma_N,
        return_dict=False,
    )[0]
    return found


@dataclass(slots=True)
class InnerStates:
    """States [N, T, D] of the picture's tokens, one tensor for each pass of the transformer."""

    received: list[Tensor] = field(default_factory=list)
    """What a server of all blocks between the first and the last one gets."""
    returned: list[Tensor] = field(default_factory=list)
    """What it gives back."""


@contextmanager
def watch_inner_blocks(transformer: Any) -> Iterator[InnerStates]:
    """Collect the states of passes until the end."""
    seen = InnerStates()

    def note_input(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.received.append(kwargs["hidden_states"].detach().clone())

    def note_output(_: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        seen.returned.append(output[1].detach().clone())

    inner = transformer.transformer_blocks[1:-1]
    hooks = [
        inner[0].register_forward_pre_hook(note_input, with_kwargs=True),
        inner[-1].register_forward_hook(note_output),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def paint(transformer: Any, count: int, steps: int, seed: int) -> tuple[Tensor, InnerStates]:
    """Pictures [N, C, H, W] by diffusers' pipeline from noise of `seed`, and the inner states."""
    import diffusers

    kinds: Any = diffusers
    names = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3")
    diffusion = kinds.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=kinds.FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys((*names, *tokenizers)),
    )
    diffusion.set_progress_bar_config(disable=True)
    with watch_inner_blocks(transformer) as seen:
        pictures: Tensor = diffusion(
            prompt_embeds=torch.zeros(count, 1, TEXT_DIM),
            pooled_prompt_embeds=torch.zeros(count, TEXT_DIM),
            height=LATENT_PIXELS * SIDE,
            width=LATENT_PIXELS * SIDE,
            guidance_scale=1,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).images
    return pictures, seen
