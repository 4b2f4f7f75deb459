"""Scores of pictures, with a small CLIP of random weights, against transformers' own pipeline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from benchmarks.picture_scores import GOOD_AND_BAD, PROMPTS, Scorer, check_scorer, open_scorer
from nesa_node.core.errors import ConfigError
from tests.e2e.test_networks import save
from tests.engine.tiny_pipelines import SIZES, make_tokenizer

HF: Any = transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 32}
    config = HF.CLIPConfig(
        text_config=text | SIZES | {"pad_token_id": 1},
        vision_config=vision | {"patch_size": 8, "num_attention_heads": 4},
        projection_dim=32,
    )
    HF.CLIPModel(config).save_pretrained(made)
    make_tokenizer().save_pretrained(made)
    size = {"height": 32, "width": 32}
    HF.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Scorer:
    return open_scorer(folder)


def pictures(seed: int) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    return {
        category: [
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in prompts
        ]
        for category, prompts in PROMPTS.items()
    }


def test_quality_is_what_zero_shot_classification_says(folder: Path, scorer: Scorer) -> None:
    given = pictures(1)
    classify = HF.pipeline(
        "zero-shot-image-classification",
        model=HF.CLIPModel.from_pretrained(folder).eval(),
        tokenizer=HF.CLIPTokenizer.from_pretrained(folder),
        image_processor=HF.CLIPImageProcessorPil.from_pretrained(folder),
    )
    found = classify(
        given["quality"], candidate_labels=list(GOOD_AND_BAD), hypothesis_template="{}"
    )
    good = [
        next(each["score"] for each in labels if each["label"] == GOOD_AND_BAD[0])
        for labels in found
    ]
    assert math.isclose(scorer.score(given)["quality"], sum(good) / len(good), abs_tol=1e-5)


def test_scores_are_shares_and_equal_pictures_are_not_creative(scorer: Scorer) -> None:
    given = pictures(2)
    scores = scorer.score(given)
    assert scores.keys() == PROMPTS.keys()
    assert all(0 <= each <= 1 for each in scores.values())
    assert scores["creativity"] > 1e-4
    given["creativity"] = given["creativity"][:1] * 3
    assert abs(scorer.score(given)["creativity"]) < 1e-6


def test_folders_of_other_models_score_nothing(folder: Path, tmp_path: Path) -> None:
    assert check_scorer(folder) == "clip"
    save("ViTForImageClassification", tmp_path / "vit")
    with pytest.raises(ConfigError, match="is a vit; scorers are clip"):
        check_scorer(tmp_path / "vit")
    with pytest.raises(ConfigError, match="--scorer: "):
        check_scorer(tmp_path)
