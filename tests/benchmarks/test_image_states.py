"""Pictures are recovered of inner states, and states of another picture recover nothing.

Weights are random: the first blocks pass the noisy latents on, which is what attacks read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.denoiser import (
    PATCH,
    denoise,
    make_pictures,
    make_transformer,
    mix,
    paint,
    train_denoiser,
    watch_inner_blocks,
)
from benchmarks.image_states import ATTACKS, attack_steps, compare, cut_patches

SIGMAS = (0.98, 0.6, 0.1)
"""Shares of noise: of a first, a middle and a late step."""
OWN, SECRET = 96, 24
SEEN = ("received", "returned")


@pytest.fixture(scope="module")
def transformer() -> Any:
    return make_transformer(0, layers=4)


@pytest.fixture(scope="module")
def attacked(transformer: Any) -> Callable[[str, str], dict[str, list[float]]]:
    """Figures of an attack by step; the latents lie on the straight path to the pictures."""
    generator = torch.Generator().manual_seed(0)
    pictures = [make_pictures(count, generator) for count in (OWN, SECRET)]
    seen = []
    for made in pictures:
        noise = torch.randn(made.shape, generator=generator)
        with torch.inference_mode(), watch_inner_blocks(transformer) as states:
            for sigma in SIGMAS:
                sigma_N = torch.full((len(made),), sigma)
                denoise(transformer, mix(made, noise, sigma_N), sigma_N)
        seen.append(states)
    own, secret = (made.mean(1) for made in pictures)

    def attack(where: str, name: str, *, shift: int = 0) -> dict[str, list[float]]:
        states = [each.roll(shift, 0) for each in getattr(seen[1], where)]
        return attack_steps(ATTACKS[name], getattr(seen[0], where), own, states, secret, PATCH)

    return attack


@pytest.mark.parametrize("where", SEEN)
@pytest.mark.parametrize("name", ATTACKS)
def test_pictures_become_visible_in_late_steps(attacked: Any, where: str, name: str) -> None:
    found = attacked(where, name)
    assert found["own"][0] < found["own"][1] < found["own"][2]
    assert found["own"][2] > {"principal component": 0.5, "linear map": 0.9}[name]
    assert found["own"][2] > found["chance"][2] + 0.3
    assert found["named"][2] > 0.3


@pytest.mark.parametrize("where", SEEN)
@pytest.mark.parametrize("name", ATTACKS)
def test_states_of_another_picture_score_at_chance(attacked: Any, where: str, name: str) -> None:
    found = attacked(where, name, shift=1)
    assert np.abs(np.subtract(found["own"], found["chance"])).max() < 0.1
    assert max(found["named"]) < 0.2


def test_pipeline_of_diffusers_is_attacked_at_each_step(transformer: Any) -> None:
    own, own_states = paint(transformer, OWN, 3, seed=1)
    secret, states = paint(transformer, SECRET, 3, seed=2)
    grey = own.mean(1), secret.mean(1)
    for where in SEEN:
        own_TD, secret_TD = getattr(own_states, where), getattr(states, where)
        found = attack_steps(ATTACKS["linear map"], own_TD, grey[0], secret_TD, grey[1], PATCH)
        assert len(found["own"]) == 3
        # Random weights take little of the noise away.
        assert min(found["own"]) > 0.9 > 0.2 > max(found["chance"])


def test_inner_states_are_those_between_the_first_and_the_last_block(transformer: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = make_pictures(2, generator)
    blocks: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, args, output: blocks.append(output[1]))
        for block in transformer.transformer_blocks
    ]
    with torch.inference_mode(), watch_inner_blocks(transformer) as seen:
        denoise(transformer, latents, torch.full((2,), 0.5))
    for hook in hooks:
        hook.remove()
    assert torch.equal(seen.received[0], blocks[0])
    assert torch.equal(seen.returned[0], blocks[-2])
    denoise(transformer, latents, torch.full((2,), 0.5))
    assert len(seen.received) == 1, "hooks were left behind"


def test_training_depends_on_the_seed_alone_and_predicts_noise_minus_picture() -> None:
    trained = [train_denoiser(25, seed, layers=3, batch=16) for seed in (1, 1, 2)]
    weights = [each.proj_out.weight for each in trained]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    generator = torch.Generator().manual_seed(3)
    pictures = make_pictures(64, generator)
    noise, sigma_N = torch.randn(pictures.shape, generator=generator), torch.full((64,), 0.5)
    latents, wanted = mix(pictures, noise, sigma_N), noise - pictures
    with torch.inference_mode():
        errors = [
            float((denoise(each, latents, sigma_N) - wanted).square().mean())
            for each in (make_transformer(1, layers=3), trained[0])
        ]
    assert errors[1] < 0.8 * errors[0]


def test_correlations_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    found, pictures = rng.normal(size=(2, 5, 30))
    table = np.abs(np.corrcoef(found, pictures)[:5, 5:])
    compared = compare(torch.from_numpy(found), torch.from_numpy(pictures))
    assert compared.own == pytest.approx(table.diagonal().mean())
    assert compared.chance == pytest.approx((table.sum() - table.trace()) / 20)
    assert compared.named == (table.argmax(1) == np.arange(5)).mean()


def test_patches_are_in_the_order_of_convolutions() -> None:
    pictures = torch.randn(3, 8, 12)
    unfolded = torch.nn.functional.unfold(pictures[:, None], PATCH, stride=PATCH)
    assert torch.equal(cut_patches(pictures, PATCH), unfolded.transpose(1, 2))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="patches of 2"):
        cut_patches(torch.zeros(1, 5, 4), 2)
    with pytest.raises(ValueError, match="two or more"):
        compare(torch.zeros(1, 4), torch.zeros(1, 4))
