"""Which checkpoints are language models, and which are networks to be cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from nesa_node.engine.weights.families import FAMILIES
from nesa_node.engine.weights.language_models import is_language_model


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoders_of_all_families(kind: str, tmp_path: Path) -> None:
    for named in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], MODEL_MAPPING_NAMES[kind], None):
        raw = {"model_type": kind} | ({} if named is None else {"architectures": [named]})
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert is_language_model(tmp_path, name="m"), named


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("gpt2", "GPT2ForTokenClassification"),
        ("vit", "ViTForImageClassification"),
        ("bert", "BertLMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        (None, "LlamaForCausalLM"),
        ([], "LlamaForCausalLM"),
    ],
)
def test_other_networks(kind: object, named: str, tmp_path: Path) -> None:
    raw = {"model_type": kind, "architectures": [named]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not is_language_model(tmp_path, name="m")
