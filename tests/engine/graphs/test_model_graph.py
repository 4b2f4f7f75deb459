"""Graphs of models of transformers, by their config alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from nesa_node.core.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    UnsupportedModelError,
)
from nesa_node.engine.graphs.model_graph import RequestSizes, capture_model
from nesa_node.engine.graphs.text_to_image import TYPICAL_STEPS
from nesa_node.sharding.capture import CapturedModel
from tests.engine.tiny_pipelines import save_pipeline

SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
MODELS: dict[str, PreTrainedConfig] = {
    "ViTForImageClassification": transformers.ViTConfig(
        **SMALL, num_hidden_layers=2, image_size=32, patch_size=8
    ),
    "BertForSequenceClassification": transformers.BertConfig(**SMALL, num_hidden_layers=2),
    "ResNetForImageClassification": transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "T5ForConditionalGeneration": transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    ),
    "WhisperForConditionalGeneration": transformers.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    ),
    "CLIPModel": transformers.CLIPConfig(
        text_config={**SMALL, "num_hidden_layers": 1},
        vision_config={**SMALL, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
    ),
    "LlamaForCausalLM": transformers.LlamaConfig(**SMALL, num_hidden_layers=2, vocab_size=100),
}


def write_config(name: str, folder: Path) -> Path:
    config = MODELS[name]
    config.architectures = [name]
    config.save_pretrained(folder)
    return folder


def _capture(folder: Path, **sizes: int) -> CapturedModel:
    sizes_given = RequestSizes(**sizes)
    return capture_model(folder, name="model", dtype=torch.float32, sizes=sizes_given)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_captured(name: str, tmp_path: Path) -> None:
    graph = _capture(write_config(name, tmp_path), tokens=16).graph
    with torch.device("meta"):
        model = getattr(transformers, name)(MODELS[name])
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    assert weights * 0.9 <= graph.total_parameter_bytes <= weights + buffers
    assert any(value.is_output for value in graph.values)
    assert len(graph) > 10


def test_sizes_of_a_request(tmp_path: Path) -> None:
    folder = write_config("BertForSequenceClassification", tmp_path)
    one = _capture(folder, batch=1, tokens=16).graph
    four = _capture(folder, batch=4, tokens=16).graph
    longest = _capture(folder, tokens=10_000).graph
    assert four.total_flop == pytest.approx(4 * one.total_flop)
    assert longest.values[0].size_bytes == 8 * 512
    folder = write_config("ResNetForImageClassification", tmp_path / "images")
    small = _capture(folder, image_size=32).graph
    assert small.values[0].size_bytes == 4 * 3 * 32 * 32
    assert _capture(folder).graph.values[0].size_bytes == 4 * 3 * 224 * 224


def test_an_image_of_the_wrong_size(tmp_path: Path) -> None:
    folder = write_config("ViTForImageClassification", tmp_path)
    with pytest.raises(UnsupportedFeatureError, match=r"ViT.*image size \(33\*33\)"):
        _capture(folder, image_size=33)


@pytest.mark.parametrize(
    ("raw", "error", "what"),
    [
        (None, ModelNotFoundError, "does not exist"),
        ([1], CorruptCheckpointError, "no JSON object"),
        ({}, UnsupportedModelError, "no model_type"),
        ({"model_type": "nonesuch"}, CorruptCheckpointError, "nonesuch"),
        ({"model_type": "vit"}, UnsupportedModelError, "none named"),
        ({"model_type": "vit", "architectures": ["os.system"]}, UnsupportedModelError, "no class"),
        ({"model_type": "vit", "architectures": ["ViTConfig"]}, UnsupportedModelError, "no class"),
        ({"model_type": "vit", "num_labels": 10**9}, CorruptCheckpointError, "num_labels"),
        (
            {"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": "wide"},
            CorruptCheckpointError,
            "wide",
        ),
        (
            {"model_type": "patchtst", "architectures": ["PatchTSTModel"]},
            UnsupportedModelError,
            "takes past_values",
        ),
    ],
)
def test_configs_that_name_no_model(
    raw: object, error: type[Exception], what: str, tmp_path: Path
) -> None:
    if raw is not None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(error, match=what):
        _capture(tmp_path)


@pytest.mark.parametrize(
    "kind", [{"model_type": "own", "architectures": ["Own"]}, {"_class_name": "Own"}]
)
def test_code_in_a_checkpoint_is_not_run(kind: dict[str, Any], tmp_path: Path) -> None:
    raw = {**kind, "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises((CorruptCheckpointError, UnsupportedModelError)):
        _capture(tmp_path)
    assert not (tmp_path / "ran").exists()


UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "layers_per_block": 1,
}


def test_models_of_diffusers(tmp_path: Path) -> None:
    raw = {"_class_name": "UNet2DConditionModel", **UNET}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    graph = _capture(tmp_path, batch=2, tokens=5).graph
    given = sorted(value.size_bytes for value in graph.values if value.producer is None)
    assert given == [4 * 2, 4 * 2 * 5 * 16, 4 * 2 * 4 * 8 * 8]
    assert sum(value.is_output for value in graph.values) == 1


@pytest.mark.parametrize(
    ("raw", "error", "what"),
    [
        ({"_class_name": "StableDiffusionPipeline"}, UnsupportedModelError, "no model"),
        ({"_class_name": "os"}, UnsupportedModelError, "no model"),
        (
            {"_class_name": "UNet2DConditionModel", **UNET, "up_block_types": ["Other"]},
            CorruptCheckpointError,
            "cannot be made",
        ),
        ({"_class_name": "T5FilmDecoder"}, UnsupportedModelError, "takes decoder_input_tokens"),
    ],
)
def test_configs_that_diffusers_refuses(
    raw: object, error: type[Exception], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(error, match=what):
        _capture(tmp_path)


def test_a_pipeline_is_several_networks(tmp_path: Path) -> None:
    save_pipeline("StableDiffusionXLPipeline", tmp_path)
    captured = _capture(tmp_path)
    graph = captured.graph
    assert [(share.name, share.runs) for share in graph.shares] == [
        ("text_encoder", 1),
        ("text_encoder_2", 1),
        ("unet", TYPICAL_STEPS),
        ("vae", 1),
    ]
    for share in graph.shares:
        modules = {
            node.meta["nn_module_stack"].popitem()[1][0].split(".")[0]
            for operation in share.operations
            for name in captured.nodes[operation]
            for node in captured.program.graph.nodes
            if node.name == name and node.meta.get("nn_module_stack")
        }
        assert modules <= {share.name, ""}
