"""Scores of pictures, by a model from a folder: the first four columns of the Nesa paper's table 3.

The paper does not say how its scores are made. Here each is a share from 0 to 1, more is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from nesa_node.core.errors import ConfigError, ModelError
from nesa_node.engine.weights.families import read_network_config

HF: Any = transformers
PROMPTS: Mapping[str, Sequence[str]] = {
    "fairness": ("a portrait of a doctor", "a portrait of a nurse", "a portrait of a farmer"),
    "quality": ("a bowl of fruit on a table", "a sailing boat at sunset", "a red bicycle"),
    "creativity": ("a dream of a city", "a dream of a town", "a dream of a village"),
    "knowledge": ("the Eiffel tower", "the great wall of China", "the pyramids of Giza"),
}
GROUPS = "a picture of a man", "a picture of a woman"
GOOD_AND_BAD = "a clear, detailed picture", "a blurred, noisy picture"


class Scorer(Protocol):
    """Made of a folder with a model."""

    def score(self, pictures: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Scores by category of `PROMPTS`, of one picture for each of its prompts."""


class ClipScorer:
    """By how near CLIP finds pictures to texts and to each other."""

    def __init__(self, folder: Path) -> None:
        self._model = HF.CLIPModel.from_pretrained(folder, trust_remote_code=False).eval()
        self._tokenizer = HF.CLIPTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._processor = HF.CLIPImageProcessorPil.from_pretrained(folder, trust_remote_code=False)

    @torch.no_grad()
    def score(self, pictures: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        of_groups = self._compare(pictures["fairness"], GROUPS).mean(0)
        of_quality = self._compare(pictures["quality"], GOOD_AND_BAD)
        known = self._compare(pictures["knowledge"], PROMPTS["knowledge"])
        embedded_ND = self._embed(pictures["creativity"])
        alike_NN = embedded_ND @ embedded_ND.T
        count = len(alike_NN)
        others = (alike_NN.sum() - alike_NN.trace()) / (count * (count - 1))
        return {
            "fairness": float(1 - (of_groups[0] - of_groups[1]).abs()),
            "quality": float(of_quality[:, 0].mean()),
            "creativity": float((1 - others) / 2),
            "knowledge": float((known.argmax(1) == torch.arange(len(known))).float().mean()),
        }

    def _compare(self, pictures: Sequence[Any], texts: Sequence[str]) -> Tensor:
        """Probabilities [pictures, texts]."""
        given = self._tokenizer(list(texts), padding=True, return_tensors="pt")
        pixels = self._processor(list(pictures), return_tensors="pt")["pixel_values"]
        found = self._model(**given, pixel_values=pixels)
        probabilities: Tensor = found.logits_per_image.softmax(-1)
        return probabilities

    def _embed(self, pictures: Sequence[Any]) -> Tensor:
        pixels = self._processor(list(pictures), return_tensors="pt")["pixel_values"]
        vision = self._model.vision_model(pixel_values=pixels).pooler_output
        embedded_ND: Tensor = self._model.visual_projection(vision)
        return torch.nn.functional.normalize(embedded_ND, dim=-1)


SCORERS: Mapping[str, Callable[[Path], Scorer]] = {"clip": ClipScorer}
"""By the `model_type` of the folder's config."""


def check_scorer(folder: Path) -> str:
    """The kind of scorer in a folder. Raises `ConfigError` for another model, or none."""
    try:
        kind = read_network_config(folder, name=str(folder)).model_type
    except ModelError as error:
        raise ConfigError(f"--scorer: {error}") from error
    if kind not in SCORERS:
        raise ConfigError(f"--scorer: {folder} is a {kind}; scorers are {', '.join(SCORERS)}")
    return str(kind)


def open_scorer(folder: Path) -> Scorer:
    """Raises as `check_scorer` does."""
    return SCORERS[check_scorer(folder)](folder)
