"""Pipelines over nodes that hold pieces give what transformers' pipelines give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel

from nesa_node import SwarmPipeline
from nesa_node.client.graphs.swarm_pipeline import check_picture
from nesa_node.core.errors import ConfigError, UnsupportedModelError
from nesa_node.core.ids import split_evenly
from tests.swarms import in_process_swarm

HF: Any = transformers
WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "nodes",
    "hold",
    "blocks",
    "of",
    "a",
    "model",
)
BERT: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}
TEXTS = ["nodes hold blocks", "a model of blocks"]
SIZE = {"height": 32, "width": 32}


@dataclass(frozen=True)
class Case:
    task: str
    model: str
    config: Callable[[], transformers.PreTrainedConfig]
    processor: Callable[[], Any] | None = None
    inputs: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    pieces: int = 3
    image_size: int = 32


def bert(**more: Any) -> Callable[[], transformers.PreTrainedConfig]:
    return lambda: HF.BertConfig(**BERT, **more)


CASES = [
    Case("text-classification", "BertForSequenceClassification", bert(), inputs=TEXTS, pieces=2),
    Case("token-classification", "BertForTokenClassification", bert(), inputs=TEXTS),
    Case("fill-mask", "BertForMaskedLM", bert(), inputs=["nodes [MASK] blocks"], pieces=5),
    Case("feature-extraction", "BertModel", bert(), inputs=TEXTS),
    Case(
        "zero-shot-classification",
        "BertForSequenceClassification",
        bert(id2label={0: "entailment", 1: "neutral"}, label2id={"entailment": 0, "neutral": 1}),
        inputs=TEXTS[0],
        options={"candidate_labels": ["nodes", "model"], "hypothesis_template": "a {}"},
    ),
    Case(
        "image-classification",
        "ViTForImageClassification",
        lambda: HF.ViTConfig(**VISION, num_labels=3),
        lambda: HF.ViTImageProcessorPil(size=SIZE),
        pieces=5,
    ),
    Case(
        "image-classification",
        "ResNetForImageClassification",
        lambda: HF.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3
        ),
        lambda: HF.ConvNextImageProcessorPil(size={"shortest_edge": 32}),
    ),
    Case(
        "image-classification",
        "ConvNextForImageClassification",
        lambda: HF.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2, num_labels=3),
        lambda: HF.ConvNextImageProcessorPil(size={"shortest_edge": 32}),
        pieces=2,
    ),
    Case(
        "image-classification",
        "SwinForImageClassification",
        lambda: HF.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[1, 2],
            num_heads=[1, 2],
            window_size=4,
            num_labels=3,
        ),
        lambda: HF.ViTImageProcessorPil(size=SIZE),
    ),
    Case(
        "image-feature-extraction",
        "ViTModel",
        lambda: HF.ViTConfig(**VISION),
        lambda: HF.ViTImageProcessorPil(size=SIZE),
        pieces=2,
    ),
    Case(
        "object-detection",
        "DetrForObjectDetection",
        lambda: HF.DetrConfig(
            backbone_config=RESNET,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=4,
            num_labels=3,
        ),
        lambda: HF.DetrImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96}),
        options={"threshold": 0.0},
    ),
    Case(
        "image-segmentation",
        "SegformerForSemanticSegmentation",
        lambda: HF.SegformerConfig(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=3,
        ),
        lambda: HF.SegformerImageProcessorPil(size={"height": 64, "width": 64}),
        pieces=5,
    ),
    Case(
        "zero-shot-image-classification",
        "CLIPModel",
        lambda: HF.CLIPConfig(
            text_config={
                **BERT,
                "num_hidden_layers": 1,
                "eos_token_id": 3,
                "bos_token_id": 2,
                "pad_token_id": 0,
            },
            vision_config={**VISION, "num_hidden_layers": 1},
        ),
        lambda: HF.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIZE),
        options={"candidate_labels": ["nodes", "model of blocks"]},
    ),
]


def mask2former(subtask: str, pieces: int) -> ParameterSet:
    """A backbone of windows, deformable attention and masks as queries."""
    case = Case(
        "image-segmentation",
        "Mask2FormerForUniversalSegmentation",
        lambda: HF.Mask2FormerConfig(
            backbone_config=HF.SwinConfig(
                image_size=64,
                patch_size=2,
                embed_dim=16,
                depths=[1, 1, 1, 1],
                num_heads=[1, 2, 2, 4],
                window_size=4,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            hidden_dim=32,
            feature_size=32,
            mask_feature_size=32,
            num_queries=5,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=2,
            encoder_feedforward_dim=32,
            dim_feedforward=32,
            init_std=0.3,
            init_xavier_std=1.5,
            num_labels=4,
        ),
        lambda: HF.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}),
        options={"subtask": subtask, "threshold": 0.2},
        pieces=pieces,
        image_size=64,
    )
    return pytest.param(case, id=f"{subtask}-Mask2Former-{pieces}", marks=pytest.mark.slow)


MASKS = [mask2former("semantic", 2), mask2former("panoptic", 3), mask2former("instance", 5)]


FAST_MODELS = {
    "BertForSequenceClassification",
    "ViTForImageClassification",
    "SegformerForSemanticSegmentation",
    "MarianMTModel",
}
"""The rest is for slow tests alone."""


def in_pieces(cases: Sequence[Case]) -> list[ParameterSet]:
    """Each case in its own number of pieces, and as slow tests in 2, 3 and 5."""
    return [
        pytest.param(
            replace(case, pieces=pieces),
            id=f"{case.task}-{case.model}-{pieces}",
            marks=() if pieces == case.pieces and case.model in FAST_MODELS else pytest.mark.slow,
        )
        for case in cases
        for pieces in (2, 3, 5)
    ]


def picture() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    return Image.fromarray(values)


def save(case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(HF, case.model)(case.config())
    model.save_pretrained(folder)
    if case.processor is not None:
        case.processor().save_pretrained(folder)
    if case.processor is None or case.task.startswith("zero-shot") or case.task.endswith("to-text"):
        text = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "[UNK]"))
        text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        text.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names = ("pad", "unk", "cls", "sep", "mask")
        special = {f"{name}_token": f"[{name.upper()}]" for name in names}
        tokenizer = HF.PreTrainedTokenizerFast(
            tokenizer_object=text, model_max_length=32, **special
        )
        tokenizer.save_pretrained(folder)


@contextmanager
def serving(case: Case, folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    save(case, folder / "model")
    spans = split_evenly(case.pieces, 2)
    options = {"pieces": case.pieces, "image_size": case.image_size}
    with in_process_swarm(folder / "model", spans, folder, **options) as addresses:
        yield folder / "model", addresses


def flatten(answer: Any) -> list[Any]:
    """Numbers and words of an answer, in order; of pictures their pixels."""
    if isinstance(answer, dict):
        return [each for key in answer for each in flatten(answer[key])]
    if isinstance(answer, list | tuple):
        return [each for one in answer for each in flatten(one)]
    if isinstance(answer, Image.Image):
        return [bytes(answer.tobytes())]
    if isinstance(answer, torch.Tensor):
        return list(answer.flatten().tolist())
    return [float(answer) if isinstance(answer, np.floating | float) else answer]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [*in_pieces(CASES), *MASKS])
def test_answers_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    given = picture() if case.inputs is None else case.inputs
    with serving(case, tmp_path) as (folder, addresses):
        expected = flatten(HF.pipeline(case.task, model=str(folder))(given, **case.options))
        with SwarmPipeline(case.task, folder, initial_peers=addresses) as remote:
            found = flatten(remote(given, **case.options))
    assert expected
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == (pytest.approx(other, abs=1e-5) if isinstance(other, float) else other)


def test_a_long_text_is_no_picture() -> None:
    for text in ("a " * 600, "\0", "a" * 5000):
        check_picture(text)


def test_what_a_pipeline_refuses(tmp_path: Path) -> None:
    case = CASES[5]
    with serving(case, tmp_path) as (folder, addresses):
        save(CASES[0], tmp_path / "tokenizer")
        for file in (tmp_path / "tokenizer").glob("tokenizer*"):
            file.rename(folder / file.name)
        with pytest.raises(UnsupportedModelError, match="does not use for text-classification"):
            SwarmPipeline("text-classification", folder, initial_peers=addresses)
        with pytest.raises(ConfigError, match="unknown task 'guess'"):
            SwarmPipeline("guess", folder, initial_peers=addresses)
        with SwarmPipeline(case.task, folder, initial_peers=addresses) as remote:
            bomb = tmp_path / "bomb.png"
            Image.new("1", (10_000, 10_000)).save(bomb)
            with pytest.raises(ConfigError, match="10000 x 10000 pixels; at most 64 megapixels"):
                remote(str(bomb))
            (tmp_path / "none.png").write_bytes(b"no picture")
            with pytest.raises(ConfigError, match="cannot be read as a picture"):
                remote(str(tmp_path / "none.png"))
            assert len(remote(picture())) == 3
