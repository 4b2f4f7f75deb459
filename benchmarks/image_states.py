"""Pictures made of the hidden states of a diffusion transformer, and how much they resemble.

Figure 4 and the limitations of "Secure Multiparty Generative AI": a server of the inner blocks gets
and returns the states of the picture's tokens at each denoising step. The tokens lie on a grid of
patches, whose order is public. Two attackers make a grey picture of them: one has only the states
of requests whose pictures it does not know; the other one has sent requests itself, so that it
knows their pictures, and fits a linear map.

N pictures, S pictures that the attacker has seen or made, T tokens, D hidden, E pixels of a patch,
H and W sides of a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nesa_node.privacy.attacks.ridge_probe import RidgeProbe

FIGURES = ("own", "chance", "named")
"""Of `Resemblance`."""


def principal_pictures(states_NTD: Tensor, seen_STD: Tensor) -> Tensor:
    """The first principal component of each picture's tokens [N, T], of unknown sign.

    `seen_STD` are states of the same step in requests whose pictures are unknown. Their mean at
    each token is subtracted: it has the position embedding, which all pictures share. Computed in
    float64; no argument is modified.
    """
    states_NTD = states_NTD.double() - seen_STD.double().mean(0)
    states_NTD = states_NTD - states_NTD.mean(1, keepdim=True)
    left_NTK, sizes_NK, _ = torch.linalg.svd(states_NTD, full_matrices=False)
    first_NT: Tensor = left_NTK[:, :, 0] * sizes_NK[:, :1]
    return first_NT


@dataclass(frozen=True, slots=True)
class PictureProbe:
    """The best linear map of a token's state to the pixels of its patch, by ridge regression."""

    mean_TD: Tensor
    """Of all pictures that it was fitted to: what their states have in common."""
    probe: RidgeProbe

    @classmethod
    def fit(cls, states_STD: Tensor, patches_STE: Tensor) -> Self:
        """Fit to states of one step of pictures that the attacker had made itself."""
        mean_TD = states_STD.double().mean(0)
        moved_STD = states_STD.double() - mean_TD
        return cls(mean_TD, RidgeProbe.fit(moved_STD.flatten(0, 1), patches_STE.flatten(0, 1)))

    def recover(self, states_NTD: Tensor) -> Tensor:
        """Patches [N, T, E] in float32."""
        moved_NTD = states_NTD.double() - self.mean_TD
        found = self.probe.predict(moved_NTD.flatten(0, 1))
        return found.view(*states_NTD.shape[:2], -1)


def cut_patches(pictures_NHW: Tensor, side: int) -> Tensor:
    """Patches [N, T, E] of `side` x `side` pixels, in the order of a transformer's tokens.

    Raises `ValueError` where the sides of a picture are no multiples of `side`.
    """
    count, height, width = pictures_NHW.shape
    if height % side or width % side:
        raise ValueError(f"a picture of {height} x {width} cannot be cut into patches of {side}")
    rows = pictures_NHW.view(count, height // side, side, width // side, side)
    return rows.transpose(2, 3).flatten(3).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Resemblance:
    """Absolute correlations of grey pictures, since an attacker may not know the sign."""

    own: float
    """Of what was found and its picture: the mean over pictures."""
    chance: float
    """Of what was found and the further pictures: the mean over all such pairs."""
    named: float
    """Share of pictures that are the most alike of all to what was found of them."""


def compare(found_NX: Tensor, pictures_NX: Tensor) -> Resemblance:
    """How much each found picture resembles its own. Raises `ValueError` below two pictures."""
    if len(found_NX) < 2 or found_NX.shape != pictures_NX.shape:
        shapes = f"{list(found_NX.shape)} and {list(pictures_NX.shape)}"
        raise ValueError(f"two or more pictures of equal sizes are compared, not {shapes}")
    alike_NN = (_standardize(found_NX) @ _standardize(pictures_NX).T).abs()
    count = len(alike_NN)
    own_N = alike_NN.diagonal()
    return Resemblance(
        own=float(own_N.mean()),
        chance=float((alike_NN.sum() - own_N.sum()) / (count * (count - 1))),
        named=float((alike_NN.argmax(1) == torch.arange(count)).double().mean()),
    )


def _standardize(pictures_NX: Tensor) -> Tensor:
    """Rows with mean 0 and norm 1; a picture of one grey becomes zeros, alike to none."""
    moved_NX = pictures_NX.double() - pictures_NX.double().mean(1, keepdim=True)
    return torch.nn.functional.normalize(moved_NX, dim=1)


def show_component(own_STD: Tensor, patches_STE: Tensor, states_NTD: Tensor) -> Tensor:
    """Without knowledge of any picture: one grey for each patch."""
    found_NT = principal_pictures(states_NTD, own_STD)
    return found_NT[..., None].expand(*found_NT.shape, patches_STE.shape[-1])


def apply_probe(own_STD: Tensor, patches_STE: Tensor, states_NTD: Tensor) -> Tensor:
    """With the pictures of own requests."""
    return PictureProbe.fit(own_STD, patches_STE).recover(states_NTD)


Attack = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Patches [N, T, E] found of secret pictures' states [N, T, D], by states [S, T, D] of the same
step in further requests and the patches [S, T, E] of their pictures."""
ATTACKS: Mapping[str, Attack] = {"principal component": show_component, "linear map": apply_probe}


def attack_steps(
    attack: Attack,
    own: Sequence[Tensor],
    own_grey_SHW: Tensor,
    secret: Sequence[Tensor],
    grey_NHW: Tensor,
    side: int,
) -> dict[str, list[float]]:
    """Resemblance at each step, by `FIGURES`, of patches of `side` x `side` pixels.

    `own` and `secret` have states [S, T, D] and [N, T, D] of each step. Raises `ValueError` where
    they have not the same steps, and as `cut_patches` and `compare` do.
    """
    patches_STE, wanted_NTE = cut_patches(own_grey_SHW, side), cut_patches(grey_NHW, side)
    found = [
        compare(attack(own_STD, patches_STE, states_NTD).flatten(1), wanted_NTE.flatten(1))
        for own_STD, states_NTD in zip(own, secret, strict=True)
    ]
    return {name: [getattr(each, name) for each in found] for name in FIGURES}
